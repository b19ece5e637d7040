"""Start a training run: in this process, in several processes of this node, or as a rank that torchrun started."""

import os
import sys
from contextlib import nullcontext
from pathlib import Path

from shoal.config.effect import without_effect
from shoal.config.load import load_config
from shoal.config.resolve import with_precision
from shoal.config.run import RunDirectory
from shoal.config.schema import Config
from shoal.launch.join import (
    choose_device,
    first_device,
    heartbeat_file,
    joined,
    local_rank,
    processes_wanted,
    restarted,
    started_by_others,
)
from shoal.launch.local import Request, launch
from shoal.observe.progress import Reporter
from shoal.parallel.device import Device, inspect_device
from shoal.train.inputs import read_inputs
from shoal.train.loop import Summary, train
from shoal.train.preview import Preview, preview
from shoal.train.setup import Start, preflight


def start(
    config: Config,
    *,
    runs: Path = Path("runs"),
    resume: bool = False,
    start_from: Path | None = None,
    overwrite: bool = False,
    max_restarts: int = 0,
) -> Summary:
    """Train and return a summary. A run that was stopped by a signal has `stopped == "signal"`."""
    run = RunDirectory(runs / config.name)
    if started_by_others():
        return train_as_rank(config, run, resume=resume, start_from=start_from, overwrite=overwrite)
    reporter = Reporter(enabled=True)
    device = inspect_device(first_device())
    config = settle_precision(config, run, device, resume=resume)
    processes = processes_wanted(config)
    shrinks = config.train.on_oom == "shrink"
    if processes == 1 and not max_restarts and not shrinks:
        return train_as_rank(config, run, resume=resume, start_from=start_from, overwrite=overwrite)
    _warn(config, processes, reporter)
    # Done here first, so that errors are found and data is tokenized before several processes start.
    _check(config, run, reporter, resume=resume, overwrite=overwrite, start_from=start_from)
    inputs = read_inputs(config, reporter)
    preflight(config, inputs, processes, device, start_from)
    run.create(config, overwrite=overwrite)
    reporter.say(f"Starting {processes} {'process' if processes == 1 else 'processes'} …")
    request = Request(run.path, resume, start_from, patience=config.train.hang_timeout, shrinks=shrinks)
    with run.held():
        return launch(request, processes, max_restarts=max_restarts, warn=reporter.warn)


def dry_run(config: Config) -> Preview:
    """Preview what `start` would do, without a step, an accelerator or a run folder."""
    reporter = Reporter(enabled=True)
    processes = processes_wanted(config)
    device = inspect_device(first_device())
    config = with_precision(config, device.auto_precision)
    _warn(config, processes, reporter)
    inputs = read_inputs(config, reporter)
    preflight(config, inputs, processes, device, None)
    return preview(config, inputs, processes, device)


def train_as_rank(
    config: Config, run: RunDirectory, *, resume: bool, start_from: Path | None, overwrite: bool
) -> Summary:
    """Join the other processes, if there are any, and train."""
    first = int(os.environ.get("RANK", "0")) == 0
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if restarted():  # the run folder exists, unless the first attempt died before
        resume, overwrite = run.exists, False
    device = inspect_device(choose_device(local_rank()))
    auto, config = config, settle_precision(config, run, device, resume=resume)
    reporter = Reporter(enabled=first)
    if first:
        _warn(config, world_size, reporter)
        if config.train.on_oom == "shrink":
            reporter.warn(
                "train.on_oom shrink needs shoal's own launcher, but these processes were started by another, "
                "as by torchrun. If memory runs out, halve the micro-batch of plan.json: train.micro_batch=N --resume."
            )
        _check(config, run, reporter, resume=resume, overwrite=overwrite, start_from=start_from)
    inputs = read_inputs(config, reporter)
    # Only rank 0 verifies the checkpoint, because that hashes every file.
    preflight(config, inputs, world_size, device, start_from if first else None)
    with joined(config) as ranks:
        config = with_precision(auto, ranks.broadcast(config.train.precision))  # GPUs may differ
        if first:
            run.create(config, overwrite=overwrite)
        ranks.barrier()
        if not first:
            send_output_to(run.logs / f"rank-{ranks.rank}.log")
        with run.held() if first else nullcontext():
            start = Start(resume, start_from, restarted())
            return train(config, inputs, run, ranks, start, heartbeats=heartbeat_file())


def settle_precision(config: Config, run: RunDirectory, device: Device, *, resume: bool) -> Config:
    """Resolve `train.precision: auto`. A resumed run keeps its precision, also on another device."""
    if resume and run.exists:
        config = with_precision(config, load_config(run.config).train.precision)
    return with_precision(config, device.auto_precision)


def _warn(config: Config, processes: int, reporter: Reporter) -> None:
    for note in without_effect(config, processes):
        reporter.warn(note)


def _check(
    config: Config,
    run: RunDirectory,
    reporter: Reporter,
    *,
    resume: bool,
    overwrite: bool,
    start_from: Path | None,
) -> None:
    for note in run.check(config, resume=resume, overwrite=overwrite, start_from=start_from):
        reporter.say(f"Changed since the run started: {note}.")


def send_output_to(path: Path) -> None:
    """Redirect the output of ranks other than 0 to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
