"""Device memory at the moments of a step at which it may peak."""

from dataclasses import dataclass

from shoal.catalogue.optimizers import find_optimizer
from shoal.plan.activations import (
    attention_masks,
    block_input,
    block_kept,
    block_selected,
    block_without_parts,
)
from shoal.plan.blocks import linears
from shoal.plan.head import head
from shoal.plan.layout import Counts, Rank, count, micro_batches_in_flight
from shoal.plan.retained import cached_keys, held_inputs, held_outputs, last_micro_batch, last_outputs
from shoal.plan.run import Run
from shoal.plan.states import (
    BUCKET_BYTES,
    ZERO1_BUCKET,
    States,
    block_bytes,
    dequantized_bytes,
    states,
    trained_parameters,
)
from shoal.plan.terms import Term, group, leaf, scaled
from shoal.plan.transient import embedding_gradient, forward_temporaries, transient_gradients

# Elements of DeepSpeed's contiguous gradient bucket (reduce_bucket_size), by default.
ZERO_BUCKET = 5e8
# Elements of a rank that ZeRO-3 updates at a time (sub_group_size), by default.
ZERO_SUB_GROUP = 1e9
NONE = leaf("", 0.0)


@dataclass(frozen=True)
class Moment:
    """Device memory at one moment of a step."""

    name: str
    tree: Term  # all allocated memory
    side: float  # allocated on FSDP's own streams


def moments(run: Run, rank: Rank) -> tuple[Moment, ...]:
    """The moments of a step at which a rank's memory may peak, in order."""
    step = _Step(run, rank)
    return (
        step.forward_pass(),
        *([step.loss()] if rank.last else []),
        step.start_of_backward(),
        step.backward_of_first_block(),
        step.embedding_gradient(),
        step.optimizer_step(),
    )


class _Step:
    """What a rank holds in a step, and the moments of it."""

    def __init__(self, run: Run, rank: Rank) -> None:
        self.run, self.rank = run, rank
        self.held, self.counts = states(run, rank), count(run, rank)
        self.kept, self.again = _activations(run, rank)
        self.transient = transient_gradients(run)
        self.buffers = _communication_buffers(run, rank)
        # Gradients accumulated so far. They are freed after a step, so the first micro-batch starts without any; but
        # DDP keeps its buckets.
        self.accumulating = run.grad_accum_steps > 1 or run.data_parallelism.ddp
        self.before = self.held.gradients if self.accumulating else NONE
        if run.sharded and (run.mesh.pp > 1 or run.accumulates_unsharded):
            self.before = NONE  # unsharded ones are accumulated instead, and reduce-scattered at the end of the step
        # At the end of the step. The last backward pass reduces unsharded ones block by block.
        self.gradients = NONE if run.sharded and run.mesh.pp > 1 else self.held.gradients
        self.unreduced_at_end = NONE if run.accumulates_unsharded else self.held.unreduced
        self.blocks, self.around = _gathered_blocks(run, self.counts), _gathered_around(run, self.counts)
        self.forward_blocks = self._blocks_between_passes()
        # A tied head is counted as embedding; `counts.head` is then the final norm alone.
        self.matrix = (self.counts.embedding if run.shape.tied else self.counts.head) if rank.last else 0.0
        # If embedding and head are one FSDP unit, their gradients are reduced after all blocks: until then the head's
        # is held unsharded.
        one_unit = run.sharded and run.trained.head and not run.separate_head_unit
        self.waiting = self.matrix * run.compute_bytes if one_unit else 0.0

    def forward_pass(self) -> Moment:
        gathered, temporaries = _gathered_in_forward(self.run, self.counts), forward_temporaries(self.run)
        last = leaf("inputs and logits of the last micro-batch", last_micro_batch(self.run, self.rank))
        others = self.held.unreduced, self.kept, temporaries, last
        return self._moment("forward pass", gathered, 0.0, self.before, *others)

    def loss(self) -> Moment:
        run = self.run
        gathered = _gathered_for_loss(run, self.counts, self.matrix) + self.forward_blocks
        cache = leaf("cached keys and values", cached_keys(run, self.rank))
        last = leaf("outputs of the last micro-batch", last_outputs(run, self.rank))
        others = self.held.unreduced, self.kept, cache, last, head(run).peak
        return self._moment("loss", gathered, 0.0, self.before, *others)

    def start_of_backward(self) -> Moment:
        run, counts = self.run, self.counts
        reducing = _reducing(run, counts)
        if run.sharded and run.trained.head and run.separate_head_unit:
            # The head's gradient is reduced while the backward pass enters the last block.
            reducing = _reducing(run, counts, behind=max(counts.block * run.trained.blocks, self.matrix))
        early = self.before if self.before.amount else leaf("gradients", _first(run, self.held, self.matrix))
        return self._moment(
            "start of the backward pass",
            self.around + max(self.blocks, self.forward_blocks),
            reducing + self.waiting,
            early,
            self.held.unreduced,
            self.kept,
            group("block backward", self.again, *self.transient.parts),
            head(run).remaining if self.rank.last else group("head"),
            leaf("outputs", held_outputs(run, self.rank)),
        )

    def backward_of_first_block(self) -> Moment:
        run = self.run
        # The embedding's gradient, unless it is the head's, does not exist yet.
        gradients = self.gradients
        if not self.accumulating and not run.sharded and not run.shape.tied:
            embedding = self.counts.embedding * run.trained.embedding * (run.gradient_bytes or run.weight_bytes)
            gradients = leaf("gradients", max(0.0, gradients.amount - embedding))
        return self._moment(
            "backward of the first block",
            self.around + self.blocks,
            _reducing(run, self.counts) + self.waiting,
            gradients,
            self.unreduced_at_end,
            group("activations", *block_kept(run).parts),  # of one block: saved or recomputed
            self.transient,
            leaf("inputs of frozen blocks and their gradients", held_inputs(run, self.rank)),
            leaf("outputs", held_outputs(run, self.rank)),
        )

    def embedding_gradient(self) -> Moment:
        """It comes last, after its weight was freed; with the head's, if they are one FSDP unit."""
        return self._moment(
            "embedding gradient",
            self.forward_blocks,
            _reducing_embedding_and_head(self.run, self.counts),
            self.gradients,
            self.unreduced_at_end,
            leaf("embedding gradient before accumulation", embedding_gradient(self.run, self.counts)),
            freed=_gathered_embedding_and_head(self.run, self.counts),
        )

    def optimizer_step(self) -> Moment:
        temporaries = _optimizer_temporaries(self.run, self.rank)
        return self._moment("optimizer step", 0.0, 0.0, self.held.gradients, temporaries)

    def _blocks_between_passes(self) -> float:
        """Between forward and backward pass: all blocks unsharded, none, or all sharded over fewer ranks."""
        run = self.run
        if not run.sharded:
            return 0.0
        if run.keeps_weights:
            return self.blocks
        return 0.0 if isinstance(run.reshard, bool) else self.counts.blocks * run.compute_bytes / run.reshard

    def _moment(
        self, name: str, gathered: float, reducing: float, gradients: Term, *others: Term, freed: float = 0.0
    ) -> Moment:
        # `freed` is no longer in use, but only the stream that allocated it can reuse it.
        side = gathered + reducing + freed + (gradients.amount if self.run.sharded else 0.0)
        tree = group(
            "memory",
            self.held.weights,
            self.held.optimizer,
            gradients,
            leaf("gathered weights", gathered),
            leaf("gradients being reduced", reducing),
            self.buffers,
            *others,
        )
        return Moment(name, tree, side)


def _first(run: Run, held: States, matrix: float) -> float:
    """The head's gradient, the first of a backward pass; zero if it is in one FSDP unit with the embedding."""
    if run.sharded and (not run.separate_head_unit or run.mesh.pp > 1):
        return 0.0
    size = run.gradient_bytes or run.weight_bytes
    return min(held.gradients.amount, matrix * size * run.trained.head / (run.shards if run.sharded else 1))


def _activations(run: Run, rank: Rank) -> tuple[Term, Term]:
    """(activations saved by all blocks, additional memory of one block while it is recomputed)."""
    whole = block_kept(run)
    entry, selected = leaf("block inputs", block_input(run)), block_selected(run)
    in_flight, blocks = micro_batches_in_flight(run, rank), rank.blocks
    again = leaf("recomputed block", 0.0)
    if run.recompute in ("none", "cheap"):
        kept = scaled(whole, blocks)
    elif run.recompute == "selective":
        kept = scaled(selected, blocks)
        again = leaf("recomputed block", max(0.0, whole.amount - selected.amount))
    elif run.recompute == "parts":
        less = block_without_parts(run)
        kept = scaled(less, blocks)
        again = leaf("recomputed block", max(0.0, whole.amount - less.amount))
    elif run.recompute == "offload-all":
        # The block's own activations, and those that are copied to or from the host meanwhile.
        on_device = min(2, blocks) if run.offloads_activations else blocks
        kept, in_flight = scaled(whole, on_device), 1.0 if run.offloads_activations else in_flight
    elif run.offloads_inputs:
        # The block's own and the one that is copied to or from the host meanwhile, however many are in flight.
        kept, in_flight = group("blocks", scaled(entry, min(2, blocks))), 1.0
        again = leaf("recomputed block", max(0.0, whole.amount - entry.amount))
    else:
        every = run.recompute if isinstance(run.recompute, int) else 1
        checkpointed = min(-(-blocks // every), run.recomputed_blocks or blocks)
        kept = group("blocks", scaled(entry, checkpointed), *scaled(whole, blocks - checkpointed).parts)
        again = leaf("recomputed block", max(0.0, whole.amount - entry.amount))
    kept = Term("activations", kept.amount, kept.parts)
    masks = leaf("attention masks", attention_masks(run))
    return group("activations", *scaled(kept, in_flight).parts, masks), again


def recomputation(run: Run, rank: Rank) -> float:
    """Bytes that the backward pass of a recomputed block needs for a time."""
    _, again = _activations(run, rank)
    return again.amount + transient_gradients(run).amount if again.amount else 0.0


def _gathered_embedding_and_head(run: Run, counts: Counts) -> float:
    if not run.gathers_weights:
        return 0.0
    return counts.embedding_and_head * run.compute_bytes


def _gathered_around(run: Run, counts: Counts) -> float:
    """Unsharded weights of embedding and head during the backward pass: both, the embedding, or none."""
    embedding_and_head = _gathered_embedding_and_head(run, counts)
    if not run.separate_head_unit:
        return embedding_and_head
    if not run.keeps_weights:
        return 0.0
    # The head is resharded after the backward pass of the last micro-batch; in a pipeline at the end of the step.
    return (
        min(embedding_and_head, counts.embedding * run.compute_bytes)
        if run.grad_accum_steps == 1 and run.mesh.pp == 1
        else embedding_and_head
    )


def _gathered_for_loss(run: Run, counts: Counts, matrix: float) -> float:
    """At the end of the forward pass, besides unsharded blocks: embedding and head, or the head (`matrix`) alone; and
    the all-gather output buffer of the last unit, the head or a block."""
    if not run.sharded:
        return 0.0
    if run.separate_head_unit:
        head = matrix * run.compute_bytes
        return head + (_gathered_embedding_and_head(run, counts) if run.keeps_weights else head)
    return _gathered_embedding_and_head(run, counts) + (0.0 if run.keeps_weights else counts.block * run.compute_bytes)


def _gathered_blocks(run: Run, counts: Counts) -> float:
    """Weights of blocks that are unsharded at a time: the current and the prefetched ones, or all of them."""
    # A quantized matrix is dequantized while it is used. Of GPTQ's layers the matmul is PyTorch's, which saves the
    # matrix for the backward pass of the block.
    dequantized = 0.0
    if run.adapter is not None and run.adapter.quantize is not None:
        matrices = [one.parameters for one in linears(run.shape)]
        used = sum(matrices) if run.adapter.quantize == "gptq" else max(matrices)
        dequantized = used / run.mesh.tp * dequantized_bytes(run)
    if not run.gathers_weights:
        return dequantized
    itemsize = block_bytes(run)
    if run.keeps_weights:
        return counts.blocks * itemsize + dequantized
    ahead = 1 + max(1, run.prefetch)
    return min(counts.blocks, ahead * counts.block) * itemsize + dequantized


def _gathered_in_forward(run: Run, counts: Counts) -> float:
    """The same in the forward pass. There FSDP2 also keeps the all-gather output from which it has copied the current
    block's weights, until it copies those of the next."""
    gathered = _gathered_blocks(run, counts)
    if not gathered or not run.sharded:
        return gathered
    itemsize = block_bytes(run)
    return min(gathered + counts.block * itemsize, 2 * counts.blocks * itemsize)


def _reducing(run: Run, counts: Counts, behind: float | None = None) -> float:
    """A block's unsharded gradient, and the reduce-scatter input of the unit before it: `behind`, or another block."""
    if not run.sharded or run.mesh.pp > 1:
        return 0.0
    if run.adapter is not None:
        return 0.0
    block = counts.block * run.trained.blocks
    return block * run.compute_bytes + (block if behind is None else behind) * run.reduced_bytes


def _reducing_embedding_and_head(run: Run, counts: Counts) -> float:
    """The same for embedding and head, which are reduced together at the end, or one by one."""
    if not run.sharded or run.mesh.pp > 1:
        return 0.0
    trained = counts.embedding * run.trained.embedding + counts.head * run.trained.head
    if run.separate_head_unit:
        trained = max(counts.embedding * run.trained.embedding, counts.head * run.trained.head)
    return trained * (run.compute_bytes + run.reduced_bytes)


def _communication_buffers(run: Run, rank: Rank) -> Term:
    """Buffers that only communication needs."""
    found = []
    if run.compress_bytes:
        found.append(leaf("compressed gradient bucket", BUCKET_BYTES))
    if run.mesh.tp > 1:
        # Input and output of an all-gather or reduce-scatter.
        found.append(leaf("tensor-parallel collectives", 2 * run.tokens * run.shape.hidden * run.compute_bytes))
    if run.mesh.pp > 1:
        receives = sum((not stage.first) + (not stage.last) for stage in rank.stages)
        in_flight = micro_batches_in_flight(run, rank)
        # PyTorch's PipelineStage preallocates receive buffers for hidden states and gradients of every micro-batch.
        # Others hold those that are in use.
        buffers = run.grad_accum_steps if run.traits.torch_pipeline else 1
        found.append(leaf("pipeline receive buffers", receives * buffers * block_input(run)))
        # It also keeps its outputs until the backward pass.
        outputs = in_flight * len(rank.stages) if run.traits.torch_pipeline else 0.0
        found.append(leaf("pipeline stage outputs", outputs * block_input(run)))
    if run.traits.masters_with_optimizer and run.data_parallelism.shards_optimizer:
        # DeepSpeed allocates the whole bucket, however little is trained.
        elements = ZERO_BUCKET if run.traits.flattens_gradients else min(ZERO_BUCKET, trained_parameters(run, rank))
        found.append(leaf("gradient bucket", elements * run.reduced_bytes))
    return group("communication buffers", *found)


def _optimizer_temporaries(run: Run, rank: Rank) -> Term:
    """Temporary memory of the optimizer step."""
    amount = 0.0
    if run.data_parallelism.partitions_update:
        amount += 2 * ZERO1_BUCKET * run.weight_bytes
    if run.traits.foreach_step and run.optimizer == "adamw" and not run.optimizer_in_backward:
        # The square roots of the second moments.
        amount += trained_parameters(run, rank) / run.optimizer_shards * run.weight_bytes
    if run.traits.flattens_gradients and run.data_parallelism.shards_optimizer and run.offload == "none":
        # A rank's gradients in one tensor, and in fp32; with sharded weights one sub-group after the other.
        own = trained_parameters(run, rank) / (run.shards * run.replicas)
        if run.data_parallelism.shards_weights:
            own = min(own, ZERO_SUB_GROUP)
        amount += own * (run.reduced_bytes + 4)
    if find_optimizer(run.optimizer).needs_whole_matrices:
        # Newton-Schulz needs a few copies of one matrix in bf16.
        amount += 4 * 2 * max(one.parameters for one in linears(run.shape))
    return leaf("optimizer temporaries", min(amount, 8 * trained_parameters(run, rank)))
