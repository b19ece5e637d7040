"""One case in a process of its own, which may fail, run out of memory or never end without harm to the others."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
SOURCE = HERE.parent.parent / "src"
# The last lines of what a failed case said, where the reason usually stands.
KEPT_LINES = 25


@dataclass(frozen=True)
class Outcome:
    """`status` is `done`, or why there is no result."""

    status: str
    output: str
    said: str
    seconds: float
    late: bool = False  # it was still running when its time was over


def environment(folder: Path, cache: Path, cuda: bool) -> dict[str, str]:
    """What every case is started with. What is compiled is kept per case, so that each pays for its own start."""
    paths = [str(SOURCE), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    settings = {
        "PYTHONPATH": os.pathsep.join(paths),
        "SHOAL_CACHE": str(cache),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    # Without a GPU Triton's kernels can only be interpreted: slow, but every line of the case is run.
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
    late = False
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        late = True
        # The group, because a case may have started processes of its own, which hold the GPU's memory.
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
    took = time.perf_counter() - began
    said = "\n".join(errors.strip().splitlines()[-KEPT_LINES:])
    return Outcome(_status(process.returncode, errors, late, seconds), output, said, took, late)


def _status(code: int, errors: str, late: bool, seconds: float) -> str:
    if late:
        return f"failed: not done after {seconds:.0f} s"
    if code == 0:
        return "done"
    if "OutOfMemoryError" in errors or "CUDA out of memory" in errors:
        return "failed: out of memory"
    lines = [line for line in errors.strip().splitlines() if line.strip()]
    return f"failed: {lines[-1].strip() if lines else f'exit status {code}'}"
