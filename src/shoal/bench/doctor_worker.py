"""Worker process of `shoal doctor --devices N`: `python -m shoal.bench.doctor_worker ASKED`."""

import sys
from dataclasses import asdict
from typing import Any

import shoal.launch.interrupts  # noqa: F401
from shoal.bench.doctor import Asked, examine_group
from shoal.launch.join import joined_within
from shoal.launch.processes import measure_as_worker, record_errors
from shoal.observe.progress import Reporter

# Seconds that a rank waits in a collective.
HANG_TIMEOUT = 60


def examine() -> dict[str, Any] | None:
    with joined_within(HANG_TIMEOUT) as ranks:
        findings = examine_group(Asked.from_text(sys.argv[1]), ranks, Reporter(enabled=ranks.first))
        return {"findings": [asdict(one) for one in findings]} if ranks.first else None


@record_errors
def main() -> None:
    measure_as_worker(examine)


if __name__ == "__main__":
    main()
