"""Start a training run: in this process, in several of this machine's, or as one of those that others started."""

import os
import sys
from pathlib import Path

from shoal.config.effect import without_effect
from shoal.config.run import RunDirectory
from shoal.config.schema import Config
from shoal.launch.join import joined, processes_wanted, started_by_others
from shoal.launch.local import Request, launch
from shoal.observe.progress import Reporter
from shoal.train.inputs import read_inputs
from shoal.train.loop import Summary, train


def start(
    config: Config,
    *,
    runs: Path = Path("runs"),
    resume: bool = False,
    start_from: Path | None = None,
    overwrite: bool = False,
    max_restarts: int = 0,
) -> Summary:
    """Train as `config` says and return how it ended. A run that was asked to stop has `stopped == "signal"`."""
    run = RunDirectory(runs / config.name)
    if started_by_others():
        return train_as_rank(config, run, resume=resume, start_from=start_from, overwrite=overwrite)
    reporter = Reporter(speaks=True)
    processes = processes_wanted(config)
    for note in without_effect(config, processes):
        reporter.warn(note)
    if processes == 1:
        return train_as_rank(config, run, resume=resume, start_from=start_from, overwrite=overwrite)
    # Checked and read here first, so that mistakes are found, and rows made, before there are several processes.
    _check(config, run, reporter, resume=resume, overwrite=overwrite)
    read_inputs(config, reporter)
    run.create(config, overwrite=overwrite)
    return launch(Request(run.path, resume, start_from), processes, max_restarts=max_restarts)


def train_as_rank(
    config: Config, run: RunDirectory, *, resume: bool, start_from: Path | None, overwrite: bool
) -> Summary:
    """Join the other processes, if there are any, and train."""
    first = int(os.environ.get("RANK", "0")) == 0
    reporter = Reporter(speaks=first)
    if first:
        _check(config, run, reporter, resume=resume, overwrite=overwrite)
    inputs = read_inputs(config, reporter)
    with joined(config) as ranks:
        if first:
            run.create(config, overwrite=overwrite)
        ranks.barrier()
        if not first:
            send_output_to(run.logs / f"rank-{ranks.rank}.log")
        return train(config, inputs, run, ranks, resume=resume, start_from=start_from)


def _check(config: Config, run: RunDirectory, reporter: Reporter, *, resume: bool, overwrite: bool) -> None:
    for note in run.check(config, resume=resume, overwrite=overwrite):
        reporter.say(f"Changed since the run began: {note}.")


def send_output_to(path: Path) -> None:
    """What ranks other than the first print would only interleave; it goes to a file of its own."""
    sys.stdout.flush()
    sys.stderr.flush()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
