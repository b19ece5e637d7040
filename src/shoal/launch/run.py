"""Start a training run: choose the launcher for it."""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Literal, Protocol

from shoal.config.resolve import with_global_batch, with_precision
from shoal.config.run import RunDirectory
from shoal.config.schema import Config
from shoal.crash import crashes_in
from shoal.launch.join import first_device, is_first, processes_wanted, restarted, started_by_others
from shoal.launch.local import LocalProcesses
from shoal.launch.outcome import record_end
from shoal.launch.rank import Request, run_rank, warn_of_settings
from shoal.models.peft_config import follow_adapter
from shoal.observe.progress import Reporter
from shoal.parallel.device import inspect_device
from shoal.paths import user_path
from shoal.temporary import remove_abandoned
from shoal.train.hooks import Hook
from shoal.train.inputs import read_inputs
from shoal.train.loop import Summary
from shoal.train.preview import Preview, preview
from shoal.train.setup import Start, preflight


class Launcher(Protocol):
    """Runs the ranks of a run, each through `launch.rank.run_rank`, until they end."""

    def launch(self, request: Request) -> Summary: ...


class ThisProcess:
    """This process is a rank: the only one, or one that torchrun or srun started."""

    def launch(self, request: Request) -> Summary:
        return run_rank(request)


def start(
    config: Config,
    *,
    runs: Path | None = None,
    resume: bool | Literal["auto"] = False,
    start_from: Path | None = None,
    overwrite: bool = False,
    max_restarts: int = 0,
    hooks: Sequence[Hook] = (),
) -> Summary:
    """Train and return a summary. A run that was stopped by a signal has `stopped == "signal"`. `runs` replaces
    `run_dir` of the config; `resume` auto resumes the run if it exists and starts it if not."""
    if runs is not None:
        config = config.model_copy(update={"run_dir": str(runs)})
    run = RunDirectory(user_path(Path(config.run_dir) / config.name, "run_dir"))
    if is_first() and not restarted():
        remove_abandoned()
        run.recover(Reporter(enabled=True).say)
    if resume == "auto":
        resume = run.begun  # a job's folder exists before its first start
    request = Request(config, run, Start(resume, start_from), overwrite, max_restarts, hooks)
    with crashes_in(run.logs):
        summary = choose_launcher(request).launch(request)
    if is_first():
        record_end(run.path, summary.stopped)
    return summary


def choose_launcher(request: Request) -> Launcher:
    """Several processes, and processes that may have to be restarted, need our own launcher."""
    if started_by_others():
        return ThisProcess()
    processes = processes_wanted(request.config)
    if processes == 1 and not request.max_restarts and request.config.train.on_oom != "shrink":
        return ThisProcess()
    return LocalProcesses(processes)


def dry_run(config: Config) -> Preview:
    """Preview what `start` would do, without a step, an accelerator or a run folder."""
    reporter = Reporter(enabled=True)
    processes = processes_wanted(config)
    device = inspect_device(first_device())
    config = follow_adapter(with_global_batch(with_precision(config, device.auto_precision), processes))
    warn_of_settings(config, processes, reporter)
    inputs = read_inputs(config, reporter)
    with closing(inputs.sets):
        return preview(preflight(config, inputs, processes, device))
