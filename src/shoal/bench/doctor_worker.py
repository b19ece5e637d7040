"""Worker process of `shoal doctor --devices N`: `python -m shoal.bench.doctor_worker ASKED`."""

import os
import sys
from dataclasses import asdict

import shoal.launch.interrupts  # noqa: F401
from shoal.bench.doctor import Asked, examine_group
from shoal.launch.join import joined_within
from shoal.launch.processes import MISTAKE, begin_rank, record_errors, report_failure, report_result
from shoal.mistakes import UserMistake
from shoal.observe.progress import Reporter

# Seconds that a rank waits in a collective.
HANG_TIMEOUT = 60


@record_errors
def main() -> None:
    begin_rank()
    # Standard output belongs to the launcher: redirect what libraries print.
    os.dup2(2, 1)
    # The launcher reports the error of the rank that failed first, once.
    sys.excepthook = lambda *_: None
    try:
        with joined_within(HANG_TIMEOUT) as ranks:
            findings = examine_group(Asked.from_text(sys.argv[1]), ranks, Reporter(enabled=ranks.first))
            if ranks.first:
                report_result({"findings": [asdict(one) for one in findings]})
    except UserMistake as mistake:
        report_failure(MISTAKE, str(mistake))
        sys.exit(2)
    # As in `launch.worker`: PyTorch threads can abort an interpreter that exits normally.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
