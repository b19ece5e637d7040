"""Worker process of `shoal bench collectives`: `python -m shoal.bench.collectives_worker REQUEST`."""

import os
import sys

import shoal.launch.interrupts  # noqa: F401
from shoal.bench.collectives import measure_as_rank
from shoal.bench.collectives_request import Request
from shoal.launch.join import is_first
from shoal.launch.processes import MISTAKE, begin_rank, record_errors, report_failure, report_result
from shoal.mistakes import UserMistake


@record_errors
def main() -> None:
    begin_rank()
    # Standard output belongs to the launcher: redirect what libraries print.
    os.dup2(2, 1)
    # The launcher reports the error of the rank that failed first, once.
    sys.excepthook = lambda *_: None
    try:
        measured = measure_as_rank(Request.from_text(sys.argv[1]))
        if is_first():
            report_result(measured.as_dict())
    except UserMistake as mistake:
        report_failure(MISTAKE, str(mistake))
        sys.exit(2)
    # As in `launch.worker`: PyTorch threads can abort an interpreter that exits normally.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
