"""Measuring one rank: what it sends in a step, and what memory it takes.

Most measurements are of rank 0 of a fake process group, in a forked process of its own: shapes, sizes and the order of
everything are those of a real run, and the other ranks are taken to have what rank 0 has. The job is made by the same
`set_up` that a run uses.
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
from torch.profiler import ProfilerActivity, profile, record_function
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from shoal import api
from shoal.config.run import RunDirectory
from shoal.data.loader import MicroBatch, StepBatch
from shoal.launch.join import joined_within
from shoal.observe.progress import Reporter
from shoal.parallel.ranks import Ranks
from shoal.train.inputs import read_inputs
from shoal.train.job import Job
from shoal.train.setup import Start, set_up
from tests.harness import run_ranks

CPU = torch.device("cpu")
WARM_UP = 2  # steps before the one that is measured: DDP arranges its buckets in the first, AdamW makes its state
NAMESPACES = ("c10d", "_c10d_functional")
# Not exchanges of their own: waiting for one, and marking its result.
BESIDES = ("wait_tensor", "_wrap_tensor_autograd")
PHASES = ("set up", "warming up", "step", "grad_accum_steps", "update")


class Exchange(NamedTuple):
    """One kind of exchange among groups of so many ranks."""

    kind: str
    ranks: int


class Amount(NamedTuple):
    """How many exchanges, and their bytes: of the whole tensor, as `shoal.plan.ring` has it."""

    number: int
    size: int


class Traffic(TorchDispatchMode):
    """Counts what a rank exchanges. DDP's reducer goes through the same dispatcher, so it is seen as well."""

    def __init__(self) -> None:
        super().__init__()
        self.amounts: dict[Exchange, Amount] = {}
        self.scalars = 0  # sums of one number: the gradient norm's

    def __torch_dispatch__(self, operation: Any, types: Any, given: Sequence[Any] = (), named: Any = None) -> Any:
        name = operation.__name__.partition(".")[0]
        if operation.namespace in NAMESPACES and name not in BESIDES:
            self._take(name, given)
        return operation(*given, **(named or {}))

    def _take(self, name: str, given: Sequence[Any]) -> None:
        exchange, tensors, times = _read(name, given)
        if exchange.kind == "all-reduce" and sum(one.numel() for one in tensors) == 1:
            self.scalars += 1
            return
        size = times * sum(one.numel() * one.element_size() for one in tensors)
        known = self.amounts.get(exchange, Amount(0, 0))
        self.amounts[exchange] = Amount(known.number + 1, known.size + size)


def _read(name: str, given: Sequence[Any]) -> tuple[Exchange, list[Tensor], int]:
    """(what it is, the tensors, by what to multiply their size). An operation not known here keeps its own name, and
    no expectation fits it."""
    if name == "allreduce_":
        return Exchange("all-reduce", _ranks(given[1])), given[0], 1
    if name == "_allgather_base_":
        return Exchange("all-gather", _ranks(given[2])), [given[0]], 1
    if name == "_reduce_scatter_base_":
        return Exchange("reduce-scatter", _ranks(given[2])), [given[1]], 1
    if name == "all_gather_into_tensor":
        return Exchange("all-gather", _ranks(given[-1])), [given[0]], given[1]
    if name == "reduce_scatter_tensor":
        return Exchange("reduce-scatter", _ranks(given[-1])), [given[0]], 1
    if name == "all_to_all_single":
        return Exchange("all-to-all", _ranks(given[-1])), [given[0]], 1
    if name in ("send", "recv_"):
        return Exchange(name.rstrip("_"), 2), given[0], 1
    return Exchange(name, 0), [], 1


def _ranks(group: Any) -> int:
    if isinstance(group, str):
        return int(dist.distributed_c10d._resolve_process_group(group).size())
    return int(ProcessGroup.unbox(group).size())


class AnsweredSums(TorchDispatchMode):
    """DDP's reducer wants an all-reduce to answer with its tensors, which the fake group does not do: a real group of
    this process alone answers in its place. Entered first, so that others see the exchange as it was meant."""

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
    """A run of which one rank is measured."""

    def __init__(self, settings: dict[str, Any], *, length: int, start_from: Path | None = None) -> None:
        self.config = api.config_from_mapping(settings)
        self.inputs = read_inputs(self.config, Reporter(speaks=False))
        self.length = length
        self.start_from = start_from

    def as_rank_zero(self, world_size: int, measure: Callable[[Callable[[], Job]], Any]) -> Any:
        """What `measure` finds as rank 0 of `world_size` fake ranks; it is given a function that sets the job up."""

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
        """A step of rows of exactly `length` tokens."""
        generator = torch.Generator().manual_seed(job.progress.step)
        rows, vocabulary = job.chosen.micro_batch, self.inputs.blueprint.vocabulary
        grad_accum_steps = [
            MicroBatch(*torch.randint(0, vocabulary, (2, rows, self.length), generator=generator))
            for _ in range(job.chosen.grad_accum_steps)
        ]
        return StepBatch(grad_accum_steps, job.chosen.global_batch * self.length, np.zeros(0))

    def traffic(self, make: Callable[[], Job]) -> tuple[dict[Exchange, Amount], int]:
        """(exchanges, sums of one number) of one step."""
        job, traffic = make(), Traffic()
        for turn in range(WARM_UP + 1):
            with traffic if turn == WARM_UP else nullcontext():
                assert bool(job.step(self.batch(job), 1e-3).usable), "a step that is skipped is none"
        return traffic.amounts, traffic.scalars

    def memory(self, make: Callable[[], Job]) -> "Memory":
        """What setting up takes, and one step after it."""
        with allocations() as memory:
            with record_function("set up"):
                job = make()
            _mark(job.model, "backward", "grad_accum_steps")
            _mark(job.optimizer, "step", "update")
            for turn in range(WARM_UP + 1):
                with record_function("step" if turn == WARM_UP else "warming up"):
                    assert bool(job.step(self.batch(job), 1e-3).usable)
        return memory

    def loading(self, make: Callable[[], Job]) -> "Memory":
        """What setting up takes."""
        with allocations() as memory, record_function("set up"):
            make()
        return memory

    @contextmanager
    def _set_up(self, ranks: Ranks) -> Iterator[Callable[[], Job]]:
        with tempfile.TemporaryDirectory() as folder:
            run = RunDirectory(Path(folder))
            yield lambda: set_up(self.config, self.inputs, run, ranks, Start(checkpoint=self.start_from))


@dataclass
class Memory:
    """Bytes that torch's allocator had given out, over time. Files that are mapped are not among them."""

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
    """Every allocation made within, as torch's profiler has it: exact, temporary ones inside of kernels included.

    It sees this thread. On real ranks the last to let go of a tensor that was exchanged may be a thread of gloo's, so
    steps are measured on fake ranks.
    """
    memory = Memory()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        yield memory
    mapped = set()  # files: reported like allocations, but with the allocator's total left out
    for event in sorted(_flat(found.profiler.kineto_results.experimental_event_tree()), key=_start):
        if event.tag.name != "Allocation":
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
    for event in events:
        yield event
        yield from _flat(event.children)


def _mark(owner: Any, method: str, phase: str) -> None:
    """Make `phase` of the calls of a method."""
    inner = getattr(owner, method)

    def marked(*given: Any, **named: Any) -> Any:
        with record_function(phase):
            return inner(*given, **named)

    setattr(owner, method, marked)
