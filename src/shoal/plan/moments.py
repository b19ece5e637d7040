"""What is on a device at the moments of a step at which it may be fullest."""

from dataclasses import dataclass

from shoal.plan.activations import block_input, block_kept, block_selected
from shoal.plan.blocks import linears
from shoal.plan.head import head
from shoal.plan.layout import Counts, Rank, count, micro_batches_in_flight
from shoal.plan.run import Run
from shoal.plan.states import BUCKET_BYTES, ROWS_BUCKET, States, states, stored_bytes, trained_parameters
from shoal.plan.terms import Term, group, leaf, scaled


@dataclass(frozen=True)
class Moment:
    """What is on a device at one moment of a step."""

    name: str
    tree: Term  # all of it
    side: float  # what FSDP's own streams have allocated


def moments(run: Run, rank: Rank) -> tuple[Moment, ...]:
    """What a rank has at each moment at which it may have most, in the order of a step."""
    held, counts = states(run, rank), count(run, rank)
    kept, again = _activations(run, rank)
    flowing = _flowing(run)
    live = group("backward of a block", again, *flowing.parts)
    none = leaf("", 0.0)
    # Gradients of the step so far. They are dropped after a step, so that the first pass begins without any; but DDP
    # keeps its buckets.
    accumulating = run.grad_accum_steps > 1 or run.strategy in ("ddp", "zero1")
    before = held.gradients if accumulating else none
    if run.sharded and run.mesh.pp > 1:
        before = none  # whole ones are accumulated instead, and sharded at the end of the step
    exchanged = _exchange_buffers(run, rank)
    base = (held.weights, held.optimizer)
    ends, blocks = _gathered_ends(run, counts), _gathered_blocks(run, counts)
    around = _gathered_around(run, counts)
    all_blocks = run.keeps_weights and run.sharded
    # Between forward and backward: all blocks whole, none, or all of them sharded over fewer ranks.
    forward_blocks = blocks if all_blocks else 0.0
    if run.sharded and not all_blocks and not isinstance(run.reshard, bool):
        forward_blocks = counts.blocks * run.compute_bytes / run.reshard

    def moment(
        name: str, gathered: float, reducing: float, gradients: Term, *others: Term, freed: float = 0.0
    ) -> Moment:
        # `freed` is no longer used, but only the stream that asked for it can have it again.
        side = gathered + reducing + freed + (gradients.amount if run.sharded else 0.0)
        tree = group(
            "memory",
            *base,
            gradients,
            leaf("gathered weights", gathered),
            leaf("gradients being reduced", reducing),
            exchanged,
            *others,
        )
        return Moment(name, tree, side)

    whole = held.unreduced

    found = []
    # A tied head is the embedding; what is counted with the head is then the final norm.
    matrix = (counts.embedding if run.shape.tied else counts.head) if rank.last else 0.0
    if rank.last:
        loss = head(run)
        gathered = _gathered_for_loss(run, counts, matrix) + forward_blocks
        found.append(moment("loss", gathered, 0.0, before, whole, kept, loss.peak))
        left = loss.left
    else:
        left = group("head")
    # FSDP reduces the gradients of ends that it gathered together after the last block's: until then the head's is held
    # whole. Where they are apart the head's are being reduced while the backward pass enters the last block.
    waiting, reducing = 0.0, _reducing(run, counts)
    if run.sharded and run.trained.head:
        if run.ends_apart:
            reducing = _reducing(run, counts, behind=max(counts.block * run.trained.blocks, matrix))
        else:
            waiting = matrix * run.compute_bytes
    early = before if before.amount else leaf("gradients", _first(run, held, matrix))
    found.append(
        moment(
            "start of the backward pass",
            around + max(blocks, forward_blocks),
            reducing + waiting,
            early,
            whole,
            kept,
            live,
            left,
        )
    )
    gradients = none if run.sharded and run.mesh.pp > 1 else held.gradients
    # One block is left, whole: kept, or computed again.
    one_block = group("activations", *block_kept(run).parts)
    found.append(
        moment(
            "first block's gradients",
            around + blocks,
            _reducing(run, counts) + waiting,
            gradients,
            whole,
            one_block,
            flowing,
        )
    )
    # The embedding's gradient comes last, its weight being gone; where the ends go together, the head's with it.
    late = leaf("embedding's gradient, as computed", _embedding_gradient(run, counts))
    reducing = _reducing_ends(run, counts)
    found.append(moment("embedding's gradient", forward_blocks, reducing, gradients, whole, late, freed=ends))
    found.append(moment("optimizer step", 0.0, 0.0, held.gradients, _stepping(run, rank)))
    return tuple(found)


def _first(run: Run, held: States, matrix: float) -> float:
    """The head's gradient, the first that a backward pass makes; where it is sharded with others it comes last."""
    if run.sharded and (not run.ends_apart or run.mesh.pp > 1):
        return 0.0
    size = run.gradient_bytes or run.weight_bytes
    return min(held.gradients.amount, matrix * size * run.trained.head / (run.shards if run.sharded else 1))


def _activations(run: Run, rank: Rank) -> tuple[Term, Term]:
    """(what all blocks keep for the backward pass, what one block has besides while it is computed again)."""
    whole = block_kept(run)
    entry, selected = leaf("block inputs", block_input(run)), block_selected(run)
    flying, blocks = micro_batches_in_flight(run, rank), rank.blocks
    again = leaf("recomputed block", 0.0)
    if run.recompute in ("none", "cheap"):
        kept = scaled(whole, blocks)
    elif run.recompute == "selective":
        kept = scaled(selected, blocks)
        again = leaf("recomputed block", max(0.0, whole.amount - selected.amount))
    else:
        every = run.recompute if isinstance(run.recompute, int) else 1
        forgetful = -(-blocks // every)
        kept = group("blocks", scaled(entry, forgetful), *scaled(whole, blocks - forgetful).parts)
        again = leaf("recomputed block", max(0.0, whole.amount - entry.amount))
    kept = Term("activations", kept.amount, kept.parts)
    mask = 0.0
    if run.packed and run.attention == "flash" and not (run.compiled and run.traits.skips_tiles):
        # Who sees whom in rows of several documents: as bytes, and as numbers that attention adds.
        mask = run.micro_batch * run.length * (run.length / run.mesh.cp) * (1 + run.compute_bytes)
    return group("activations", *scaled(kept, flying).parts, leaf("masks of documents", mask)), again


def _flowing(run: Run) -> Term:
    """What passes through a block in its backward: the gradient of its input, and those of its weights as computed."""
    between = leaf("gradient between blocks", block_input(run))
    return group("backward of a block", between, leaf("weights' gradients, as computed", _block_gradients(run)))


def _block_gradients(run: Run) -> float:
    """A block's weight gradients leave it in the compute dtype, before they are added where they belong."""
    if run.adapter is not None or not run.trained.blocks or run.sharded or not run.mixed:
        return 0.0
    if run.gradient_bytes == run.compute_bytes:
        return 0.0
    parameters = sum(one.parameters for one in linears(run.shape)) / run.mesh.tp
    return parameters * run.compute_bytes


def _embedding_gradient(run: Run, counts: Counts) -> float:
    if run.sharded or not run.mixed or run.gradient_bytes == run.compute_bytes:
        return 0.0
    return counts.embedding * run.trained.embedding * run.compute_bytes


def _gathered_ends(run: Run, counts: Counts) -> float:
    if not run.sharded or (run.traits.masters_with_optimizer and run.strategy == "zero2"):
        return 0.0
    return counts.ends * run.compute_bytes


def _gathered_around(run: Run, counts: Counts) -> float:
    """Of the ends, what is whole during the backward pass: both, the embedding, or none."""
    ends = _gathered_ends(run, counts)
    if not run.ends_apart:
        return ends
    if not run.keeps_weights:
        return 0.0
    # The head is let go after the backward pass of the step's last pass; in a pipeline at the end of the step.
    return min(ends, counts.embedding * run.compute_bytes) if run.grad_accum_steps == 1 and run.mesh.pp == 1 else ends


def _gathered_for_loss(run: Run, counts: Counts, matrix: float) -> float:
    """At the end of the forward pass, besides blocks that are kept: the ends, or the head (`matrix`) alone; and what
    was gathered last, the head or a block, a second time, as it arrived."""
    if not run.sharded:
        return 0.0
    if run.ends_apart:
        head = matrix * run.compute_bytes
        return head + (_gathered_ends(run, counts) if run.keeps_weights else head)
    return _gathered_ends(run, counts) + (0.0 if run.keeps_weights else counts.block * run.compute_bytes)


def _gathered_blocks(run: Run, counts: Counts) -> float:
    """Weights of blocks that are whole at one time: the one in use and those fetched ahead, or all of them."""
    if not run.sharded:
        # A quantized matrix is unpacked while it is used.
        if run.adapter is not None and run.adapter.quantize is not None:
            return max(one.parameters for one in linears(run.shape)) / run.mesh.tp * run.compute_bytes
        return 0.0
    if run.traits.masters_with_optimizer and run.strategy == "zero2":
        return 0.0  # its weights are whole as they are
    number = float(run.compute_bytes)
    if run.adapter is not None:
        number = stored_bytes(run, run.adapter)
    if run.keeps_weights:
        return counts.blocks * number
    ahead = 1 + max(1, run.prefetch)
    return min(counts.blocks, ahead * counts.block) * number


def _reducing(run: Run, counts: Counts, behind: float | None = None) -> float:
    """A block's whole gradient as computed, and what came before it, `behind` or another block's, as it is reduced."""
    if not run.sharded or run.mesh.pp > 1:
        return 0.0
    if run.adapter is not None:
        return 0.0
    block = counts.block * run.trained.blocks
    return block * run.compute_bytes + (block if behind is None else behind) * run.reduce_bytes


def _reducing_ends(run: Run, counts: Counts) -> float:
    """The same of embedding and head, which are reduced together at the end, or one by one."""
    if not run.sharded or run.mesh.pp > 1:
        return 0.0
    trained = counts.embedding * run.trained.embedding + counts.head * run.trained.head
    if run.ends_apart:
        trained = max(counts.embedding * run.trained.embedding, counts.head * run.trained.head)
    return trained * (run.compute_bytes + run.reduce_bytes)


def _exchange_buffers(run: Run, rank: Rank) -> Term:
    """What is held for the wire alone."""
    found = []
    if run.compress_bytes:
        found.append(leaf("shrunk gradients of a bucket", BUCKET_BYTES))
    if run.mesh.tp > 1:
        # A tensor before and after it is gathered or summed over the group.
        found.append(leaf("tensor-parallel exchange", 2 * run.tokens * run.shape.hidden * run.compute_bytes))
    if run.mesh.pp > 1:
        # torch's PipelineStage makes a buffer for what arrives in each pass, hidden states and gradients, beforehand.
        arrivals = sum((not stage.first) + (not stage.last) for stage in rank.stages)
        found.append(leaf("arrivals from other stages", arrivals * run.grad_accum_steps * block_input(run)))
        # And keeps what leaves, until the backward pass.
        found.append(
            leaf("sent to other stages", micro_batches_in_flight(run, rank) * len(rank.stages) * block_input(run))
        )
    return group("communication buffers", *found)


def _stepping(run: Run, rank: Rank) -> Term:
    """What the optimizer's step needs besides."""
    amount = 0.0
    if run.strategy == "zero1":
        amount += 2 * ROWS_BUCKET * run.weight_bytes
    if run.optimizer == "muon":
        # Orthogonalising one matrix takes a few copies of it in bf16.
        amount += 4 * 2 * max(one.parameters for one in linears(run.shape))
    return leaf("optimizer's work", min(amount, 8 * trained_parameters(run, rank)))
