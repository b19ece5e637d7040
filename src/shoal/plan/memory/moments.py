"""Device memory at the moments of a step at which it may peak."""

from dataclasses import dataclass

from shoal.plan.memory.activations import attention_masks, block_input, block_kept, held_by_functions
from shoal.plan.memory.buffers import (
    communication_buffers,
    dummy_gradients,
    frees_bucket,
    gradient_bucket,
    mask_buffers,
    matmul_workspaces,
    optimizer_temporaries,
)
from shoal.plan.memory.checkpointed import block_selected, block_without_parts
from shoal.plan.memory.gathered import (
    gathered_around,
    gathered_blocks,
    gathered_embedding_and_head,
    gathered_for_loss,
    gathered_in_forward,
    live_parameters,
)
from shoal.plan.memory.head import head, loss_in_forward
from shoal.plan.memory.retained import (
    added_gradients,
    cached_keys,
    gradient_buckets,
    held_inputs,
    held_outputs,
    last_micro_batch,
    last_outputs,
    outputs_at_end,
)
from shoal.plan.memory.states import States, states
from shoal.plan.memory.transient import embedding_gradient, forward_temporaries, transient_gradients
from shoal.plan.run.layout import Counts, Rank, count, micro_batches_in_flight
from shoal.plan.run.run import Run
from shoal.plan.terms import Term, group, leaf, scaled

# From PyTorch 2.0 on, gradients are freed after a step rather than filled with zeros.
SET_TO_NONE = 2023
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
        self.buffers = communication_buffers(run, rank)
        self.bucket = leaf("gradient bucket", gradient_bucket(run) if frees_bucket(run) else 0.0)
        # ZeRO-1 keeps it until gradients are reduced.
        accumulates = run.grad_accum_steps > 1 and not run.data_parallelism.shards_gradients
        self.bucket_before = self.bucket if accumulates else NONE
        # Gradients accumulated so far. They are freed after a step, so the first micro-batch starts without any; but
        # DDP keeps its buckets, and Megatron its buffer on one device too. DeepSpeed's are no views of buckets.
        replicated = run.data_parallelism.ddp and run.replicas > 1
        views = replicated and not (run.traits.hooks_gradients and run.data_parallelism.shards_optimizer)
        self.accumulating = run.grad_accum_steps > 1 or views or run.buffers_gradients
        self.before = self.held.gradients if self.accumulating else NONE
        if run.sharded and (run.mesh.pp > 1 or run.accumulates_unsharded):
            self.before = NONE  # unsharded ones are accumulated instead, and reduce-scattered at the end of the step
        # At the end of the step. The last backward pass reduces unsharded ones block by block.
        self.gradients = NONE if run.sharded and run.mesh.pp > 1 else self.held.gradients
        self.unreduced_at_end = NONE if run.accumulates_unsharded else self.held.unreduced
        self.blocks, self.around = gathered_blocks(run, self.counts), gathered_around(run, self.counts)
        self.forward_blocks = self._blocks_between_passes()
        # A tied head is counted as embedding; `counts.head` is then the final norm alone.
        self.matrix = (self.counts.embedding if run.shape.tied else self.counts.head) if rank.last else 0.0
        # If embedding and head are one FSDP unit, their gradients are reduced after all blocks: until then the head's
        # is held unsharded.
        one_unit = run.sharded and run.trained.head and not run.separate_head_unit
        self.waiting = self.matrix * run.compute_bytes if one_unit else 0.0
        # Of a tied matrix, what autograd has from the head waits for what comes from the embedding, even where a matmul
        # has added it already (grad_added_to_main_grad in megatron/core/tensor_parallel/layers.py).
        dummies = dummy_gradients(run, rank)
        tied = run.shape.tied and rank.first and rank.last and run.buffers_gradients and not dummies
        self.dummies = leaf("dummy weight gradients", dummies)
        self.tied = leaf("gradient of the head", self.matrix * run.compute_bytes if tied else 0.0)
        # Until the next backward pass; buckets, which stay, are counted as gradients before.
        added = leaf("gradients that have been added", added_gradients(run, rank))
        buckets = leaf("gradient buckets", gradient_buckets(run, self.held.gradients.amount))
        self.added = group("retained", added, buckets)
        zeroed = 0 < run.traits.software < SET_TO_NONE
        self.added_before = self.added if run.grad_accum_steps > 1 or zeroed else group("retained", added)

    def forward_pass(self) -> Moment:
        gathered, temporaries = gathered_in_forward(self.run, self.counts), forward_temporaries(self.run)
        last = leaf("inputs and logits of the last micro-batch", last_micro_batch(self.run, self.rank))
        others = self.held.unreduced, self.kept, temporaries, last, self.added_before, self.bucket_before
        return self._moment("forward pass", gathered, 0.0, self.before, *others)

    def loss(self) -> Moment:
        run = self.run
        gathered = gathered_for_loss(run, self.counts, self.matrix) + self.forward_blocks
        cache = leaf("cached keys and values", cached_keys(run, self.rank))
        last = leaf("outputs of the last micro-batch", last_outputs(run, self.rank))
        found = head(run)
        # Outputs of the last micro-batch are gone when the backward pass begins.
        returned = found.peak.amount + last.amount >= found.matmuls.amount
        around = (last, found.peak) if returned else (found.matmuls,)
        bucket = self.bucket_before if run.traits.late_bucket else self.bucket
        before, after = (self.held.unreduced, self.kept, cache), (self.added_before, bucket)
        whole = self._moment("loss", gathered, 0.0, self.before, *before, *around, *after)
        if not (run.casts_weights and run.repeats_forward and run.adapter is None and run.loss == "plain"):
            return whole
        # The gradients of the loss come when autocast's context has ended, and with it the copies of the weights of
        # checkpointed blocks, which nothing else holds; and before that, the loss is smaller.
        ahead = self._moment("loss", gathered, 0.0, self.before, *before, last, loss_in_forward(run), *after)
        checkpointed = self.counts.blocks * run.repeated_share / self.counts.all
        back = self._moment("loss", gathered, 0.0, self.before, *before, *around, *after, cast=1 - checkpointed)
        return max(ahead, back, key=lambda moment: moment.tree.amount)

    def start_of_backward(self) -> Moment:
        run, counts = self.run, self.counts
        reducing = _reducing(run, counts)
        if run.sharded and run.trained.head and run.separate_head_unit:
            # The head's gradient is reduced while the backward pass enters the last block.
            reducing = _reducing(run, counts, behind=max(counts.block * run.trained.blocks, self.matrix))
        elif run.sharded and run.mesh.pp == 1:
            # Nothing has been reduced before the last block; behind the one before it, that block's activations are
            # gone, unless they were on the host.
            freed = 0.0 if run.offloads_inputs or run.offloads_activations else self.kept.amount / self.rank.blocks
            reducing = max(_reducing(run, counts, behind=0.0), reducing - freed)
        early = self.before if self.before.amount else leaf("gradients", _first(run, self.held, self.matrix))
        return self._moment(
            "start of the backward pass",
            max(self.around + max(self.blocks, self.forward_blocks), live_parameters(run, counts)),
            reducing + self.waiting,
            early,
            self.held.unreduced,
            self.kept,
            group("block backward", self.again, *self.transient.parts),
            head(run).remaining if self.rank.last else group("head"),
            leaf("outputs", held_outputs(run, self.rank)),
            self.bucket,
            self.tied,
            # Autocast forgets its copies with its context; a block that is recomputed makes them once more.
            cast=1 / self.rank.blocks if run.repeats_forward else 1.0,
        )

    def backward_of_first_block(self) -> Moment:
        run, gradients = self.run, self.gradients
        if not self.accumulating:
            missing = self._without_gradient_yet() * (run.gradient_bytes or run.weight_bytes)
            gradients = leaf("gradients", max(0.0, gradients.amount - missing))
        return self._moment(
            "backward of the first block",
            self.around + self.blocks,
            _reducing(run, self.counts) + self.waiting,
            gradients,
            self.unreduced_at_end,
            group("activations", *block_kept(run).parts),  # of one block: saved or recomputed
            self.transient,
            leaf("inputs of frozen blocks and their gradients", held_inputs(run, self.rank)),
            leaf("outputs", outputs_at_end(run, self.rank) or held_outputs(run, self.rank)),
            self.added,
            self.bucket,
            self.tied,
            cast=1 / self.rank.blocks,
        )

    def _without_gradient_yet(self) -> float:
        """Parameters on this rank whose gradient comes after those of all blocks: the embedding's, unless it is the
        head's too; and, where both are one FSDP unit, the head's, which waits for it unsharded."""
        run = self.run
        embedding = self.counts.embedding * run.trained.embedding
        if not run.sharded:
            return 0.0 if run.shape.tied else embedding
        if run.mesh.pp > 1 or run.accumulates_unsharded:
            return 0.0
        head = self.matrix * run.trained.head if self.waiting and not run.shape.tied else 0.0
        return (embedding + head) / run.shards

    def embedding_gradient(self) -> Moment:
        """It comes last, after its weight was freed; with the head's, if they are one FSDP unit."""
        return self._moment(
            "embedding gradient",
            self.forward_blocks,
            _reducing_embedding_and_head(self.run, self.counts),
            self.gradients,
            self.unreduced_at_end,
            leaf("embedding gradient before accumulation", embedding_gradient(self.run, self.counts)),
            leaf("outputs", outputs_at_end(self.run, self.rank)),
            self.added,
            self.bucket,
            self.tied,
            freed=gathered_embedding_and_head(self.run, self.counts),
            cast=0.0,
        )

    def optimizer_step(self) -> Moment:
        temporaries = optimizer_temporaries(self.run, self.rank)
        outputs = leaf("outputs", outputs_at_end(self.run, self.rank))
        return self._moment("optimizer step", 0.0, 0.0, self.held.gradients, temporaries, outputs, self.added, cast=0.0)

    def _blocks_between_passes(self) -> float:
        """Between forward and backward pass: all blocks unsharded, none, or all sharded over fewer ranks."""
        run = self.run
        if not run.sharded:
            return 0.0
        if run.keeps_weights:
            return self.blocks
        return 0.0 if isinstance(run.reshard, bool) else self.counts.blocks * run.compute_bytes / run.reshard

    def _weights(self, cast: float) -> Term:
        """Weights with compute copies, or with the share `cast` of those that autocast makes in the forward pass, and
        that the backward pass frees block by block."""
        held = self.held.weights
        if not self.run.traits.casts_per_use:
            return held
        parts = [leaf(part.name, part.amount * cast) if part.name == "compute copies" else part for part in held.parts]
        return group(held.name, *parts)

    def _moment(
        self,
        name: str,
        gathered: float,
        reducing: float,
        gradients: Term,
        *others: Term,
        freed: float = 0.0,
        cast: float = 1.0,
    ) -> Moment:
        # `freed` is no longer in use, but only the stream that allocated it can reuse it.
        side = gathered + reducing + freed + (gradients.amount if self.run.sharded else 0.0)
        tree = group(
            "memory",
            self._weights(cast),
            self.held.optimizer,
            gradients,
            leaf("gathered weights", gathered),
            leaf("gradients being reduced", reducing),
            self.buffers,
            leaf("matmul workspaces", matmul_workspaces(self.run)),
            self.dummies,
            leaf("causal masks", mask_buffers(self.run, self.rank)),
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
    if run.mesh.pp == 1:
        blocks = round(blocks * run.trained.passed)
    again = leaf("recomputed block", 0.0)
    held = leaf("inputs of 8-bit layers", sum(held_by_functions(run).values()))
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
        kept, in_flight = group("blocks", scaled(entry, min(2, blocks)), scaled(held, blocks)), 1.0
        again = leaf("recomputed block", max(0.0, whole.amount - entry.amount))
    else:
        every = run.recompute if isinstance(run.recompute, int) else 1
        checkpointed = min(-(-blocks // every), run.recomputed_blocks or blocks)
        kept = group("blocks", scaled(entry, checkpointed), scaled(held, checkpointed))
        kept = group("blocks", *kept.parts, *scaled(whole, blocks - checkpointed).parts)
        again = leaf("recomputed block", max(0.0, whole.amount - entry.amount))
    kept = Term("activations", kept.amount, kept.parts)
    masks = leaf("attention masks", attention_masks(run))
    return group("activations", *scaled(kept, in_flight).parts, masks), again


def recomputation(run: Run, rank: Rank) -> float:
    """Bytes that the backward pass of a recomputed block needs for a time."""
    _, again = _activations(run, rank)
    return again.amount + transient_gradients(run).amount if again.amount else 0.0


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
