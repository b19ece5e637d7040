"""What training keeps from one micro-batch to the next, as the caching allocator sees it: weights, gradients, and the
state of the optimizer."""

from dataclasses import replace

from shoal.catalogue.optimizers import find_optimizer
from shoal.plan.memory.buffers import adafactor_copies
from shoal.plan.memory.retained import gradient_buckets
from shoal.plan.memory.segments import Allocator, Block
from shoal.plan.memory.states import BUCKET_BYTES, adapted, stored_bytes
from shoal.plan.run.blocks import Linear, linears
from shoal.plan.run.run import Run

Name = tuple[int | str, ...]  # of a trained matrix


def state_widths(run: Run) -> list[float]:
    """Bytes per parameter of each tensor of optimizer state that is on the device and of its parameter's size."""
    optimizer = find_optimizer(run.optimizer)
    stateless = optimizer.factored or (optimizer.state_option == "momentum" and not run.momentum)
    if stateless or run.paged_optimizer or run.offload != "none":
        return []
    count = max(1, optimizer.state_tensors)
    return [optimizer.bytes_per_parameter(run.trained_bytes) / count] * count


def replayed_linears(run: Run) -> tuple[Linear, ...]:
    """The linear layers of a block, of a tensor-parallel rank. Transformer Engine's that read the same norm are one."""
    tp, found = run.mesh.tp, linears(run.shape, joined=run.traits.fused_qkv)
    if tp > 1:
        sizes = [(one, one.local_sizes(tp)) for one in found]
        found = tuple(replace(one, inputs=int(inputs), outputs=int(outputs)) for one, (inputs, outputs) in sizes)
    mlp = [one for one in found if one.reads == "second norm"]
    if not run.has_engine or len(mlp) < 2:
        return found
    place = found.index(mlp[0])
    joined = replace(mlp[0], outputs=sum(one.outputs for one in mlp))
    return (*found[:place], joined, *found[place + len(mlp) :])


class ReplayedStates:
    """The tensors of a rank's weights, gradients and optimizer state."""

    def __init__(self, run: Run, memory: Allocator) -> None:
        self.run, self.memory = run, memory
        self.matrices = replayed_linears(run)
        self.table = run.shape.vocab * run.shape.hidden / run.mesh.tp
        self.adapted, self.rank = (adapted(run), run.adapter.rank) if run.adapter is not None else ([], 0)
        self.buffered = run.buffers_gradients
        # Whether gradients are reduced on another stream, or added to the buffer; which matmuls may do themselves.
        self.passing = run.sharded or self.buffered
        self.within = self.buffered and run.traits.accumulates_in_matmuls
        self.gradients: dict[Name, Block] = {}
        self.optimizer: list[Block] = []
        self._weights()

    def _weights(self) -> None:
        run, take = self.run, self.memory.take
        other: float = run.weight_bytes
        each: float = other
        if run.adapter is not None:
            other = 4 if run.adapter.upcasts else run.frozen_bytes
            each = run.frozen_bytes if run.adapter.quantize is None else stored_bytes(run, run.adapter)
        sharing = run.shards if run.sharded else 1
        if run.offload == "cpu":
            return
        casts = run.mixed and not run.sharded and not run.traits.casts_per_use and run.adapter is None
        copies = run.compute_bytes if casts else 0
        if self.buffered:  # master weights are sharded like the rest of the optimizer's state
            copies = run.compute_bytes
            other = each = other / run.optimizer_shards
        tables = [self.table] * (1 if run.shape.tied else 2)
        for size in tables:
            take(size * other / sharing)
            if copies:
                take(size * copies)
        for _ in range(run.shape.layers):
            for one in self.matrices:
                take(one.parameters * each / sharing)
                if copies:
                    take(one.parameters * copies)
            for one in self.adapted:
                take(self.rank * one.inputs * run.trained_bytes)
                take(self.rank * one.outputs * run.trained_bytes)
        trained = sum(size for _, size in self._trained_tensors())
        if self.buffered:
            take(trained * run.added_bytes)
        buckets = gradient_buckets(run, trained * run.trained_bytes)
        for _ in range(int(buckets // BUCKET_BYTES)):
            take(BUCKET_BYTES)

    def _trained_tensors(self) -> list[tuple[Name, float]]:
        """Every trained matrix, with the number of its elements, in the order of the model's parameters."""
        run = self.run
        found: list[tuple[Name, float]] = []
        if run.trained.embedding:
            found.append((("embedding",), float(self.table)))
        for block in range(run.shape.layers):
            for one in self.matrices if run.trained.blocks else ():
                found.append(((block, one.name), float(one.parameters)))
            for one in self.adapted:
                found.append(((block, one.name, "A"), float(self.rank * one.inputs)))
                found.append(((block, one.name, "B"), float(self.rank * one.outputs)))
        if run.trained.head and not run.shape.tied:
            found.append((("head",), float(self.table)))
        return found

    def add_gradient(self, name: Name, size: float) -> None:
        """A new gradient; or one that is added to what is there."""
        run, memory, computed = self.run, self.memory, self.run.compute_bytes
        if self.passing:
            if not self.within or name == ("embedding",):
                memory.give(memory.take(size * computed))
            return
        itemsize = run.gradient_bytes or run.trained_bytes
        narrow = computed < itemsize
        if name in self.gradients:
            parts = [] if narrow and name == ("embedding",) else [memory.take(size * min(computed, itemsize))]
            if narrow:
                parts.append(memory.take(size * itemsize))
            elif name == ("embedding",) and run.shape.tied:
                total = memory.take(size * itemsize)
                memory.give(self.gradients[name])
                self.gradients[name] = total
            memory.give(*parts)
            return
        first = memory.take(size * computed) if narrow else None
        self.gradients[name] = memory.take(size * itemsize)
        if first is not None:
            memory.give(first)

    def step(self) -> None:
        run, memory = self.run, self.memory
        updated = [size for _, size in self._trained_tensors()]
        # FSDP shards each tensor; PyTorch's ZeRO-1 has whole ones by turns.
        if run.sharded or self.buffered:
            updated = [size / run.optimizer_shards for size in updated]
        else:
            updated = updated[:: run.optimizer_shards]
        if not self.optimizer:
            widths = state_widths(run)
            self.optimizer = [memory.take(size * width) for size in updated for width in widths]
        if run.foreach_step:
            memory.give(*[memory.take(size * run.trained_bytes) for size in updated])
        if find_optimizer(run.optimizer).factored:
            for size in updated:
                memory.give(*[memory.take(size * 4) for _ in range(adafactor_copies(run))])
        memory.give(*self.gradients.values())
        self.gradients = {}
