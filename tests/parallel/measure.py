"""Measure the communication and the memory of one rank in a step.

Most measurements are of rank 0 of a fake process group, in a forked process of its own. Shapes, sizes and the order of
operations are those of a real run, and the other ranks are assumed to hold the same as rank 0. The job is created by
the same `set_up` that a run uses.
"""

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore, PrefixStore, ProcessGroup, ProcessGroupGloo
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from shoal import api
from shoal.config.run import RunDirectory
from shoal.data.loader import MicroBatch, StepBatch
from shoal.launch.join import joined_within
from shoal.observe.progress import Reporter
from shoal.parallel.device import inspect_device
from shoal.parallel.ranks import Ranks
from shoal.train.inputs import read_inputs
from shoal.train.job import Job
from shoal.train.preflight import Preflight, preflight
from shoal.train.setup import Start, set_up
from tests.harness import run_ranks

CPU = torch.device("cpu")
NAMESPACES = ("c10d", "_c10d_functional")
# Not collectives: waiting for one, and wrapping its result.
BESIDES = ("wait_tensor", "_wrap_tensor_autograd")
PHASES = ("set up", "warming up", "step", "micro-batches", "update")


class Collective(NamedTuple):
    """One kind of collective, or send or recv, over groups of this many ranks."""

    kind: str
    ranks: int


class Amount(NamedTuple):
    """How many collectives, and their bytes: of the full tensor, as in `shoal.plan.speed.ring`."""

    number: int
    size: int


class Traffic(TorchDispatchMode):
    """Counts the communication of a rank. DDP's reducer uses the same dispatcher, so it is counted as well."""

    def __init__(self) -> None:
        super().__init__()
        self.amounts: dict[Collective, Amount] = {}
        self.scalars = 0  # all-reduces of a scalar, for the gradient norm

    def __torch_dispatch__(self, operation: Any, types: Any, given: Sequence[Any] = (), named: Any = None) -> Any:
        name = operation.__name__.partition(".")[0]
        if operation.namespace in NAMESPACES and name not in BESIDES:
            self._take(name, given)
        return operation(*given, **(named or {}))

    def _take(self, name: str, given: Sequence[Any]) -> None:
        collective, tensors, times = _read(name, given)
        if collective.kind == "all-reduce" and sum(one.numel() for one in tensors) == 1:
            self.scalars += 1
            return
        size = times * sum(one.numel() * one.element_size() for one in tensors)
        known = self.amounts.get(collective, Amount(0, 0))
        self.amounts[collective] = Amount(known.number + 1, known.size + size)


def _read(name: str, given: Sequence[Any]) -> tuple[Collective, list[Tensor], int]:
    """(collective, tensors, factor of their size). An unknown operation keeps its own name, which no expectation
    matches."""
    if name == "allreduce_":
        return Collective("all-reduce", _ranks(given[1])), given[0], 1
    if name == "_allgather_base_":
        return Collective("all-gather", _ranks(given[2])), [given[0]], 1
    if name == "_reduce_scatter_base_":
        return Collective("reduce-scatter", _ranks(given[2])), [given[1]], 1
    if name == "all_gather_into_tensor":
        return Collective("all-gather", _ranks(given[-1])), [given[0]], given[1]
    if name == "reduce_scatter_tensor":
        return Collective("reduce-scatter", _ranks(given[-1])), [given[0]], 1
    if name == "all_to_all_single":
        return Collective("all-to-all", _ranks(given[-1])), [given[0]], 1
    if name in ("send", "recv_"):
        return Collective(name.rstrip("_"), 2), given[0], 1
    return Collective(name, 0), [], 1


def _ranks(group: Any) -> int:
    if isinstance(group, str):
        return int(dist.distributed_c10d._resolve_process_group(group).size())
    return int(ProcessGroup.unbox(group).size())


class AnsweredSums(TorchDispatchMode):
    """DDP's reducer needs an all-reduce to return its tensors, which the fake group does not do: a real group of this
    process alone replaces it. Entered first, so that other modes see the original collective."""

    def __init__(self) -> None:
        super().__init__()
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = HashStore()
        group = ProcessGroup(store, 0, 1)
        backend = ProcessGroupGloo(PrefixStore("alone", store), 0, 1, timedelta(seconds=60))
        group._register_backend(CPU, ProcessGroup.BackendType.GLOO, backend)
        group._set_default_backend(ProcessGroup.BackendType.GLOO)
        self.alone = group.boxed()

    def __torch_dispatch__(self, operation: Any, types: Any, given: Sequence[Any] = (), named: Any = None) -> Any:
        if operation is torch.ops.c10d.allreduce_.default:
            given = (given[0], self.alone, *given[2:])
        return operation(*given, **(named or {}))


class Measured:
    """A run, one rank of which is measured."""

    def __init__(self, settings: dict[str, Any], *, length: int, start_from: Path | None = None) -> None:
        self.config = api.config_from_mapping(settings)
        self.inputs = read_inputs(self.config, Reporter(enabled=False))
        self.length = length
        self.start_from = start_from
        # Steps before the measured one: in the first, AdamW creates its state; after it, DDP rebuilds its buckets.
        self.warmup = 2 if self.config.parallel.strategy in ("ddp", "zero1") else 1

    def as_rank_zero(self, world_size: int, measure: Callable[[Callable[[], Job]], Any]) -> Any:
        """The result of `measure` on rank 0 of `world_size` fake ranks. Its argument sets up the job."""

        def alone() -> Any:
            ranks = Ranks(0, world_size, 0, CPU)
            answered: AbstractContextManager[Any] = nullcontext()
            if world_size > 1:
                dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
                answered = AnsweredSums()
            with answered, self._set_up(ranks) as make:
                return measure(make)

        return run_ranks(1, alone)[0]

    def as_each_rank(self, world_size: int, measure: Callable[[Callable[[], Job]], Any]) -> list[Any]:
        """The same on real ranks."""

        def one() -> Any:
            with joined_within(60.0, alone=False) as ranks, self._set_up(ranks) as make:
                return measure(make)

        return run_ranks(world_size, one)

    def batch(self, job: Job) -> StepBatch:
        """A step of sequences of exactly `length` tokens."""
        generator = torch.Generator().manual_seed(job.progress.step)
        micro_batch, vocabulary = job.resolved.micro_batch, self.inputs.blueprint.vocabulary
        micro_batches = [
            MicroBatch(*torch.randint(0, vocabulary, (2, micro_batch, self.length), generator=generator))
            for _ in range(job.resolved.grad_accum_steps)
        ]
        return StepBatch(micro_batches, job.resolved.global_batch * self.length, np.zeros(0))

    def traffic(self, make: Callable[[], Job]) -> tuple[dict[Collective, Amount], int]:
        """(collectives, scalar all-reduces) of one step."""
        job, traffic = make(), Traffic()
        for turn in range(self.warmup + 1):
            with traffic if turn == self.warmup else nullcontext():
                assert bool(job.step(self.batch(job), 1e-3).usable), "the measured step must not be skipped"
        return traffic.amounts, traffic.scalars

    def memory(self, make: Callable[[], Job]) -> "Memory":
        """The memory of setting up, and of one step after it."""
        with allocations() as memory:
            with record_function("set up"):
                job = make()
            _mark(job.model, "backward", "micro-batches")
            _mark(job.optimizer, "step", "update")
            for turn in range(self.warmup + 1):
                with record_function("step" if turn == self.warmup else "warming up"):
                    assert bool(job.step(self.batch(job), 1e-3).usable)
        return memory

    def loading(self, make: Callable[[], Job]) -> "Memory":
        """The memory of setting up."""
        with allocations() as memory, record_function("set up"):
            make()
        return memory

    def _preflight(self, ranks: Ranks) -> Preflight:
        return preflight(self.config, self.inputs, ranks.world_size, inspect_device(ranks.device))

    @contextmanager
    def _set_up(self, ranks: Ranks) -> Iterator[Callable[[], Job]]:
        with tempfile.TemporaryDirectory() as folder:
            run = RunDirectory(Path(folder))
            yield lambda: set_up(self._preflight(ranks), run, ranks, Start(checkpoint=self.start_from))


@dataclass
class Memory:
    """Bytes allocated by torch's allocator over time, without memory-mapped files."""

    totals: list[tuple[int, int]] = field(default_factory=list)  # (when, bytes from then on)
    phases: dict[str, tuple[int, int]] = field(default_factory=dict)  # the last of each name

    def before(self, phase: str) -> int:
        return self._until(self.phases[phase][0])

    def after(self, phase: str) -> int:
        return self._until(self.phases[phase][1])

    def peak(self, phase: str) -> int:
        start, end = self.phases[phase]
        return max([self._until(start), *(total for when, total in self.totals if start <= when <= end)])

    def _until(self, moment: int) -> int:
        return next((total for when, total in reversed(self.totals) if when < moment), 0)


@contextmanager
def allocations() -> Iterator[Memory]:
    """Every allocation in this context, from torch's profiler: exact, including temporaries inside of kernels.

    It sees this thread only. On real ranks a thread of Gloo may be the last to free a communicated tensor, so steps are
    measured on fake ranks.
    """
    memory = Memory()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        yield memory
    mapped = set()  # files: reported like allocations, but without the allocator's total
    for event in sorted(_flat(found.profiler.kineto_results.experimental_event_tree()), key=_start):
        if event.tag != _EventType.Allocation:
            if event.name in PHASES:
                memory.phases[event.name] = (event.start_time_ns, event.end_time_ns)
            continue
        made = event.extra_fields
        if made.alloc_size > 0 and made.total_allocated == 0:
            mapped.add(made.ptr)
        elif made.ptr in mapped:
            mapped.remove(made.ptr)
        else:
            memory.totals.append((event.start_time_ns, made.total_allocated))


def _start(event: Any) -> int:
    return int(event.start_time_ns)


def _flat(events: Sequence[Any]) -> Iterator[Any]:
    """The allocations and phases of a tree of events."""
    left = list(events)
    while left:
        event = left.pop()
        left += event.children
        if event.tag == _EventType.Allocation or event.name in PHASES:
            yield event


def _mark(owner: Any, method: str, phase: str) -> None:
    """Record the calls of a method as `phase`."""
    inner = getattr(owner, method)

    def marked(*given: Any, **named: Any) -> Any:
        with record_function(phase):
            return inner(*given, **named)

    setattr(owner, method, marked)
