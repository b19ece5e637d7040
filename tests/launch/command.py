"""Run the real `shoal` command as a user does, in a folder and with a cache of its own."""

import contextlib
import importlib
import json
import math
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import yaml

from shoal.resilience.signals import STOP_SIGNALS

SHOAL = Path(sys.executable).parent / "shoal"
# Seconds. Only a hang takes this long, also on a slow machine: no test asserts a wall time.
PATIENCE = 300
# The name of the process of a rank that is a fork: /proc shows the environment and arguments it was forked with.
FORKED_RANK = "shoal-rank-{}"
# Set for a whole test run by tests/conftest.py; a user has none of these.
NOT_INHERITED = ("HF_HUB_OFFLINE", "RANK", "WORLD_SIZE", "LOCAL_RANK")


@dataclass(frozen=True)
class Ended:
    """How a command ended, and what it cost."""

    status: int
    out: str
    err: str
    wall: float
    work: float  # seconds of CPU time, user and system

    def hold_mistake(self, sentence: str) -> None:
        """Status 2, and only the sentence on standard error: no traceback."""
        assert (self.status, self.out, self.err) == (2, "", f"shoal: {sentence}\n")


def environment(folder: Path, **more: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
    return {**inherited, "SHOAL_CACHE": str(folder / "cache"), "HF_HOME": str(folder / "hub"), **more}


def write_config(folder: Path, config: Mapping[str, Any], name: str = "run.yaml") -> Path:
    path = folder / name
    path.write_text(yaml.safe_dump(dict(config)))
    return path


class Forked:
    """A fork of this process, in a session of its own, with what is used of a Popen."""

    def __init__(self, act: Callable[[], NoReturn]) -> None:
        self.returncode: int | None = None
        # No signal is delivered before the fork has the default handlers that a new program has.
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            signal.set_wakeup_fd(-1)
            for number in STOP_SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        if self.pid == 0:
            try:
                act()
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
            finally:
                os._exit(1)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float = math.inf) -> int:
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a fork", timeout)
            time.sleep(0.005)
        return status


class ForkedModule(Forked):
    """`python -m module`, started as by `subprocess.Popen`, in a fork of a command that is a fork itself."""

    def __init__(
        self, arguments: Sequence[str], *, stdout: Any, stderr: Any, text: bool = False, **others: object
    ) -> None:
        out, self.stdout = stdout, None
        if stdout == subprocess.PIPE:
            reading, writing = os.pipe()
            out, self.stdout = os.fdopen(writing, "w"), os.fdopen(reading, "r" if text else "rb")
        files = [file if isinstance(file, int) else file.fileno() for file in (out, stderr)]
        super().__init__(lambda: _be_module(arguments, os.environ.copy(), *files))
        if self.stdout is not None:
            out.close()

    def __enter__(self) -> "ForkedModule":
        return self

    def __exit__(self, *_: object) -> None:
        if self.stdout is not None:
            self.stdout.close()
        self.wait()


class Command:
    """A running command. Its output goes to files, so that it never blocks on a pipe."""

    def __init__(
        self, folder: Path, arguments: list[str], env: Mapping[str, str] | None = None, typed: str | None = None
    ) -> None:
        self.typed = typed
        self.files = [tempfile.TemporaryFile("w+") for _ in range(2)]  # noqa: SIM115
        self.began = time.perf_counter()
        self.process = self._start(folder, arguments, environment(folder) if env is None else env)

    def _start(self, folder: Path, arguments: list[str], env: Mapping[str, str]) -> subprocess.Popen[str] | Forked:
        return subprocess.Popen(
            arguments,
            cwd=folder,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=self.files[0],
            stderr=self.files[1],
            # A process group of its own, so that a failed test can be cleaned up.
            start_new_session=True,
        )

    def __enter__(self) -> "Command":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            for process in (*descendants(self.process.pid), self.process.pid):
                ignoring_exited(lambda process=process: os.kill(process, signal.SIGKILL))
            self.process.wait()
        for file in self.files:
            file.close()

    def wait(self, seconds: float = PATIENCE) -> Ended:
        deadline = time.perf_counter() + seconds
        while True:
            pid, status, used = os.wait4(self.process.pid, os.WNOHANG)
            if pid:
                break
            if time.perf_counter() > deadline:
                raise TimeoutError(f"still running after {seconds} s; standard error so far:\n{self.read(1)}")
            time.sleep(0.002)
        self.process.returncode = os.waitstatus_to_exitcode(status)
        return Ended(
            self.process.returncode,
            self.read(0),
            self.read(1),
            time.perf_counter() - self.began,
            used.ru_utime + used.ru_stime,
        )

    def read(self, which: int) -> str:
        self.files[which].seek(0)
        return self.files[which].read()

    def wait_until(self, reached: Callable[[], bool], seconds: float = PATIENCE) -> None:
        """Until `reached()`; an end of the command before that is an error."""
        deadline = time.perf_counter() + seconds
        while not reached():
            assert self.process.poll() is None, f"ended too early:\n{self.read(1)}"
            assert time.perf_counter() < deadline, f"not reached in {seconds} s:\n{self.read(1)}"
            time.sleep(0.01)


class ForkedCommand(Command):
    """`shoal` with these arguments in a fork of this process, and its ranks in forks of that one: none of them imports
    torch again, which takes longer than these runs."""

    def _start(self, folder: Path, arguments: list[str], env: Mapping[str, str]) -> Forked:
        _import_command()
        on_interrupt = signal.getsignal(signal.SIGINT)
        importlib.import_module("shoal.launch.worker")  # changes what the process does on Ctrl-C, as a rank's should
        importlib.import_module("shoal.launch.local")
        signal.signal(signal.SIGINT, on_interrupt)
        importlib.import_module("shoal.models.emulate").slow_dtypes()  # measured once, as in the harness
        out, err = (file.fileno() for file in self.files)
        with tempfile.TemporaryFile() as typed:
            typed.write((self.typed or "").encode())
            typed.seek(0)

            def be() -> NoReturn:
                if self.typed is not None:
                    os.dup2(typed.fileno(), 0)
                self._be(folder, arguments, env, out, err)

            return Forked(be)

    @staticmethod
    def _be(folder: Path, arguments: Sequence[str], env: Mapping[str, str], out: int, err: int) -> NoReturn:
        _be_command(folder, arguments, env, out, err)


class ForkedScript(ForkedCommand):
    """`python FILE` with these arguments, likewise."""

    @staticmethod
    def _be(folder: Path, arguments: Sequence[str], env: Mapping[str, str], out: int, err: int) -> NoReturn:
        _be_script(folder, arguments, env, out, err)


class ForkedTorchrun(ForkedCommand):
    """`torchrun` with these arguments, likewise."""

    @staticmethod
    def _be(folder: Path, arguments: Sequence[str], env: Mapping[str, str], out: int, err: int) -> NoReturn:
        main = importlib.import_module("torch.distributed.run").main
        _be_starter(main, ["torchrun", *arguments], folder, env, out, err)


def shoal(folder: Path, *arguments: str, env: Mapping[str, str] | None = None, seconds: float = PATIENCE) -> Ended:
    with Command(folder, [str(SHOAL), *arguments], env) as command:
        return command.wait(seconds)


def run_within(limit: float, run: Callable[[], Ended]) -> Ended:
    """The first of three runs that takes less CPU time than `limit` seconds, or the fastest: a busy machine takes more
    for the same work."""
    ended = run()
    for _ in range(2):
        if ended.work < limit:
            break
        ended = min(ended, run(), key=lambda one: one.work)
    return ended


def forked_shoal(
    folder: Path, *arguments: str, env: Mapping[str, str] | None = None, seconds: float = PATIENCE
) -> Ended:
    """As `shoal`, in a fork of this process, which has torch and transformers imported already."""
    with ForkedCommand(folder, list(arguments), env) as command:
        return command.wait(seconds)


@cache
def _import_command() -> None:
    """What every fork would import and build again: the command, and the parsers of its options."""
    for module in ("tests.harness", "shoal.plan.render"):
        importlib.import_module(module)
    app = importlib.import_module("shoal.cli.app").app
    typer_main = importlib.import_module("typer.main")
    typer_main.get_command = cache(typer_main.get_command)
    commands = typer_main.get_command(app).commands
    for option in (*commands["train"].params, *commands["plan"].params):
        option.get_runtime_param()


def _be_command(folder: Path, arguments: Sequence[str], env: Mapping[str, str], out: int, err: int) -> NoReturn:
    from shoal.cli import main

    _be_starter(main, ["shoal", *arguments], folder, env, out, err)


def _be_script(folder: Path, arguments: Sequence[str], env: Mapping[str, str], out: int, err: int) -> NoReturn:
    def main() -> None:
        sys.path.insert(0, str(folder))
        runpy.run_path(arguments[0], run_name="__main__")

    # What runpy replaces __main__ with is gone when the script has ended.
    sys.modules["__main__"].__dict__.update(__file__=str(folder / arguments[0]), __spec__=None)
    _be_starter(main, list(arguments), folder, env, out, err)


def _be_starter(
    main: Callable[[], Any], arguments: list[str], folder: Path, env: Mapping[str, str], out: int, err: int
) -> NoReturn:
    from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

    # What torch's agent starts the ranks with.
    SubprocessHandler._popen = lambda self, arguments, env: Forked(lambda: _be_worker(arguments, env))  # type: ignore[method-assign, assignment, return-value]
    # And what tasks of another launcher start theirs with.
    nodes = importlib.import_module("shoal.launch.nodes")
    nodes.start_process = lambda arguments, env: Forked(lambda: _be_worker(["python", *arguments], env))
    # These start a process that imports torch, and other programs: matplotlib lists the fonts of a machine once.
    if arguments[1:2] in (["bench"], ["doctor"], ["sweep"]):
        importlib.import_module("shoal.launch.sweep.local")  # its annotations need the class
        start = subprocess.Popen
        subprocess.Popen = lambda given, **options: (ForkedModule if "-m" in given[:2] else start)(given, **options)  # type: ignore[misc, assignment]
    os.chdir(folder)
    _write_to(out, err)
    _be_program(main, arguments, env)


def _be_worker(arguments: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # see shoal.launch.interrupts
    Path("/proc/self/comm").write_text(FORKED_RANK.format(env["RANK"]))
    _run_module(arguments, env)


def _be_module(arguments: Sequence[str], env: Mapping[str, str], out: int, err: int) -> NoReturn:
    _write_to(out, err)
    _run_module(arguments, env)


def _run_module(arguments: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    _, option, module, *others = (word for word in arguments if word != "-u")  # torchrun's ranks are not buffered
    assert option == "-m"
    module = {"shoal": "shoal.cli"}.get(module, module)  # what its __main__ calls
    _be_program(importlib.import_module(module).main, [module, *others], env)


def _write_to(out: int, err: int) -> None:
    sys.stdin = os.fdopen(0, closefd=False)  # pytest has another
    os.dup2(out, 1)
    os.dup2(err, 2)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))


def _be_program(main: Callable[[], Any], arguments: list[str], env: Mapping[str, str]) -> NoReturn:
    status: Any = 1
    try:
        importlib.import_module("torch").set_num_threads(1)  # as in the harness, before other threads want the pool
        os.environ.clear()
        os.environ.update(env)
        sys.argv, tempfile.tempdir = arguments, None  # read TMPDIR again
        status = main()
    except SystemExit as end:
        status = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0 if status is None else int(status))


def descendants(process: int) -> list[int]:
    """The processes that `process` started, and theirs."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            ignoring_exited(lambda entry=entry: parents.update({int(entry.name): _parent(entry)}))
    found = [process]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


def _parent(entry: Path) -> int:
    return int((entry / "stat").read_text().rpartition(")")[2].split()[1])


def ignoring_exited(act: Callable[[], Any]) -> None:
    """Processes may exit while they are inspected."""
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
        act()


def rank_process(launcher: int, rank: int) -> int:
    """The process of a rank that our launcher started."""
    wanted = f"RANK={rank}".encode()
    for process in descendants(launcher):
        if (Path("/proc") / str(process) / "comm").read_text().strip() == FORKED_RANK.format(rank):
            return process
        variables = (Path("/proc") / str(process) / "environ").read_bytes().split(b"\0")
        command = (Path("/proc") / str(process) / "cmdline").read_bytes()
        if wanted in variables and b"shoal.launch.worker" in command:
            return process
    raise AssertionError(f"no process of rank {rank}")


def training_lines(run: Path) -> dict[int, dict[str, Any]]:
    """Step → line, the last one of each step. An incomplete line is ignored."""
    path = run / "metrics.jsonl"
    if not path.is_file():
        return {}
    text = path.read_text()
    found = (json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines())
    return {line["step"]: line for line in found if "loss" in line}


def losses(run: Path) -> list[tuple[int, float, float]]:
    return [(step, line["loss"], line["grad_norm"]) for step, line in sorted(training_lines(run).items())]
