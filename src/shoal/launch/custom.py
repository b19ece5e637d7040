"""Start or join the run of a custom loop: this process is a rank, or it launches the user's script as several."""

import atexit
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NoReturn, Protocol

import torch

from shoal.config.resolve import with_precision
from shoal.config.run import RunDirectory
from shoal.config.schema import Config
from shoal.launch.environment import adopt
from shoal.launch.join import (
    check_placement,
    choose_device,
    first_device,
    heartbeat_file,
    is_first,
    joined,
    local_rank,
    may_be_restarted,
    open_meeting,
    processes_wanted,
    restarted,
)
from shoal.launch.outcome import failure_recorded
from shoal.launch.processes import HUNG, report_failure, run_processes
from shoal.launch.rank import send_output_to, settle_precision
from shoal.mistakes import RunFailed, UserMistake
from shoal.observe.progress import Reporter
from shoal.parallel.device import Device, inspect_device
from shoal.parallel.ranks import Ranks
from shoal.paths import user_path
from shoal.resilience.signals import SAME_REQUEST, SAME_REQUEST_FOR_RANKS, StopRequest, keep_user_signals
from shoal.resilience.watchdog import print_sentence
from shoal.temporary import remove_abandoned
from shoal.train.default_hooks import LaunchContext
from shoal.train.hooks import Hook
from shoal.train.setup import Start

STATUS_MISTAKE, STATUS_FAILED, STATUS_STOPPED = 2, 1, 75
# What a script cannot do with parameters that FSDP has sharded: torch's words, and ours.
UNDER_FSDP = {
    "mixed torch.Tensor and DTensor": "A plain tensor was combined with a parameter that FSDP has sharded; take its "
    "whole value, parameter.full_tensor(), on all ranks (for an average of the weights, say), or use parallel.strategy "
    "ddp or zero1.",
    "FSDP does not support deepcopy": "A model that FSDP has sharded cannot be copied; copy it before run.prepare (and "
    "update the copy with parameter.full_tensor(), on all ranks), or use parallel.strategy ddp or zero1.",
}
# Set by `launch_script`: this process runs the user's script as a rank.
SCRIPT = "SHOAL_SCRIPT"


class Closable(Protocol):
    def close(self, error: BaseException | None = None) -> None: ...


_current: list[Closable] = []  # the run of this process


def current_run() -> Closable | None:
    return _current[-1] if _current else None


class JoinedRun:
    """This process as a rank of a custom loop, until `leave`."""

    def __init__(
        self,
        config: Config,
        *,
        resume: bool | Literal["auto"],
        start_from: Path | None,
        overwrite: bool,
        hooks: Sequence[Hook],
    ) -> None:
        if (before := current_run()) is not None:
            if int(os.environ.get("WORLD_SIZE", "1")) > 1:
                raise UserMistake(
                    "This program has had a run already, and where several processes run it, it has one; start it "
                    "again for another."
                )
            before.close()  # as when a cell of a notebook is run again
        self.hooks = hooks
        self.run = run_directory(config)
        self._stack = ExitStack()
        launched = _relaunched()
        resume = self.run.begun if resume == "auto" else resume
        meeting = open_meeting()
        continues = restarted() or (meeting is not None and meeting.begun)
        if continues:  # the run folder exists, unless the first attempt died before
            resume, overwrite = self.run.exists, False
        self.start = Start(resume, start_from, restarted=continues)
        first = int(os.environ.get("RANK", "0")) == 0
        self.device: Device = inspect_device(choose_device(local_rank()))
        self.config = settle_precision(config, self.run, self.device, resume=resume)
        reporter = Reporter(enabled=first and not launched)
        try:
            if first and not launched:
                self._stack.enter_context(
                    own_custom_folder(self.run, self.config, resume, overwrite, start_from, reporter)
                )
            same_request = SAME_REQUEST_FOR_RANKS if launched else SAME_REQUEST
            self.stop = self._stack.enter_context(StopRequest(same_request))
            self.ranks: Ranks = self._stack.enter_context(joined(self.config, meeting))
            self.config = with_precision(config, self.ranks.broadcast(self.config.train.precision))  # GPUs may differ
            if not launched:
                if first:
                    self.run.create(self.config, overwrite=overwrite, say=reporter.say)
                    if meeting is not None:
                        meeting.begin()
                self.ranks.barrier()
                if not first:
                    self.run.logs.mkdir(parents=True, exist_ok=True)
                    send_output_to(self.run.logs / f"rank-{self.ranks.rank}.log")
        except BaseException:
            self._stack.close()
            raise
        tell: Callable[[str], None] = partial(report_failure, HUNG) if launched else print_sentence
        self.context = LaunchContext(heartbeat_file(), tell, command=_command())

    @property
    def nodes(self) -> int:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
        return max(1, self.ranks.world_size // local) if local else 1

    def leave(self, error: BaseException | None) -> None:
        """End what this process holds: signal handlers, the process group, the folder's lock."""
        if error is None:
            self._stack.close()
            return
        # The lock's contexts record the failure. The other ranks may wait in a collective: nothing is waited for.
        self._stack.__exit__(type(error), error, error.__traceback__)


def run_directory(config: Config) -> RunDirectory:
    return RunDirectory(user_path(Path(config.run_dir) / config.name, "run_dir"))


def own_custom_folder(
    run: RunDirectory, config: Config, resume: bool, overwrite: bool, start_from: Path | None, reporter: Reporter
) -> ExitStack:
    """The run's folder is this process's alone, from before the first write to the end of the run."""
    with ExitStack() as stack:
        _check(run, config, resume=resume, overwrite=overwrite, start_from=start_from, reporter=reporter)
        stack.enter_context(run.held())
        replacing = run.replacing(restores=not may_be_restarted(), say=reporter.say, warn=reporter.warn)
        stack.enter_context(replacing)
        stack.enter_context(failure_recorded(run.path, fresh=not overwrite))
        return stack.pop_all()
    raise AssertionError


def _check(
    run: RunDirectory, config: Config, *, resume: bool, overwrite: bool, start_from: Path | None, reporter: Reporter
) -> None:
    try:
        run.check_not_held()
        for note in run.check(config, resume=resume, overwrite=overwrite, start_from=start_from):
            reporter.say(f"Changed since the run started: {note}.")
    except UserMistake as mistake:  # worded for the command
        said = str(mistake)
        for option in ("resume", "overwrite"):
            said = said.replace(f"--{option}", f"{option}=True")
        raise UserMistake(said.replace("name=…", "name")) from None


def _relaunched() -> bool:
    """Whether this process runs the user's script for our launcher, which has made the run's folder."""
    return SCRIPT in os.environ


def must_launch(config: Config, max_restarts: int) -> int:
    """The number of processes to launch; 0: this process is a rank."""
    if (place := adopt(os.environ)) is not None:
        check_placement(config, place)
        return 0
    processes = processes_wanted(config)
    return 0 if processes == 1 and not max_restarts else processes


def launch_script(
    config: Config,
    processes: int,
    *,
    resume: bool | Literal["auto"],
    start_from: Path | None,
    overwrite: bool,
    max_restarts: int,
) -> NoReturn:
    """Run this program as `processes` ranks, and exit with their status."""
    keep_user_signals()
    run, reporter = run_directory(config), Reporter(enabled=True)
    remove_abandoned()
    run.recover(reporter.say)
    resume = run.begun if resume == "auto" else resume
    config = settle_precision(config, run, inspect_device(first_device()), resume=resume)
    arguments = [str(run.logs), *_program(), *sys.argv[1:]]
    with own_custom_folder(run, config, resume, overwrite, start_from, reporter):
        run.create(config, overwrite=overwrite, say=reporter.say)
        reporter.say(f"Starting {processes} {'process' if processes == 1 else 'processes'} …")
        os.environ[SCRIPT] = "1"
        try:
            result = run_processes(
                "shoal.launch.script",
                arguments,
                processes,
                max_restarts=max_restarts,
                patience=config.train.hang_timeout,
                speaks=True,
                warn=reporter.warn,
                crashes=run.logs,
            )
        finally:
            del os.environ[SCRIPT]
        if result is None:
            raise RunFailed("The run was stopped before it could save.")
    sys.exit(int(result["status"]))


def _program() -> tuple[str, str]:
    """How this program was started: a script, or python -m."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return "module", spec.name.removesuffix(".__main__")
    file = getattr(main, "__file__", None)
    if file is None or not Path(file).is_file():
        raise UserMistake(
            "Several processes are needed, but this is not a script that they could run; put the loop into a file, set "
            "hardware.devices to 1, or start the program with torchrun."
        )
    return "path", str(Path(file).resolve())


def _command() -> Sequence[str]:
    """How the user started this program, for the record; nothing in a notebook."""
    try:
        kind, target = _program()
    except UserMistake:
        return ()
    return ("python", *(("-m", target) if kind == "module" else (target,)), *sys.argv[1:])


def explain(error: BaseException) -> BaseException:
    """A sentence for an error that has a known remedy; others as they are."""
    if isinstance(error, torch.OutOfMemoryError):
        return RunFailed(
            f"Out of memory: {str(error).splitlines()[0]} Lower train.micro_batch (the global batch stays the same), "
            "set train.recompute full, or use parallel.strategy fsdp."
        )
    for found, sentence in UNDER_FSDP.items():
        if found in str(error):
            return RunFailed(sentence)
    return error


def explain_backward(error: RuntimeError, *, sharded: bool) -> Exception:
    """A sentence for an error of a backward pass that has a known remedy; others as they are."""
    if sharded and "storage of size 0" in str(error):
        return UserMistake(
            "This backward pass needs weights that FSDP has freed, as a gradient of gradients does (a gradient "
            "penalty, autograd.grad with create_graph=True); use parallel.strategy ddp or zero1."
        )
    return error


def hold(run: Closable) -> None:
    """`run` is that of this process, and is ended when the process ends."""
    _current.append(run)
    if not _relaunched():  # there the program of the rank ends it
        atexit.register(run.close)


def report_mistakes() -> None:
    """An uncaught mistake of this program is one sentence, and its status 2. The program of a rank of ours does this
    itself."""
    if _relaunched() or getattr(sys.excepthook, "of_shoal", False):
        return
    before = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
        shown = explain(error)
        if (run := current_run()) is not None:
            run.close(shown)
        if isinstance(shown, UserMistake | RunFailed):
            if is_first():
                print(f"shoal: {shown}", file=sys.stderr)
            raise SystemExit(STATUS_MISTAKE if isinstance(shown, UserMistake) else STATUS_FAILED)
        return before(kind, error, trace)

    report.of_shoal = True  # type: ignore[attr-defined]
    sys.excepthook = report
