"""The program of each rank of `launch.local`.

python -m shoal.launch.worker RUN [--resume] [--from CHECKPOINT] [--overrides KEYS] [--command WORDS] [--profile STEPS]
"""

import argparse
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import NoReturn

import shoal.launch.interrupts  # noqa: F401
from shoal.imports import importing

with importing("torch"):
    from shoal.config.load import load_config
    from shoal.config.run import RunDirectory
    from shoal.launch.processes import (
        FAILED,
        HUNG,
        MISTAKE,
        begin_rank,
        record_errors,
        report_failure,
        report_out_of_memory,
        report_result,
    )
    from shoal.launch.rank import Request, begin_logs, run_rank, send_output_to
    from shoal.mistakes import RunFailed, UserMistake
    from shoal.observe.logs import logging_run
    from shoal.resilience.out_of_memory import OutOfMemory
    from shoal.resilience.signals import SAME_REQUEST_FOR_RANKS, StopRequest
    from shoal.train.loop import Summary
    from shoal.train.setup import Start


@record_errors
def main() -> None:
    begin_rank()
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--from", type=Path, dest="start_from")
    parser.add_argument("--overrides", type=json.loads, help="JSON: config keys replaced after running out of memory")
    parser.add_argument("--command", type=json.loads, default=[], help="JSON: how the user started the run")
    parser.add_argument("--profile", type=int)
    given = parser.parse_args()
    run = RunDirectory(given.run)
    # The launcher reports the error of the rank that failed first, once.
    sys.excepthook = lambda *_: None
    terminal = None
    if os.environ["RANK"] != "0":
        terminal = send_output_to(run.logs / f"rank-{os.environ['RANK']}.log")
        sys.excepthook = sys.__excepthook__
    start = Start(given.resume, given.start_from, overrides=given.overrides or {})
    config = load_config(run.config)
    request = Request(config, run, start, command=given.command, profile=given.profile, launched=True)
    try:
        with logging_run(config.log.level), StopRequest(SAME_REQUEST_FOR_RANKS) as stop:
            begin_logs(run, int(os.environ["RANK"]), terminal)
            run_rank(
                request,
                stop=stop,
                tell=partial(report_failure, HUNG),
                on_summary=_report_summary,
                on_out_of_memory=_report_and_exit,
            )
    except (UserMistake, RunFailed) as failure:
        # A restart would not help, so the process exits with status 0: the agent restarts after any failure.
        report_failure(MISTAKE if isinstance(failure, UserMistake) else FAILED, str(failure))
    _exit()


def _report_summary(summary: Summary) -> None:
    if os.environ["RANK"] == "0":
        report_result(summary.as_dict())


def _report_and_exit(failure: OutOfMemory) -> None:
    report_out_of_memory(failure.as_dict())
    _exit()  # at once: the others wait in a collective, so destroying the process group would hang


def _exit() -> NoReturn:
    # PyTorch threads that are still alive can abort a normal interpreter shutdown.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
