"""Check the measurement of exposed communication (`shoal.parallel.exposed`) on a CUDA device.

`PYTHONPATH=src python benchmarks/gpu/exposed.py` prints a JSON line per case, and writes them to exposed.jsonl in the
folder $OUT, if it is set. It needs torch, shoal and a GPU, and takes about a minute. A case that fails is reported as
such; the others still run. `--tiny` runs the same on the CPU, `--only TEXT` the cases whose name contains the text.

On one GPU there is nobody to communicate with, so the time of a collective is made:

- `fsdp`: rank 0 of 8 of a fake process group. Before every all-gather and reduce-scatter of FSDP, its stream is kept
  busy for a while: not at all, for less than the computation that it overlaps with, and for more.
- `nccl`: a group of one rank, whose all-gather is a copy: synchronously, asynchronously, by a functional collective,
  and by one in a compiled function.

Each case measures one step with the timer and torch.profiler at once: `seconds` is what the timer says, `trace` what
the trace says. `seconds` has some microseconds more per wait (`waits`), since the marks take time too. `step_ratio` and
`host_ratio` are the time of a step, and of its launch on the host, with and without the timer; of the steps of a run,
one in `sampled_one_in` has it.
"""

import gzip
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

from shoal.observe.profile.intervals import subtract, total, union
from shoal.observe.profile.trace import Event, read_trace
from shoal.parallel.exposed import EVERY, Sample, WaitTimer

TINY = "--tiny" in sys.argv
ONLY = sys.argv[sys.argv.index("--only") + 1] if "--only" in sys.argv else ""
DEVICE = torch.device("cpu") if TINY else torch.device("cuda", 0)
RANKS = 8
WIDTH, INNER, BLOCKS, TOKENS = (16, 32, 2, 8) if TINY else (4096, 16384, 8, 8192)
COPIED = 1 << 10 if TINY else 1 << 30  # elements of the all-gather of `nccl`, in bf16
DELAYS = {"none": 0.0, "hidden": 0.001, "exposed": 0.006}  # seconds per collective
STEPS, PAIRS = (2, 2) if TINY else (4, 6)  # steps of a measurement, and how often it is made with and without the timer
# Of a process group, as FSDP calls them; torch 2.13 has new names.
COLLECTIVES = ("_allgather_base", "_reduce_scatter_base", "all_gather_single", "reduce_scatter_single")
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
functional_all_gather: Any = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor

Step = Callable[[], object]
Exposed = Callable[[list[Event]], float]  # of the kernels of a step


def synchronize() -> None:
    if not TINY:
        torch.cuda.synchronize()


def wait_on_stream(seconds: float, cycles: float) -> None:
    """Keep the current stream, or on a CPU the host, busy."""
    if TINY:
        time.sleep(seconds)
    elif seconds:
        torch.cuda._sleep(int(seconds * cycles))


def cycles_per_second() -> float:
    if TINY:
        return 1.0
    count, found = 20_000_000, []
    for _ in range(3):
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        torch.cuda._sleep(count)
        ended.record()
        synchronize()
        found.append(count / (began.elapsed_time(ended) / 1000))
    return statistics.median(found)


def fsdp_step(delay: float) -> Step:
    """A step of rank 0 of several, whose collectives take `delay` seconds each."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    cycles = cycles_per_second()
    for name in COLLECTIVES:
        if original := vars(dist.ProcessGroup).get(name):

            def delayed(*arguments: Any, original: Any = original, **options: Any) -> Any:
                wait_on_stream(delay, cycles)
                return original(*arguments, **options)

            setattr(dist.ProcessGroup, name, delayed)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh(DEVICE.type, (RANKS,))
    with DEVICE:
        blocks = [
            nn.Sequential(nn.Linear(WIDTH, INNER, bias=False), nn.GELU(), nn.Linear(INNER, WIDTH, bias=False))
            for _ in range(BLOCKS)
        ]
        model = nn.Sequential(*blocks)
        inputs = torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16)
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)

    def step() -> None:
        model(inputs).float().mean().backward()
        model.zero_grad()

    return step


def nccl_step(how: str) -> Step:
    """A step with an all-gather over one rank, which is a copy."""
    dist.init_process_group("gloo" if TINY else "nccl", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    part = torch.randn(COPIED, dtype=torch.bfloat16, device=DEVICE)
    whole = torch.empty_like(part)
    square = torch.randn(WIDTH, WIDTH, dtype=torch.bfloat16, device=DEVICE)

    def synchronous() -> None:
        all_gather(whole, part)
        torch.mm(square, square)

    def asynchronous() -> None:
        work = all_gather(whole, part, async_op=True)
        torch.mm(square, square)
        work.wait()

    def by_function() -> Tensor:
        gathered = functional.wait_tensor(functional_all_gather(part, 0, group))
        return gathered.sum() + torch.mm(square, square).sum()

    if how == "compiled":
        compiled: Step = torch.compile(by_function, backend="aot_eager" if TINY else "inductor")
        return compiled
    return {"synchronous": synchronous, "asynchronous": asynchronous, "functional": by_function}[how]


def beside_compute(kernels: list[Event]) -> float:
    """Time in which the compute stream has no kernel, but another stream has."""
    streams: dict[int | str, list[tuple[float, float]]] = {}
    for kernel in kernels:
        if "spin_kernel" not in kernel.name:
            streams.setdefault(kernel.thread, []).append((kernel.begin, kernel.end))
    compute = max(streams, key=lambda stream: total(union(streams[stream])))
    others = [(one.begin, one.end) for one in kernels if one.thread != compute]
    return total(subtract(union(others), union(streams[compute])))


def copies(kernels: list[Event]) -> float:
    """Time in which the all-gather runs and nothing else."""
    communicates = [one for one in kernels if "nccl" in one.name.lower() or "Memcpy DtoD" in one.name]
    computes = union((one.begin, one.end) for one in kernels if one not in communicates)
    return total(subtract(union((one.begin, one.end) for one in communicates), computes))


def profiled(step: Step, timer: WaitTimer, exposed: Exposed) -> tuple[Sample, float | None]:
    """A step with the timer, and what its trace says."""
    with profile(activities=[ProfilerActivity.CPU] if TINY else [ProfilerActivity.CUDA]) as recorded:
        with timer.sample():
            step()
        synchronize()
    (sample,) = timer.take()
    if TINY:
        return sample, None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        if out := os.environ.get("OUT"):
            Path(out, f"exposed_{len(list(Path(out).glob('exposed_*.json.gz')))}.json.gz").write_bytes(
                gzip.compress(path.read_bytes())
            )
        return sample, exposed(read_trace(path).kernels)


def timed(step: Step, context: Callable[[], AbstractContextManager[None]]) -> tuple[float, float]:
    """Seconds per step, and seconds per step until all its work is launched."""
    synchronize()
    began = time.perf_counter()
    for _ in range(STEPS):
        with context():
            step()
    launched = time.perf_counter()
    synchronize()
    return (time.perf_counter() - began) / STEPS, (launched - began) / STEPS


def measure(step: Step, exposed: Exposed) -> dict[str, Any]:
    timer = WaitTimer(DEVICE)
    for _ in range(3):
        step()
    with timer.sample():
        step()
    synchronize()
    timer.take()
    sample, trace = profiled(step, timer, exposed)
    plain, sampled = [], []
    for _ in range(PAIRS):  # alternating, since clocks drift
        plain.append(timed(step, nullcontext))
        sampled.append(timed(step, timer.sample))
    (step_plain, host_plain), (step_sampled, host_sampled) = (
        [statistics.median(column) for column in zip(*rows, strict=True)] for rows in (plain, sampled)
    )
    without_profiler = [one.seconds() for one in timer.take()]
    return {
        "seconds": sample.seconds(),
        "trace": trace,
        "waits": len(sample.waits),
        "seconds_without_profiler": statistics.median(without_profiler),
        "step_seconds": step_plain,
        "step_ratio": step_sampled / step_plain,
        "host_seconds": host_plain,
        "host_ratio": host_sampled / host_plain,
        "sampled_one_in": EVERY,
    }


def cases() -> Iterator[tuple[str, Callable[[], Step], Exposed]]:
    for name, delay in DELAYS.items():
        yield f"fsdp {name}", lambda delay=delay: fsdp_step(delay), beside_compute
    for how in ("synchronous", "asynchronous", "functional", "compiled"):
        yield f"nccl {how}", lambda how=how: nccl_step(how), copies


def main() -> None:
    lines = []
    originals = {name: one for name, one in vars(dist.ProcessGroup).items() if name in COLLECTIVES}
    for name, make, exposed in cases():
        if ONLY not in name:
            continue
        line: dict[str, Any] = {"case": name}
        try:
            line |= measure(make(), exposed)
        except Exception:
            line["failed"] = traceback.format_exc()
        finally:
            for collective, original in originals.items():
                setattr(dist.ProcessGroup, collective, original)
            if dist.is_initialized():
                dist.destroy_process_group()
            if not TINY:
                torch.cuda.empty_cache()
        print(json.dumps(line), flush=True)
        lines.append(line)
    machine = {"torch": torch.__version__, "device": "cpu" if TINY else torch.cuda.get_device_name()}
    print(json.dumps(machine))
    if out := os.environ.get("OUT"):
        Path(out, "exposed.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [machine, *lines]))
    if any("failed" in line for line in lines):
        sys.exit(1)


if __name__ == "__main__":
    main()
