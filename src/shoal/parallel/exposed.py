"""The time for which a step waits for communication, measured in some of the steps and without a synchronization.

Communication is exposed where the device, or on a CPU the host, has nothing else to do: at a wait of the compute stream
for a collective, or in a collective that runs on the compute stream itself. In a sampled step, the functions with which
PyTorch does either (`_waits`) are replaced by ones that also mark the compute stream before and after the call: with
CUDA events that are read later, or on a CPU with the host clock. DDP waits in C++; it has a timer of its own.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from shoal.observe.device_clock import Mark, mark, seconds_between
from shoal.parallel.model import TrainedModel

# These steps of a run are sampled, and after them one in so many.
FIRST, EVERY = 10, 10
# Methods of a process group that communicate. Some of the names are new in torch 2.13, which renames others.
COLLECTIVES = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "gather", "scatter", "send", "recv", "barrier"),
    *("allgather", "_allgather_base", "allgather_coalesced", "allgather_into_tensor_coalesced"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "alltoall", "alltoall_base"),
    *("all_gather_single", "all_gather_single_coalesced", "reduce_scatter_single", "reduce_scatter_single_coalesced"),
    *("all_to_all_single", "_end_coalescing"),
)


@dataclass(frozen=True)
class Sample:
    """The waits of one step."""

    waits: list[tuple[Mark, Mark]]

    def seconds(self) -> float:
        return sum(seconds_between(*each) for each in self.waits)


class WaitTimer:
    """Times the waits for communication in the blocks that `sample` encloses."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._samples: list[Sample] = []
        self._paused = False

    @contextmanager
    def sample(self) -> Iterator[None]:
        """Time the waits of this block. The host does not wait for the device."""
        waits: list[tuple[Mark, Mark]] = []
        thread, stream = threading.get_ident(), self._stream()
        within: set[int] = set()  # threads that are in a call: one such function may call another

        def timed(original: Callable[..., Any], of_stream: bool) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                here, waiting = threading.get_ident(), arguments[0].cuda_stream if of_stream else self._stream()
                # The backward pass on a GPU has a thread that Python has not started; threads of ours wait for saves.
                trains = here == thread or type(threading.current_thread()) is threading._DummyThread
                counts = trains and waiting == stream and here not in within and not self._captures()
                if not counts or self._paused or (of_stream and not _for_communication()):
                    return original(*arguments, **options)
                within.add(here)
                began = mark(self.device)
                try:
                    return original(*arguments, **options)
                finally:
                    waits.append((began, mark(self.device)))
                    within.discard(here)

            return call

        replaced = list(self._waits())
        for owner, name, original in replaced:
            replacement: Any = timed(original, owner is torch.cuda.Stream)
            setattr(owner, name, replacement if isinstance(owner, type) else _Operator(replacement, original))
        try:
            yield
        finally:
            for owner, name, original in replaced:
                setattr(owner, name, original)
            self._samples.append(Sample(waits))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the waits of this block, within one that is sampled."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def take(self) -> list["Sample"]:
        """The samples since the last call. They can be read once the device has finished them."""
        taken, self._samples = self._samples, []
        return taken

    def _captures(self) -> bool:
        """Whether a CUDA graph is captured: an event in it could not be read."""
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _stream(self) -> int:
        return torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else 0

    def _waits(self) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
        """Where each function that waits is found, its name, and the function."""
        for name in COLLECTIVES:
            if name in vars(dist.ProcessGroup):
                yield dist.ProcessGroup, name, vars(dist.ProcessGroup)[name]
        yield dist.Work, "wait", vars(dist.Work)["wait"]
        # Functional collectives wait in an operator, which compiled code calls too.
        operator = torch.ops._c10d_functional.wait_tensor
        yield operator, "_op", operator._op
        yield operator.default, "_op", operator.default._op
        if self.device.type == "cuda":
            yield torch.cuda.Stream, "wait_event", torch.cuda.Stream.wait_event


class _Operator:
    """What an operator calls in place of `original`. It has the same hash: operators are keys of tables by it."""

    def __init__(self, call: Callable[..., Any], original: Any) -> None:
        self._call, self._original = call, original

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._call(*arguments, **options)

    def __hash__(self) -> int:
        return hash(self._original)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def _for_communication() -> bool:
    """Whether the caller of `Stream.wait_event` waits for communication: FSDP and DeepSpeed do. Others wait for copies,
    such as that of offloaded activations."""
    frame = sys._getframe(2)
    if frame.f_globals.get("__name__") == "torch.cuda.streams" and frame.f_back is not None:
        frame = frame.f_back  # the caller of `wait_stream`
    return str(frame.f_globals.get("__name__")).startswith(("torch.distributed.", "deepspeed."))


class ExposedCommunication:
    """Measures the exposed communication of a run's steps."""

    def __init__(self, model: TrainedModel) -> None:
        self.alone = model.parallel_dims.mesh.world_size == 1
        self._timer = WaitTimer(model.parallel_dims.device)
        self._replicated = [one for one in model.modules if isinstance(one, DistributedDataParallel)]
        self._steps = 0
        self._known: float | None = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Encloses every step, and samples some."""
        self._steps += 1
        if self.alone or (self._steps > FIRST and self._steps % EVERY):
            yield
        else:
            with self._timer.sample():
                yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Encloses what is done within a step and does not belong to it, such as an evaluation in a custom loop."""
        with self._timer.paused():
            yield

    def take(self) -> Callable[[], float | None]:
        """A function for when the device has finished the steps so far: the seconds per step in which the device of
        this rank, or on a CPU the host, waited for communication. The mean of the steps that were sampled since the
        last call; if none were, the last one known; None: nothing is."""
        samples = self._timer.take()

        def seconds() -> float | None:
            if self.alone:
                return 0.0
            if samples:
                self._known = sum(sample.seconds() for sample in samples) / len(samples)
            found = [self._known, *map(_replicated_seconds, self._replicated)]
            known = [one for one in found if one is not None]
            return sum(known) if len(known) == len(found) else None

        return seconds


def _replicated_seconds(model: DistributedDataParallel) -> float | None:
    """What DDP measures with device events, in the first ten steps and in every hundredth: the time of its all-reduces
    that does not overlap with the backward pass."""
    found: dict[str, int] = model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    all_reduce, hidden = found.get("backward_comm_time"), found.get("backward_compute_comm_overlap_time")
    if not all_reduce or hidden is None:
        return None  # not measured yet
    return max(0.0, (all_reduce - hidden) / 1e9)
