"""What torch finds on this node: asked in a process of its own, which a broken driver may crash or hang.

python -m shoal.launch.doctor.probe prints one JSON object.
"""

import json
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import asdict, dataclass, field
from typing import Any

# Seconds. Importing torch from a slow network file system takes one or two minutes; a driver that hangs never answers.
PATIENCE = 180
SIDE = 4096  # of the matrices that are multiplied
MATMUL_SECONDS = 0.2
# GPUs with less free memory than this are in use: they are not measured.
FREE_BYTES = 2 * 2**30


@dataclass(frozen=True)
class TorchReport:
    """The answer of the process; `error` says why there is none."""

    version: str = ""
    cuda: str | None = None  # the version of CUDA (or ROCm) that torch was built with
    nccl: str | None = None
    available: bool = False
    names: tuple[str, ...] = ()
    peers: tuple[tuple[bool, ...], ...] = ()  # [i][j]: whether GPU i can access the memory of GPU j
    tflops: tuple[float | None, ...] = ()  # of a 16-bit matmul, per GPU; None: the GPU is in use
    said: tuple[str, ...] = ()  # warnings of torch while it looked for GPUs
    seconds: float = 0.0  # for the import
    error: str | None = field(default=None, compare=False)


def ask_torch() -> TorchReport:
    """Start the process and read its answer."""
    command = [sys.executable, "-m", "shoal.launch.doctor.probe"]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err)
        try:
            status = process.wait(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            return TorchReport(error=f"torch has not finished looking for GPUs in {PATIENCE} s")
        out.seek(0)
        err.seek(0)
        lines, said = out.read().strip().splitlines(), err.read().strip().splitlines()
    try:
        found: dict[str, Any] = json.loads(lines[-1])
    except (IndexError, ValueError):
        return TorchReport(error=f"the process that imports torch ended with status {status}: {(said or ['-'])[-1]}")
    return TorchReport(
        **{
            **found,
            **{name: tuple(found[name]) for name in ("names", "tflops", "said")},
            "peers": tuple(map(tuple, found["peers"])),
        }
    )


def look() -> TorchReport:
    """Import torch and look for GPUs."""
    began = time.perf_counter()
    import torch

    seconds = time.perf_counter() - began
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
        count = torch.cuda.device_count() if available else 0
        names = tuple(torch.cuda.get_device_name(index) for index in range(count))
        peers = tuple(
            tuple(one == other or torch.cuda.can_device_access_peer(one, other) for other in range(count))
            for one in range(count)
        )
        tflops = tuple(_measure_matmul(index) for index in range(count))
    nccl = None
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return TorchReport(
        version=torch.__version__,
        cuda=torch.version.cuda or torch.version.hip,
        nccl=nccl,
        available=available,
        names=names,
        peers=peers,
        tflops=tflops,
        said=tuple(str(one.message).strip().splitlines()[0] for one in caught),
        seconds=seconds,
    )


def _measure_matmul(index: int) -> float | None:
    """TFLOP/s of a large matmul on a GPU."""
    import torch

    device = torch.device("cuda", index)
    if torch.cuda.mem_get_info(device)[0] < FREE_BYTES:
        return None
    wide = torch.cuda.get_device_capability(device) >= (8, 0)
    matrix = torch.randn(SIDE, SIDE, device=device).to(torch.bfloat16 if wide else torch.float16)
    for _ in range(3):
        matrix @ matrix
    torch.cuda.synchronize(device)
    began, done = time.perf_counter(), 0
    while time.perf_counter() - began < MATMUL_SECONDS:
        for _ in range(20):
            matrix @ matrix
        torch.cuda.synchronize(device)
        done += 20
    return round(2 * SIDE**3 * done / (time.perf_counter() - began) / 1e12, 1)


def main() -> None:
    print(json.dumps(asdict(look())), flush=True)


if __name__ == "__main__":
    main()
