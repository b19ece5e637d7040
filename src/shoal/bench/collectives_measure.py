"""Measures collectives on one rank: checks their results and times them."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shoal.bench.collectives_report import Measured, Timing
from shoal.bench.collectives_request import Request, sizes_up_to
from shoal.bench.sizes import show_seconds, show_size
from shoal.observe.progress import Reporter
from shoal.parallel.collectives import all_gather_single as all_gather
from shoal.parallel.collectives import reduce_scatter_single as reduce_scatter
from shoal.parallel.device import describe_machine
from shoal.parallel.ranks import Ranks
from shoal.plan.speed.ring import OPERATIONS, Operation

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# A sample is as many consecutive calls as take this long, so that clock resolution and rank skew are negligible.
SAMPLE_SECONDS = 0.005
MAX_CALLS = 1000
WARM_UP = 3
# Quartiles need at least this many.
MIN_SAMPLES = 3
# Period of the test values. No 2^k is one short of a multiple of 7, so swapped chunks are detected.
PERIOD = 7


class Buffers:
    """The tensors of one size: the full tensor, and this rank's chunk of it."""

    def __init__(self, size: int, dtype: torch.dtype, ranks: Ranks) -> None:
        self.ranks = ranks
        # Written to, because untouched pages would all map to one zero page.
        self.whole = torch.empty(size // dtype.itemsize, dtype=dtype, device=ranks.device).zero_()
        self.part = torch.empty_like(self.whole.chunk(ranks.world_size)[0]).zero_()

    def call(self, operation: Operation) -> Callable[[], object]:
        """A function that runs one collective; all ranks have to call it."""
        if operation == "all-reduce":
            return lambda: dist.all_reduce(self.whole, group=self.ranks.group)
        if operation == "all-gather":
            return lambda: all_gather(self.whole, self.part)
        return lambda: reduce_scatter(self.part, self.whole)

    def is_correct(self, operation: Operation) -> bool:
        """Check one call with values that differ by rank and position; leaves zeros, which sum to zeros."""
        rank, count = self.ranks.rank, self.ranks.world_size
        mine = self._values([rank])
        self.whole.copy_(mine)
        self.part.copy_(mine.chunk(count)[rank])
        self.call(operation)()
        if operation == "all-gather":
            parts = zip(self.whole.chunk(count), range(count), strict=True)
            right = all(torch.equal(part, self._values([owner]).chunk(count)[owner]) for part, owner in parts)
        else:
            expected = self._values(range(count))
            found = self.whole if operation == "all-reduce" else self.part
            right = torch.equal(found, expected if operation == "all-reduce" else expected.chunk(count)[rank])
        self.whole.zero_()
        self.part.zero_()
        return right

    def _values(self, owners: list[int] | range) -> torch.Tensor:
        """The sum over these ranks' values: ones and zeros, so that sums over hundreds of ranks are exact in bf16."""
        period = [float(sum((index + owner) % PERIOD == 0 for owner in owners)) for index in range(PERIOD)]
        table = torch.tensor(period, dtype=self.whole.dtype, device=self.whole.device)
        return table.repeat(-(-self.whole.numel() // PERIOD))[: self.whole.numel()]


def measure(
    request: Request,
    largest: int,
    ranks: Ranks,
    reporter: Reporter,
    operations: Sequence[Operation] = OPERATIONS,
) -> Measured:
    """Time `operations` at every size. Stops early, with a message in `faults`, if a result is wrong. In a group that
    is not of all ranks, only all-reduce can be measured."""
    sizes = sizes_up_to(largest, ranks.world_size)
    timings: list[Timing] = []
    faults: list[str] = []
    reporter.begin(0, len(sizes) * len(operations), noun="measurement", waiting="ranks meet")
    for size in sizes:
        buffers = Buffers(size, DTYPES[request.dtype], ranks)
        for operation in operations:
            wrong = _ranks_where(not buffers.is_correct(operation), ranks)
            if wrong:
                faults.append(f"{operation} of {show_size(size)} gave a wrong result on rank {_listed(wrong)}")
                continue
            timing = _time(operation, size, buffers.call(operation), ranks, request)
            timings.append(timing)
            reporter.advance(len(timings))
            reporter.tell(f"{operation:14}  {show_size(size):>8}  {show_seconds(timing.seconds):>8}")
        if faults:
            break
    reporter.end()
    return Measured(**_machine(ranks), dtype=request.dtype, timings=timings, faults=faults)


def _time(operation: Operation, size: int, call: Callable[[], object], ranks: Ranks, request: Request) -> Timing:
    def sample(calls: int) -> float:
        """Seconds per call on the slowest rank, which is what a training step waits for."""
        ranks.barrier()
        _finish(ranks)
        began = time.perf_counter()
        for _ in range(calls):
            call()
        _finish(ranks)
        return ranks.largest((time.perf_counter() - began) / calls)

    about = min(sample(1) for _ in range(WARM_UP))
    # Computed from a value that is the same on all ranks, so that all make the same number of calls.
    calls = min(MAX_CALLS, max(1, round(SAMPLE_SECONDS / about)))
    samples = max(MIN_SAMPLES, min(request.repeat, int(request.seconds / (about * calls))))
    taken = [sample(calls) for _ in range(samples)]
    low, middle, high = statistics.quantiles(taken, n=4, method="inclusive")
    return Timing(operation, size, middle, low, high, samples, calls)


def _finish(ranks: Ranks) -> None:
    """Wait for the device."""
    if ranks.device.type == "cuda":
        torch.cuda.synchronize(ranks.device)


def _ranks_where(found: bool, ranks: Ranks) -> list[int]:
    flags = torch.zeros(ranks.world_size)
    flags[ranks.rank] = float(found)
    return [int(rank) for rank in ranks.sum(flags).nonzero().flatten()]


def _listed(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"{shown} and {len(ranks) - 8} more" if len(ranks) > 8 else shown


def _machine(ranks: Ranks) -> dict[str, Any]:
    """The hardware and software that the results depend on, without identifying the machine."""
    cuda = ranks.device.type == "cuda"
    nodes = ranks.sum(torch.tensor([float(ranks.local_rank == 0)]))
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if cuda else None  # type: ignore[no-untyped-call]
    return {
        **describe_machine(ranks.device),
        "backend": f"nccl {nccl}" if cuda else "gloo",
        "ranks": ranks.world_size,
        "nodes": int(nodes),
    }
