"""The entry point of a rank, whoever started it: alone, by our launcher, by torchrun or by srun."""

import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from shoal.catalogue.gpus import find_gpu
from shoal.config.effect import without_effect
from shoal.config.load import load_config
from shoal.config.resolve import with_global_batch, with_precision
from shoal.config.run import RunDirectory
from shoal.config.schema import Config, GpuConfig
from shoal.launch.join import (
    choose_device,
    heartbeat_file,
    joined,
    local_rank,
    may_be_restarted,
    open_meeting,
    restarted,
)
from shoal.launch.outcome import failure_recorded
from shoal.launch.rendezvous import Meeting
from shoal.mistakes import RunFailed, UserMistake
from shoal.models.base import check_resumed_base
from shoal.models.peft_config import follow_adapter
from shoal.objectives import Objective
from shoal.observe.events import launcher_events
from shoal.observe.logs import write_logs_to
from shoal.observe.progress import Reporter
from shoal.parallel.device import Device, inspect_device
from shoal.plan.machine import processor_name
from shoal.resilience.out_of_memory import OutOfMemory
from shoal.resilience.signals import StopRequest
from shoal.resilience.watchdog import print_sentence
from shoal.train.data_changes import check_resumed_data
from shoal.train.default_hooks import LaunchContext
from shoal.train.hooks import Hook
from shoal.train.inputs import Inputs, read_inputs
from shoal.train.log import next_attempt
from shoal.train.loop import Summary, train
from shoal.train.preflight import preflight
from shoal.train.save import checkpoint_folders
from shoal.train.setup import Start

LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class Request:
    """A run to start."""

    config: Config
    run: RunDirectory
    start: Start
    overwrite: bool = False  # replace an existing run of this name
    max_restarts: int = 0
    hooks: Sequence[Hook] = ()
    command: Sequence[str] = ()  # with which the user started the run
    profile: int | None = None  # steps to profile
    objective: Objective | None = None  # in place of `train.objective`
    launched: bool = False  # a launcher of ours has checked the run already, and created and locked its folder


def run_rank(
    request: Request,
    *,
    stop: StopRequest | None = None,
    tell: Callable[[str], None] = print_sentence,
    on_summary: Callable[[Summary], None] = lambda summary: None,
    on_out_of_memory: Callable[[OutOfMemory], None] = lambda failure: None,
) -> Summary:
    """Train as one rank: find errors, join the other ranks, if there are any, and run the training loop.

    `tell` receives the watchdog's message when it ends a hung run. `on_summary` and `on_out_of_memory` are called while
    the process group still exists: destroying it may fail.
    """
    meeting = open_meeting()
    with failures_told(meeting, request):
        run, start, overwrite = request.run, request.start, request.overwrite
        first, world_size = int(os.environ.get("RANK", "0")) == 0, int(os.environ.get("WORLD_SIZE", "1"))
        continues = restarted() or bool(start.overrides) or (meeting is not None and meeting.begun)
        if continues:  # the run folder exists, unless the first attempt died before
            start, overwrite = replace(start, resume=run.exists, restarted=True), False
        leads = first and not request.launched
        reporter = Reporter(enabled=leads)
        device = inspect_device(choose_device(local_rank()))
        asked = with_global_batch(request.config, world_size)
        asked = settle_adapter(asked, run, resume=start.resume)
        config = settle_precision(asked, run, device, resume=start.resume)
        if leads:
            warn_of_settings(config, world_size, device, reporter)
            check_folder(request, config, reporter, resume=start.resume, overwrite=overwrite)
        inputs = read_inputs(config, reporter)
        # Only rank 0 verifies the checkpoint, because that hashes every file.
        checkpoint = start.checkpoint if leads else None
        checked = preflight(
            config, inputs, world_size, device, overrides=start.overrides, start_from=checkpoint, resume=start.resume
        )
        # Before the others are joined: they wait for rank 0, which writes first.
        folder = (
            own_folder(request, config, inputs, reporter, resume=start.resume, overwrite=overwrite)
            if leads
            else nullcontext()
        )
        with closing(inputs.sets), folder, joined(config, meeting) as ranks:
            config = with_precision(asked, ranks.broadcast(config.train.precision))  # GPUs may differ
            checked = checked.agree(config, ranks, start.overrides)
            if not request.launched:
                if first:
                    run.create(config, overwrite=overwrite, say=reporter.say)
                    if meeting is not None:
                        meeting.begin()
                ranks.barrier()
                terminal = None if first else send_output_to(run.logs / f"rank-{ranks.rank}.log")
                begin_logs(run, ranks.rank, terminal)
            LOGGER.debug("rank %d of %d, process %d, on %s", ranks.rank, ranks.world_size, os.getpid(), ranks.device)
            context = LaunchContext(heartbeat_file(), tell, request.command, request.profile)
            try:
                summary = train(
                    checked,
                    run,
                    ranks,
                    start,
                    stop=stop,
                    context=context,
                    hooks=request.hooks,
                    objective=request.objective,
                )
                on_summary(summary)
                return summary
            except OutOfMemory as failure:
                on_out_of_memory(failure)
                raise


@contextmanager
def failures_told(meeting: Meeting | None, request: Request) -> Iterator[None]:
    """Ranks that wait for this one learn why it failed, and a lost connection is explained by the rank that is gone."""
    try:
        yield
    except (UserMistake, RunFailed) as failure:
        if meeting is not None:
            meeting.fail(str(failure))
        raise
    except RuntimeError as error:
        # A launcher of ours restarts after any other error, and finds the cause itself.
        if not request.launched and meeting is not None and (lost := meeting.explain_loss(error)) is not None:
            raise lost from None
        raise


def settle_precision(config: Config, run: RunDirectory, device: Device, *, resume: bool) -> Config:
    """Resolve `train.precision: auto`. A resumed run keeps its precision, also on another device."""
    if resume and run.exists:
        config = with_precision(config, load_config(run.config, needs_model=False).train.precision)
    return with_precision(config, device.auto_precision)


def settle_adapter(config: Config, run: RunDirectory, *, resume: bool) -> Config:
    """Take over what the adapter in `adapter.from` says of itself. A resumed run has done so."""
    return follow_adapter(config, load_config(run.config).adapter if resume and run.exists else None)


def warn_of_settings(config: Config, processes: int, device: Device, reporter: Reporter) -> None:
    """Report the options that have no effect with this many processes, and a GPU that is planned for and not here."""
    gpu = config.hardware.gpu
    planned = find_gpu(gpu).name if isinstance(gpu, str) and gpu != "auto" else None
    present = device.gpu.name if device.gpu else device.name or "cpu"
    here = "a CPU" if present == "cpu" else present
    if planned not in (None, present):
        reporter.warn(f"hardware.gpu {planned} is for shoal plan: this run trains on {here}, which this machine has.")
    if isinstance(gpu, GpuConfig) and gpu.name not in (None, device.name or processor_name()):
        reporter.warn(
            f"hardware.gpu was measured on {gpu.name}: this run trains on {here}, and is forecast as such devices are."
        )
    for note in without_effect(config, processes):
        reporter.warn(note)


def check_folder(request: Request, config: Config, reporter: Reporter, *, resume: bool, overwrite: bool) -> None:
    """A UserMistake if the run may not start in its folder; says what has changed since it was started."""
    request.run.check_not_held()
    changes = request.run.check(config, resume=resume, overwrite=overwrite, start_from=request.start.checkpoint)
    for note in changes:
        reporter.say(f"Changed since the run started: {note}.")


@contextmanager
def own_folder(
    request: Request, config: Config, inputs: Inputs, reporter: Reporter, *, resume: bool, overwrite: bool
) -> Iterator[None]:
    """The run's folder is this launch's alone, from before the first write to the end of the run.

    It is checked again: another process may have begun or ended a run there since `check_folder`.
    """
    run = request.run
    with run.held():
        run.check(config, resume=resume, overwrite=overwrite, start_from=request.start.checkpoint)
        if resume and request.start.checkpoint is None:
            check_resumed_data(checkpoint_folders(config, run), inputs.sets)
            if config.adapter.kind != "none":
                check_resumed_base(run, inputs.blueprint.folder)
        replacing = run.replacing(restores=not may_be_restarted(), say=reporter.say, warn=reporter.warn)
        with replacing, failure_recorded(run.path, fresh=not overwrite):
            yield


def begin_logs(run: RunDirectory, rank: int | None, terminal: int | None = None) -> None:
    """The run's folder is there: write this process's log records into it. `rank` None: the launcher."""
    events = None
    if not rank:
        events = launcher_events(run.path)
        events.attempt = next_attempt(run.metrics)
    write_logs_to(run.logs, rank, events, terminal)


def send_output_to(path: Path) -> int:
    """Redirect the output of ranks other than 0 to a file. Returns a descriptor of what standard error was before."""
    sys.stdout.flush()
    sys.stderr.flush()
    before = os.dup(2)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    return before
