"""Runs a case in a separate process, so that a failure, an out-of-memory error or a hang does not affect the others."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
SOURCE = HERE.parent.parent / "src"
# Lines of stderr to keep of a failed case.
KEPT_LINES = 25


@dataclass(frozen=True)
class Outcome:
    """`status` is `done`, or the reason why there is no result."""

    status: str
    output: str
    stderr: str
    seconds: float
    timed_out: bool = False


def environment(folder: Path, cache: Path, cuda: bool) -> dict[str, str]:
    """Environment of a case. Compile caches are per case, so that each includes its own startup."""
    paths = [str(SOURCE), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    settings = {
        "PYTHONPATH": os.pathsep.join(paths),
        "SHOAL_CACHE": str(cache),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    # Without a GPU, Triton's kernels are interpreted: slow, but every line of the case runs.
    return {**os.environ, **settings, **({} if cuda else {"TRITON_INTERPRET": "1"})}


def run_process(command: list[str], folder: Path, settings: dict[str, str], seconds: float) -> Outcome:
    """Run `python` with `command` in `folder`, for at most `seconds`."""
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=folder,
        env=settings,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    timed_out = False
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        timed_out = True
        # The whole group: child processes of the case may hold GPU memory.
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
    took = time.perf_counter() - began
    stderr = "\n".join(errors.strip().splitlines()[-KEPT_LINES:])
    return Outcome(_status(process.returncode, errors, timed_out, seconds), output, stderr, took, timed_out)


def _status(code: int, errors: str, timed_out: bool, seconds: float) -> str:
    if timed_out:
        return f"failed: not done after {seconds:.0f} s"
    if code == 0:
        return "done"
    if "OutOfMemoryError" in errors or "CUDA out of memory" in errors:
        return "failed: out of memory"
    lines = [line for line in errors.strip().splitlines() if line.strip()]
    return f"failed: {lines[-1].strip() if lines else f'exit status {code}'}"
