"""Worker process of `shoal bench collectives`: `python -m shoal.bench.collectives_worker REQUEST`."""

import sys
from typing import Any

import shoal.launch.interrupts  # noqa: F401
from shoal.bench.collectives import measure_as_rank
from shoal.bench.collectives_request import Request
from shoal.launch.join import is_first
from shoal.launch.processes import measure_as_worker, record_errors


def measure() -> dict[str, Any] | None:
    measured = measure_as_rank(Request.from_text(sys.argv[1]))
    return measured.as_dict() if is_first() else None


@record_errors
def main() -> None:
    measure_as_worker(measure)


if __name__ == "__main__":
    main()
