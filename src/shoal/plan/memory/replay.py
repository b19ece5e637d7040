"""Training steps as the caching allocator sees them: tensors in the order in which they are allocated and freed."""

from shoal.plan.memory.activations import block_input, has_mlp_in_place, held_by_functions, score_elements
from shoal.plan.memory.head import head
from shoal.plan.memory.replayed_loss import CHUNKED_LOSSES, logits_gradient
from shoal.plan.memory.replayed_states import ReplayedStates, replayed_linears
from shoal.plan.memory.saved_tensors import PARTS, READS, kept_tensors
from shoal.plan.memory.segments import MIB, Allocator, Block
from shoal.plan.memory.states import dequantized_bytes
from shoal.plan.run.blocks import Linear
from shoal.plan.run.run import Run

# Of `head`: what other terms have already.
HIDDEN = {"final norm", "hidden states", "hidden states gradient"}


class Steps:
    """The tensors of training steps in the order in which they are allocated and freed."""

    def __init__(self, run: Run, limit: float) -> None:
        # Tensors of up to 1 MiB have segments of their own: there are many, and they hardly matter.
        self.run, self.memory = run, Allocator(limit, ignored=MIB)
        self.matrices = replayed_linears(run)
        self.reading = {part: [one for one in self.matrices if one.reads == READS[part]] for part in PARTS}
        self.table = run.shape.vocab * run.shape.hidden / run.mesh.tp
        self.eager = not run.compiled
        self.casts = run.casts_weights and not run.sharded
        self.upcast_norms = self.eager and run.traits.unfused_norms and run.shape.traits.rms_norm
        self.cached: list[Block] = []
        self.held: list[Block] = []
        quantized = run.adapter is not None and run.adapter.quantize is not None
        largest = max(one.parameters for one in self.matrices)
        ahead, back = (dequantized_bytes(run, forward=forward) for forward in (True, False))
        self.dequantized = (largest * ahead, largest * back) if quantized else (0.0, 0.0)
        self.states = ReplayedStates(run, self.memory)
        self.targets = {one.name for one in self.states.adapted}
        self.change_length(run.length)

    def change_length(self, length: int) -> None:
        if length != self.run.length:
            self.run = self.run.with_(length=length)
        run = self.run
        self.stream = block_input(run)
        self.hidden = run.tokens * run.shape.hidden * run.compute_bytes
        self.attended = run.tokens * run.shape.query_width / run.mesh.tp * run.compute_bytes
        self.wide = run.tokens * run.shape.hidden * 4.0
        self.kept, self.unfreed = kept_tensors(run), held_by_functions(run)
        self.scores = score_elements(run)
        self.outputs = {one.name: self._output_sizes(one) for one in self.matrices}

    def step(self) -> None:
        # The first step is there for where it leaves the state. A second micro-batch finds the gradients of the first,
        # which are there anyway if they are in a buffer.
        differs = self.states.optimizer and not self.states.buffered
        for _ in range(min(2, self.run.grad_accum_steps) if differs else 1):
            self.micro_batch()
        self.states.step()

    def micro_batch(self) -> None:
        run, memory = self.run, self.memory
        stream = memory.take(self.stream)
        saved: list[tuple[Block | None, dict[str, list[Block]]]] = []
        every = run.recompute if isinstance(run.recompute, int) else 1
        most = run.recomputed_blocks or run.shape.layers

        def checkpointed(index: int) -> bool:
            return run.repeats_forward and index % every == 0 and index < most

        for index in range(run.shape.layers):
            output, kept = self.forward(keeps=not checkpointed(index))
            if checkpointed(index):
                # Autocast keeps its copies until its context ends, after the loss.
                self.cached += kept["copies"]
                if run.offloads_inputs:
                    memory.give(stream)
                saved.append((None if run.offloads_inputs else stream, {}))
            else:
                memory.give(stream)
                saved.append((None, kept))
            stream = output
        gradient = self.loss(stream)
        for index in reversed(range(run.shape.layers)):
            entry, kept = saved.pop()
            if checkpointed(index):
                output, kept = self.forward()
                memory.give(output)
            gradient = self.backward(index, kept, gradient)
            if entry is not None:
                memory.give(entry)
        if run.trained.embedding:
            self.states.add_gradient(("embedding",), self.table)
        memory.give(gradient, *self.held)
        self.held = []

    def loss(self, stream: Block) -> Block:
        run, memory = self.run, self.memory
        norm = [memory.take(self.wide)] if self.upcast_norms else []
        norm.append(memory.take(self.hidden))
        norm.append(stream)
        matrix: list[Block] = []
        upcast = run.adapter is not None and run.adapter.upcasts and run.autocasts
        if self.casts or upcast:
            matrix.append(memory.take(self.table * run.compute_bytes))
        trained = run.trained.embedding if run.shape.tied else run.trained.head
        name = "embedding" if run.shape.tied else "head"
        if run.loss == "plain":
            found = [logits_gradient(run, memory, self.end_autocast)]
        elif run.traits.chunks in CHUNKED_LOSSES and not run.compiled and run.loss == "chunked":
            found = CHUNKED_LOSSES[run.traits.chunks](run, memory)
        else:
            found = [memory.take(part.amount) for part in head(run).peak.parts if part.name not in HIDDEN]
            self.end_autocast()
        if trained:
            self.states.add_gradient((name,), self.table)
        gradient = memory.take(self.hidden)
        memory.give(*found, *matrix, *norm)
        return self.through_norm(gradient)

    def end_autocast(self) -> None:
        self.memory.give(*self.cached)
        self.cached = []

    def through_norm(self, gradient: Block) -> Block:
        temporaries = [self.memory.take(self.wide), self.memory.take(self.wide)] if self.upcast_norms else []
        result = self.memory.take(self.stream)
        self.memory.give(gradient, *temporaries)
        return result

    def forward(self, *, keeps: bool = True) -> tuple[Block, dict[str, list[Block]]]:
        """A block: its output, and what it saves by part. Without `keeps`, a part is freed when the next has read
        it."""
        run, take, give = self.run, self.memory.take, self.memory.give
        kept: dict[str, list[Block]] = {}
        copies: list[Block] = []
        give(take(self.dequantized[0]))
        before: list[Block] = []
        for part in PARTS:
            outputs = [take(self.wide)] if self.upcast_norms and part.endswith("norm") else []
            kept[part], sizes = [], list(self.kept[part])
            if not keeps and READS[part] in self.unfreed:
                self.held.append(take(self.unfreed[READS[part]]))
            for one in self.reading[part]:
                if self.casts:
                    copies.append(take(one.parameters * run.compute_bytes))
                parts, result = self.output(one)
                if part == "mlp" and sizes:  # which is saved
                    kept[part].append(take(sizes.pop(0)))
                else:
                    outputs.append(take(result))
                give(*parts)
            if part == "attention" and self.scores and not run.fuses_softmax:
                outputs += [take(self.scores * run.attention_bytes) for _ in range(2)]  # before and after the mask
            kept[part] += [take(size) for size in sizes]
            give(*outputs)
            if not keeps:
                give(*before)
                before = kept[part]
        output = take(self.stream)
        if not keeps:
            give(*before)
            kept = {}
        kept["copies"] = copies
        return output, kept

    def output(self, one: Linear) -> tuple[list[Block], float]:
        """Tensors that a layer needs for a time, and the size of what it returns."""
        sizes, result = self.outputs[one.name]
        return [self.memory.take(size) for size in sizes], result

    def _output_sizes(self, one: Linear) -> tuple[list[float], float]:
        run = self.run
        if not self.eager and run.adapter is None:
            return [], 0.0
        inputs, outputs = run.tokens * one.inputs, run.tokens * one.outputs
        sizes: list[float] = []
        if run.layer_bytes > run.compute_bytes:  # a quantized layer casts its input, and its output back
            sizes += [inputs * run.compute_bytes, outputs * run.compute_bytes]
        if run.traits.peft and one.name in self.targets:
            if not run.narrow_adapters:
                sizes.append(inputs * 4)  # cast to the adapter's dtype, from which autocast casts it back
            # The layer's output, the adapter's, and that scaled.
            sizes += [outputs * run.layer_bytes, outputs * run.adapter_bytes, outputs * run.adapter_bytes]
        return sizes, outputs * run.layer_bytes

    def backward(self, index: int, kept: dict[str, list[Block]], gradient: Block) -> Block:
        run, memory = self.run, self.memory
        take, give = memory.take, memory.give
        inner = run.tokens * run.shape.ffn / run.mesh.tp * run.layer_bytes
        reading = self.reading
        give(take(self.dequantized[1]))
        # The MLP.
        above = take(inner)
        self.weights(index, reading["last"])
        give(*kept["last"])
        gated = run.shape.traits.gated and not has_mlp_in_place(run)
        factors = [take(inner) for _ in range(2 if gated else 0 if run.shape.traits.gated else 1)]
        joined = run.has_engine and len(factors) > 1  # one layer made both
        if joined:
            give(*factors)
            factors = [take(2 * inner)]
        give(above)
        sums = []
        for one in reading["mlp"]:
            sums.append(take(self.hidden))
            self.weights(index, [one])
        give(*factors, *kept["mlp"])
        gradient = self.added(gradient, sums)
        give(*kept["second norm"])
        # Attention.
        above = take(self.attended)
        self.weights(index, reading["projection"])
        give(*kept["projection"])
        tokens, itemsize = run.tokens, run.compute_bytes
        inward = [take(tokens * one.outputs * itemsize) for one in reading["attention"]]
        self.score_gradients()
        give(above, *kept["attention"])
        sums = []
        for one in reading["attention"]:
            sums.append(take(self.hidden))
            self.weights(index, [one])
        give(*inward)
        gradient = self.added(gradient, sums)
        give(*kept["norm"], *kept["copies"])
        return gradient

    def added(self, gradient: Block, parts: list[Block]) -> Block:
        """The gradient of the residual stream, with that of a norm whose output several layers have read."""
        memory = self.memory
        while len(parts) > 1:
            total = memory.take(self.hidden)
            memory.give(parts.pop(), parts.pop())
            parts.append(total)
        middle = self.through_norm(parts[0])
        result = memory.take(self.stream)
        memory.give(middle, gradient)
        return result

    def score_gradients(self) -> None:
        """Gradients of materialized scores: PyTorch's softmax reads them in fp32, and multiplies them first."""
        if not self.scores:
            return
        run, take, give = self.run, self.memory.take, self.memory.give
        itemsize = run.attention_bytes
        gradient = take(self.scores * itemsize)
        if run.fuses_softmax:
            give(gradient)
            return
        if itemsize < 4 and (run.upcasts_softmax or run.autocasts_softmax):
            wide = take(self.scores * 4)
            give(gradient)
            gradient = wide
        product, result = take(self.scores * 4), take(self.scores * (itemsize if run.is_half else 4))
        give(product, gradient)
        scaled = take(self.scores * itemsize)
        give(result, scaled)

    def weights(self, index: int, layers: list[Linear]) -> None:
        """Gradients of the weights of layers, or of their adapters."""
        run, memory = self.run, self.memory
        casts, trains = run.layer_bytes > run.compute_bytes, run.trained.blocks
        for one in layers:
            if casts:  # the gradient of its output, and that of its input
                both = one.inputs, one.outputs
                memory.give(*[memory.take(run.tokens * width * run.compute_bytes) for width in both])
            if trains:
                self.states.add_gradient((index, one.name), one.parameters)
            if one.name in self.targets:
                self.states.add_gradient((index, one.name, "A"), self.states.rank * one.inputs)
                self.states.add_gradient((index, one.name, "B"), self.states.rank * one.outputs)
