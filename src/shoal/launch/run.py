"""Start a training run: choose the launcher for it."""

import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Literal, Protocol

from shoal.config.resolve import with_global_batch, with_precision
from shoal.config.run import RunDirectory
from shoal.config.schema import Config
from shoal.convert.run_model import with_exported
from shoal.crash import crashes_in
from shoal.launch.environment import BY_HAND, LAUNCH_FOLDER, TORCHRUN, Placement, adopt
from shoal.launch.join import (
    check_nodes,
    check_placement,
    first_device,
    is_first,
    may_be_restarted,
    processes_here,
    processes_wanted,
    restarted,
)
from shoal.launch.local import LocalProcesses
from shoal.launch.nodes import JoinedTasks
from shoal.launch.outcome import record_end
from shoal.launch.rank import Request, run_rank, warn_of_settings
from shoal.mistakes import RanksLost
from shoal.models.peft_config import follow_adapter
from shoal.objectives import Objective
from shoal.observe.logs import logging_run
from shoal.observe.progress import Reporter
from shoal.parallel.device import inspect_device
from shoal.paths import user_path
from shoal.plan.unintended import unintended
from shoal.resilience.watchdog import print_sentence
from shoal.temporary import remove_abandoned
from shoal.train.hooks import Hook
from shoal.train.inputs import read_inputs
from shoal.train.loop import Summary
from shoal.train.preflight import preflight
from shoal.train.preview import Preview, preview
from shoal.train.setup import Start


class Launcher(Protocol):
    """Runs the ranks of a run, each through `launch.rank.run_rank`, until they end."""

    def launch(self, request: Request) -> Summary: ...


class ThisProcess:
    """This process is a rank: the only one, or one that torchrun or srun started."""

    def launch(self, request: Request) -> Summary:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:  # whoever started the ranks says how to start them again
            return run_rank(request)
        return run_rank(request, tell=lambda sentence: print_sentence(f"{sentence}{how_to_resume(request.command)}"))


def start(
    config: Config,
    *,
    runs: Path | None = None,
    resume: bool | Literal["auto"] = False,
    start_from: Path | None = None,
    overwrite: bool = False,
    max_restarts: int = 0,
    hooks: Sequence[Hook] = (),
    profile: int | None = None,
    objective: Objective | None = None,
) -> Summary:
    """Train and return a summary. A run that was stopped by a signal has `stopped == "signal"`. `runs` replaces
    `run_dir` of the config; `resume` auto resumes the run if it exists and starts it if not."""
    if runs is not None:
        config = config.model_copy(update={"run_dir": str(runs)})
    run = RunDirectory(user_path(Path(config.run_dir) / config.name, "run_dir"))
    if is_first() and not restarted():
        remove_abandoned()
        run.recover(Reporter(enabled=True).say)
    config = with_exported(config, Reporter(enabled=is_first()).say)
    if resume == "auto":
        resume = run.begun  # a job's folder exists before its first start
    begin, command = Start(resume, start_from), own_command(sys.argv)
    request = Request(config, run, begin, overwrite, max_restarts, hooks, command, profile, objective)
    with crashes_in(run.logs), logging_run(config.log.level):
        try:
            summary = choose_launcher(request).launch(request)
        except RanksLost as failure:
            raise RanksLost(f"{failure}{how_to_resume(command)}") from None
    if is_first():
        record_end(run.path, summary.stopped)
    return summary


def own_command(arguments: Sequence[str]) -> list[str]:
    """The command with which this process was started, as one would type it again."""
    program, *rest = arguments or [""]
    name = Path(program).name
    return ["shoal", *rest] if name in ("shoal", "__main__.py") else ["python", program, *rest]


def how_to_resume(command: Sequence[str]) -> str:
    """What to append to the message of a run that can be resumed; nothing if a program of the user's started it."""
    if command[:2] != ["shoal", "train"]:
        return ""
    again, skipped = list[str](), False
    for argument in command:
        if not skipped and argument != "--overwrite" and not argument.startswith("--from"):
            again.append(argument)
        skipped = argument == "--from"  # its value follows
    if not any(argument.startswith("--resume") for argument in again):
        again.append("--resume")
    return f" Resume with: {shlex.join(again)}"


def choose_launcher(request: Request) -> Launcher:
    """Several processes, and processes that may have to be restarted, need our own launcher."""
    if (place := adopt(os.environ)) is not None:
        return join_others(request, place)
    processes = processes_wanted(request.config)
    if processes == 1 and not request.max_restarts and request.config.train.on_oom != "shrink":
        return ThisProcess()
    return LocalProcesses(processes)


def join_others(request: Request, place: Placement) -> Launcher:
    """This process was started as one of several: it is a rank, unless it has several devices, or ranks may have to be
    restarted by others than torchrun."""
    if place.one_per_node and place.started_by not in (TORCHRUN, BY_HAND):
        processes = processes_here(request.config)
        check_nodes(request.config.hardware.nodes, place.world_size, place)
    else:
        processes = 1
        check_placement(request.config, place)
    restarts = request.max_restarts > 0 and not may_be_restarted()
    watched = restarts or request.config.train.on_oom == "shrink"
    if place.world_size == 1 or os.environ.get(LAUNCH_FOLDER) or (processes == 1 and not watched):
        return ThisProcess()
    return JoinedTasks(place, processes)


def dry_run(config: Config) -> Preview:
    """Preview what `start` would do, without a step, an accelerator or a run folder."""
    reporter = Reporter(enabled=True)
    config = with_exported(config, reporter.say)
    processes = processes_wanted(config)
    device = inspect_device(first_device())
    config = follow_adapter(with_global_batch(with_precision(config, device.auto_precision), processes))
    warn_of_settings(config, processes, device, reporter)
    inputs = read_inputs(config, reporter)
    with closing(inputs.sets):
        checked = preflight(config, inputs, processes, device)
        for note in unintended(checked.resolved):
            reporter.warn(note)
        return preview(checked)
