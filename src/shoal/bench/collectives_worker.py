"""What each process of `shoal bench collectives` runs: `python -m shoal.bench.collectives_worker REQUEST`."""

import os
import sys

from torch.distributed.elastic.multiprocessing.errors import record

from shoal.bench.collectives import measure_as_rank
from shoal.bench.collectives_request import Request
from shoal.launch.join import is_first
from shoal.launch.processes import MISTAKE, begin_rank, leave_result, leave_sentence
from shoal.mistakes import UserMistake


@record
def main() -> None:
    begin_rank()
    # Standard output belongs to the launcher, whatever the libraries below have to say.
    os.dup2(2, 1)
    # The launcher prints the traceback of the rank that failed first, once.
    sys.excepthook = lambda *_: None
    try:
        measured = measure_as_rank(Request.from_text(sys.argv[1]))
        if is_first():
            leave_result(measured.as_dict())
    except UserMistake as mistake:
        leave_sentence(MISTAKE, str(mistake))
        sys.exit(2)
    # As in `launch.worker`: threads of torch's have been seen to abort an interpreter that ends the usual way.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
