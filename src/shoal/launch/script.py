"""The program of each rank of a custom loop: the user's own script, run by our launcher.

python -m shoal.launch.script LOGS path|module TARGET [ARGUMENTS…]
"""

import os
import runpy
import sys
from pathlib import Path
from typing import NoReturn

import shoal.launch.interrupts  # noqa: F401
from shoal.imports import importing

with importing("torch"):
    import torch

    from shoal.launch.custom import STATUS_STOPPED, current_run, explain
    from shoal.launch.processes import FAILED, MISTAKE, begin_rank, record_errors, report_failure, report_result
    from shoal.launch.rank import send_output_to
    from shoal.mistakes import RunFailed, UserMistake


@record_errors
def main() -> None:
    begin_rank()
    logs, kind, target, *arguments = sys.argv[1:]
    first = os.environ["RANK"] == "0"
    # The launcher reports the error of the rank that failed first, once.
    sys.excepthook = lambda *_: None
    if not first:
        send_output_to(Path(logs) / f"rank-{os.environ['RANK']}.log")
        sys.excepthook = sys.__excepthook__
    sys.argv = [target, *arguments]
    status = 0
    try:
        if kind == "module":
            sys.path.insert(0, os.getcwd())
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(target).resolve().parent))
            runpy.run_path(target, run_name="__main__")
    except SystemExit as ended:
        status = _status(ended)
    except (UserMistake, RunFailed, torch.OutOfMemoryError) as error:
        failure = explain(error)
        _end(failure)
        # A restart would not help, so the process exits with status 0: the agent restarts after any failure.
        report_failure(MISTAKE if isinstance(failure, UserMistake) else FAILED, str(failure))
        _exit(0)
    except BaseException as error:
        _end(error)
        raise
    if status not in (0, STATUS_STOPPED):
        _exit(status)
    _end(None)
    if first:
        report_result({"status": status})
    _exit(0)


def _status(ended: SystemExit) -> int:
    if ended.code is None:
        return 0
    if isinstance(ended.code, int):
        return ended.code
    print(ended.code, file=sys.stderr)
    return 1


def _end(error: BaseException | None) -> None:
    if (run := current_run()) is not None:
        run.close(error)


def _exit(status: int) -> NoReturn:
    # PyTorch threads that are still alive can abort a normal interpreter shutdown.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
