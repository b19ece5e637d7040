"""Forward and backward pass as CUDA graphs, where launching the kernels takes longer than running them.

A small model has thousands of kernels of a few microseconds in each step, and the host cannot launch them as fast. A
CUDA graph is launched at once: the kernels of a micro-batch are captured, and then replayed with other tokens, which
are copied to where the kernels read them. The numbers do not change: the kernels are the same, and their random numbers
are those that follow in the generator.

A graph is captured for each shape that comes again. Texts and packed sequences have one length, and the number of
tokens for which the head is computed is rounded up to a few sizes.
"""

import gc
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from shoal.data.loader import MicroBatch
from shoal.mistakes import UserMistake
from shoal.models.cross_entropy import KEPT_SIZES
from shoal.parallel.gradients import Gradients
from shoal.parallel.micro_batches import MicroBatchRunner, Prepare
from shoal.parallel.precision import ComputeCopies

# Micro-batches of a shape before its graph is captured: the first one compiles the blocks and lets libraries allocate.
WARMUP = 3
MOST_GRAPHS = 8
# Graphs share their memory, except for the gradients that each of them allocates: at most so many bytes in all graphs
# but one.
MOST_GRADIENT_BYTES = 1 << 31

Shape = tuple[Any, ...]


@dataclass(frozen=True)
class _Captured:
    """A graph, and the tensors at the addresses that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    batch: MicroBatch
    sums: Tensor
    gradients: list[Tensor | None]


class GraphRunner(MicroBatchRunner):
    """Replays micro-batches of a shape that it has seen before."""

    def __init__(
        self,
        module: nn.Module,
        prepare: Prepare,
        gradients: Gradients,
        device: torch.device,
        *,
        accumulates: bool,
        must: bool,
    ) -> None:
        """`accumulates`: there are several micro-batches per step. `must`: a model that cannot be captured is an error,
        and does not just run without graphs."""
        super().__init__(module, prepare, keeps_weights=False)
        self.gradients = gradients
        self.accumulates = accumulates
        self.must = must
        self.failed = False
        self._captured: dict[Shape, _Captured] = {}
        self._seen: Counter[Shape] = Counter()
        self._steps = 0
        self._factor = torch.zeros((), device=device)  # read by the graphs
        self._pool: Any = None

    def backward(self, batches: Sequence[MicroBatch], factor: Tensor | float) -> Tensor:
        self._steps += 1
        if isinstance(factor, Tensor):
            self._factor.copy_(factor)
        else:
            self._factor.fill_(factor)
        return super().backward(batches, self._factor)

    def run(self, batch: MicroBatch, factor: Tensor | float, *, last: bool) -> Tensor:
        batch = _few_sizes(batch)
        captured = self._find(batch)
        if captured is None:
            return super().run(batch, factor, last=last)
        for mine, given in zip(_tensors(captured.batch), _tensors(batch), strict=True):
            if mine is not None:
                mine.copy_(given, non_blocking=True)
        captured.graph.replay()
        if not self.accumulates:
            for parameter, gradient in zip(self.gradients.parameters.values(), captured.gradients, strict=True):
                parameter.grad = gradient
        return captured.sums.clone()

    def _find(self, batch: MicroBatch) -> _Captured | None:
        """The graph of this shape, captured now if it is time to."""
        shape = (*(one if one is None else (one.shape, one.dtype) for one in _tensors(batch)), batch.loss_tokens)
        captured = self._captured.get(shape)
        if captured is not None or self.failed:
            return captured
        self._seen[shape] += 1
        # With accumulation a graph adds to gradients: those of the first micro-batch of this step, which stay there.
        exist = any(parameter.grad is not None for parameter in self.gradients.parameters.values())
        # Not before there is optimizer state: a graph keeps the memory of its activations, which the allocator counts
        # only while it is captured, so that the peak that is reported would be without that state.
        early = self._seen[shape] <= WARMUP or self._steps == 1
        if early or exist != self.accumulates or not self._has_room():
            return None
        try:
            self._captured[shape] = self._capture(batch)
        except RuntimeError as error:  # the model makes the host wait, or memory is short
            if self.must:
                reason = str(error).strip().partition("\n")[0]
                raise UserMistake(
                    f"train.cuda_graphs true: the forward and backward pass cannot be captured ({reason}); use auto."
                ) from error
            self.failed = True
            if not self.accumulates:
                self.gradients.clear()
        return self._captured.get(shape)

    def _has_room(self) -> bool:
        """Whether another graph may be captured."""
        others = 0
        if not self.accumulates:
            others = sum(0 if one is None else one.nbytes for each in self._captured.values() for one in each.gradients)
        return len(self._captured) < MOST_GRAPHS and others <= MOST_GRADIENT_BYTES

    def _capture(self, batch: MicroBatch) -> _Captured:
        fixed = self.prepare(batch)
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        generator = torch.cuda.default_generators[self._factor.device.index]
        before = generator.clone_state()
        self._forget_last_pass()
        try:
            # Threads of the data loader may allocate pinned memory meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                sums = self.forward_backward(fixed, self._factor)
        except BaseException:
            generator.graphsafe_set_state(before)  # it would wait for the end of the capture forever
            raise
        finally:
            self._forget_last_pass()
        self.gradients.in_place |= self.accumulates
        return _Captured(graph, fixed, sums, [one.grad for one in self.gradients.parameters.values()])

    def _forget_last_pass(self) -> None:
        """A gradient is accumulated in the stream in which its weight was used first, as long as a tensor that was
        computed from the weight exists. Inside and outside of a capture these are different streams."""
        for module in self.module.modules():
            if isinstance(module, ComputeCopies):
                module.uninstall()
        gc.collect()


def _few_sizes(batch: MicroBatch) -> MicroBatch:
    """Round the number of loss tokens up to one of as many sizes as there may be graphs; or to what the head is
    computed for anyway, where the objective says how many there are: masked tokens are nearly as many each time."""
    found = batch.counted()
    if found is None:
        return batch
    step = -(-batch.labels.numel() // (MOST_GRAPHS if batch.loss_tokens is None else KEPT_SIZES))
    return replace(batch, loss_tokens=max(1, -(-found // step)) * step)


def _tensors(batch: MicroBatch) -> list[Any]:
    """The tensors of a micro-batch, or None for those that it does not have."""
    values = [getattr(batch, field.name) for field in fields(batch)]
    return [one for one in values if one is None or isinstance(one, Tensor)]
