"""Time of a step: compute, exposed communication, and the overlap of both."""

from dataclasses import dataclass, replace
from functools import lru_cache

from shoal.catalogue.shapes import block_matrices
from shoal.plan.memory.states import block_bytes, trained_parameters
from shoal.plan.run.blocks import linears
from shoal.plan.run.layout import Rank, count, different_ranks, ranks_of, stages_each
from shoal.plan.run.run import Run
from shoal.plan.run.stages import bubble_share
from shoal.plan.speed.communication import (
    Group,
    collective_seconds,
    contention,
    exposed_reduction,
    rank_group,
    straggling,
)
from shoal.plan.speed.compute import block_compute, head_seconds
from shoal.plan.speed.copies import block_collectives, shard_copies
from shoal.plan.speed.host import host_seconds, launch_gaps, step_host_seconds
from shoal.plan.speed.kernels import bandwidth, streamed_bandwidth
from shoal.plan.speed.model_parallel import model_parallel
from shoal.plan.speed.offload import activation_transfer, offloaded_state, steps_on_host
from shoal.plan.speed.optimizer import optimizer_seconds
from shoal.plan.speed.ring import Operation
from shoal.plan.terms import Term, group, leaf, scaled

# Time of a shard in a list: a view, made in Python, and the launch of a kernel that copies it. An assumption.
LISTED_SHARD = 8e-6
# CUDA graphs are used if the device needs less than this many times the host time of a step without them: hosts differ,
# and so does what else they do.
GRAPHS_BELOW = 3.0


@dataclass(frozen=True)
class Speed:
    """The speed forecast."""

    step: Term  # seconds, as a tree of terms
    tokens_per_step: int  # over all ranks
    world_size: int
    flops_per_token: float
    peak: float

    @property
    def step_seconds(self) -> float:
        return self.step.amount

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.tokens_per_step / self.step_seconds / self.world_size

    @property
    def flops_per_second_per_gpu(self) -> float:
        return self.tokens_per_second_per_gpu * self.flops_per_token

    @property
    def mfu(self) -> float:
        return self.flops_per_second_per_gpu / self.peak


def flops_per_token(run: Run) -> float:
    """As published tables count: 6 per matmul parameter (4 if frozen), and attention without the causal discount, to
    the keys within its window."""
    shape = run.shape
    blocks, head = shape.layers * block_matrices(shape), shape.vocab * shape.hidden * run.head_share
    trained_head = run.trained.embedding if shape.tied else run.trained.head
    matmuls = 4 * (blocks + head) + 2 * (blocks * run.trained.blocks + head * trained_head)
    return matmuls + 12 * shape.layers * shape.heads * shape.head_size * shape.attended(run.length)


@lru_cache(maxsize=4096)
def forecast_speed(run: Run) -> Speed:
    """The time of one optimizer step of `run`."""
    slowest = max((_micro_batch(run, rank) for rank in different_ranks(run)), key=lambda term: term.amount)
    parts = list(scaled(slowest, run.grad_accum_steps).parts)
    worked = sum(part.amount for part in parts)
    if run.mesh.pp > 1:
        share = bubble_share(run.mesh.pp, run.grad_accum_steps, stages_each(run.schedule, run.virtual_stages))
        if run.schedule == "zero-bubble":
            share /= 2  # weight-gradient matmuls fill most of the bubble
        parts.append(leaf("pipeline bubble", worked * share / (1 - share)))
    parts.extend(_per_step(run, ranks_of(run)[0]))
    parts.append(leaf("stragglers", straggling(run.devices, run.nodes) * sum(part.amount for part in parts)))
    step = group("step", *parts)
    tokens = run.micro_batch * run.length * run.grad_accum_steps * run.mesh.data_parallel
    return Speed(step, tokens, run.world_size, flops_per_token(run), run.peak)


def replays_graphs(run: Run) -> bool:
    """Whether forward and backward pass are replayed as CUDA graphs: see parallel/cuda_graphs.py."""
    applies = run.compiled and run.traits.cuda_graphs and not run.gpu.is_cpu and _is_replicated(run)
    if not applies or run.offload != "none" or run.offloads_inputs or run.offloads_activations:
        return False
    if run.cuda_graphs != "auto":
        return bool(run.cuda_graphs)
    block, head = block_compute(run), head_seconds(run)
    busy = (block.forward + block.backward) * run.shape.layers + head.both
    if busy >= GRAPHS_BELOW * host_seconds(run, run.shape.layers):
        return False
    if run.world_size == 1:
        return True
    # Gradients are all-reduced after the graphs of a step, and no longer while the backward pass runs.
    replayed, launched = (forecast_speed(replace(run, cuda_graphs=choice)).step.amount for choice in (True, False))
    return replayed < launched


def _is_replicated(run: Run) -> bool:
    """Whether each device has a whole model, and nothing but its gradients, as they are, is communicated."""
    mesh = run.mesh
    if run.sharded or run.optimizer_shards > 1 or mesh.tp * mesh.pp * mesh.cp > 1:
        return False
    return run.world_size == 1 or not (run.compress_bytes or (run.mixed and run.reduced_bytes < 4))


def _micro_batch(run: Run, rank: Rank) -> Term:
    """Forward and backward pass of one micro-batch on one pipeline rank."""
    block, blocks = block_compute(run), rank.blocks
    passed = run.trained.passed  # of the blocks, by the backward pass
    loss, copies = head_seconds(run) if rank.last else None, shard_copies(run, rank)
    compute = [
        leaf("matmuls", block.matmuls.over(blocks, passed)),
        leaf("attention", block.attention.over(blocks, passed)),
        leaf("elementwise kernels", block.elementwise.over(blocks, passed)),
        leaf("activation recomputation", block.recomputed * blocks * passed),
        leaf("head and loss", loss.both if loss else 0.0),
        leaf("gradient accumulation", _accumulation(run, rank)),
        leaf("copies around collectives", copies.total),
    ]
    ahead = block.forward * blocks + (loss.forward if loss else 0.0)
    if run.reference_pass:
        compute.append(leaf("reference forward pass", ahead))
        ahead *= 2
    back = block.backward * blocks * passed + (loss.backward if loss else 0.0)
    copied = leaf("exposed activation transfer", activation_transfer(run, block) * blocks)
    exposed, hidden = _sharding(run, rank, ahead + copies.forward, back + copies.backward)
    in_blocks = model_parallel(run, rank)
    slowed = leaf("slowdown by overlapped collectives", contention(run, _shard_group(run)) * hidden)
    # The host goes on while the device waits for a collective; ZeRO-3's waits too (`synchronize` in fetch_sub_module).
    host = 0.0 if replays_graphs(run) else host_seconds(run, blocks, rank.first + rank.last)
    awaited = in_blocks.amount + (0.0 if run.traits.hooks_modules else exposed.amount)
    # A CPU computes what it launches itself.
    device = 0.0 if run.gpu.is_cpu else ahead + back + copies.total + awaited
    waiting = leaf("kernel launch overhead", max(launch_gaps(run, blocks), host - device))
    return group("micro-batch", *compute, waiting, copied, group("communication", exposed, in_blocks, slowed))


def _accumulation(run: Run, rank: Rank) -> float:
    """Seconds to add the gradients of a micro-batch to those of the ones before."""
    if run.grad_accum_steps == 1 or run.gpu.is_cpu:
        return 0.0
    made, kept = run.compute_bytes, run.gradient_bytes or run.weight_bytes
    if run.mixed and run.traits.masters_with_optimizer:
        kept = run.added_bytes
    # Read both, write the sum; a matmul that adds to its output writes nothing else.
    moved = 2 * kept - made if run.traits.accumulates_in_matmuls else 3 * kept
    held = trained_parameters(run, rank)
    if run.sharded and not run.accumulates_unsharded and run.mesh.pp == 1:
        held /= run.shards
    # A sum of long tensors streams; what a matmul adds is part of its epilogue.
    rate = bandwidth(run) if run.traits.accumulates_in_matmuls else streamed_bandwidth(run)
    return held * moved / rate * (1 - 1 / run.grad_accum_steps)


def _shard_group(run: Run) -> Group:
    return rank_group(run, run.shards, run.mesh.tp)


def _sharding(run: Run, rank: Rank, ahead: float, back: float) -> tuple[Term, float]:
    """FSDP's collectives per micro-batch: (exposed, seconds overlapped with compute)."""
    if not run.sharded or run.shards == 1:
        return leaf("exposed FSDP collectives", 0.0), 0.0
    counts, over = count(run, rank), _shard_group(run)

    def gathered(parameters: float, itemsize: float = run.compute_bytes) -> float:
        return collective_seconds(run, "all-gather", over, parameters * itemsize)

    def scattered(parameters: float) -> float:
        operation: Operation = "all-reduce" if run.gathers_after_step and run.traits.all_reduces else "reduce-scatter"
        return collective_seconds(run, operation, over, parameters * run.reduced_bytes) if parameters else 0.0

    fetches, buckets = block_collectives(run)
    gather = fetches * gathered(counts.block / fetches, block_bytes(run))
    scatter = buckets * scattered(counts.block * run.trained.blocks / buckets)
    embedding, head = counts.embedding * run.trained.embedding, counts.head * run.trained.head
    embedding_and_head = gathered(counts.embedding_and_head) + scattered(embedding + head)
    if run.mesh.pp > 1:
        # Once per step, so amortized over its micro-batches: the all-gathers overlap with the first forward pass, and
        # the reduce-scatters come after the last backward pass.
        gathers, scatters = gather * rank.blocks, scatter * rank.blocks
        exposed = embedding_and_head + gather + max(0.0, gathers - gather - ahead) + scatters
        hidden = max(0.0, embedding_and_head + gathers + scatters - exposed)
        steps = run.grad_accum_steps
        return leaf("exposed FSDP collectives", exposed / steps), hidden / steps
    if run.accumulates_unsharded:
        scatter /= run.grad_accum_steps
    passes = 2 if run.reference_pass else 1
    gathers = gather * rank.blocks * (1 / run.grad_accum_steps if run.keeps_weights else passes)
    again = 0.0 if run.keeps_weights else gather * rank.blocks
    if run.traits.checkpoints_units:
        again *= 1 + run.repeated_share
    scatters = scatter * rank.blocks
    if run.gathers_after_step:
        gathers, gather, embedding_and_head = 0.0, 0.0, scattered(embedding + head)
    # The first all-gathers and the last reduce-scatters overlap with nothing: those of the embedding and one block; and
    # of the head, if it is in one FSDP unit with the embedding.
    elif run.separate_head_unit:
        gathers += gathered(counts.head)
        scatters += scattered(head)
        embedding_and_head = gathered(counts.embedding) + scattered(embedding)
    if run.gathers_after_step and run.traits.bucket_elements:
        # ZeRO-2: weights are gathered after the step, and nothing else is communicated in a micro-batch.
        total = scatters + embedding_and_head
        exposed = _exposed_gradients(run, rank, total, back) + _bucket_copies(run, trained_parameters(run, rank))
        return leaf("exposed FSDP collectives", exposed), max(0.0, total - exposed)
    if run.traits.lists_shards:
        exposed = gathers + again + scatters + embedding_and_head + _listed_shards(run) * rank.blocks
        return leaf("exposed FSDP collectives", exposed), 0.0
    exposed = max(0.0, gathers - ahead) + max(0.0, again + scatters - back) + embedding_and_head + gather + scatter
    return leaf("exposed FSDP collectives", exposed), max(
        0.0, gathers + again + scatters + embedding_and_head - exposed
    )


def _listed_shards(run: Run) -> float:
    """Seconds of a block to make the lists of shards that collectives gather or reduce, and to copy their items."""
    collectives = 2 + run.repeated_share + 1
    return collectives * len(linears(run.shape, joined=run.traits.fused_qkv)) * run.shards * LISTED_SHARD


def _per_step(run: Run, rank: Rank) -> list[Term]:
    """The optimizer, and communication once per step."""
    trained = trained_parameters(run, rank)
    own = trained / run.optimizer_shards
    updating = 0.0 if steps_on_host(run) else optimizer_seconds(run, own)
    waiting = step_host_seconds(run, rank.blocks, updating)
    found = [leaf("optimizer", updating), leaf("optimizer launch overhead", waiting)]
    communication = [*_gradient_all_reduce(run, rank, trained), *_weight_gather(run, rank, trained)]
    found.append(group("communication per step", *communication))
    found.append(offloaded_state(run, rank))
    return found


def _gradient_all_reduce(run: Run, rank: Rank, trained: float) -> list[Term]:
    """Gradient all-reduce over replicas, overlapped with the backward pass of the last micro-batch."""
    if run.replicas == 1:
        return []
    stride = run.mesh.tp * (run.shards if run.sharded else 1)
    over = rank_group(run, run.replicas, stride)
    itemsize = run.compress_bytes or (run.reduced_bytes if run.mixed else run.weight_bytes)
    # ZeRO reduces each gradient to the rank that updates it.
    scatters = run.gathers_after_step and run.traits.masters_with_optimizer and not run.traits.all_reduces
    operation: Operation = "reduce-scatter" if scatters else "all-reduce"
    size, sharing = trained / run.shards * itemsize, run.optimizer_shards
    if scatters and not run.sharded and sharing < run.replicas:
        # Within the ranks that share the optimizer state, which are neighbours, and then their shards across.
        across = rank_group(run, run.replicas // sharing, stride * sharing)
        seconds = collective_seconds(run, "reduce-scatter", rank_group(run, sharing, stride), size)
        seconds += collective_seconds(run, "all-reduce", across, size / sharing)
    else:
        seconds = collective_seconds(run, operation, over, size)
    exposed = _exposed_gradients(run, rank, seconds, block_compute(run).backward * rank.blocks)
    # Gradients are copied into buckets, and from there back, unless they are views of them.
    copied = _bucket_copies(run, trained)
    if run.traits.copies_to_buckets and run.data_parallelism.ddp:
        copied = 4 * size / streamed_bandwidth(run)
    updates = 0.0
    if run.traits.shares_muon and run.optimizer == "muon":
        matrices = rank.blocks * sum(one.parameters for one in linears(run.shape))
        updates = collective_seconds(run, "all-reduce", over, matrices * run.compute_bytes)
    return [
        leaf("all-reduce of updates", updates),
        leaf(f"gradient {operation}", exposed),
        leaf("gradient buckets", copied),
        leaf("slowdown by overlapped all-reduce", contention(run, over) * (seconds - exposed)),
    ]


def _synchronized_stages(run: Run) -> int:
    """Stages per pipeline rank of which each has collectives of its own, once per step: they run while as many
    micro-batches as there are ranks pass another stage (grad_sync_func and param_sync_func in
    megatron/core/pipeline_parallel/schedules.py), except for those of the stage that is the last, or the first."""
    if run.mesh.pp == 1 or not run.traits.overlaps_pipeline:
        return 1
    return stages_each(run.schedule, run.virtual_stages)


def _exposed_gradients(run: Run, rank: Rank, seconds: float, back: float) -> float:
    """Of the seconds of a reduction of all gradients, those that the backward pass does not hide."""
    if not run.traits.overlaps_gradients or replays_graphs(run):
        return seconds
    trained = trained_parameters(run, rank)
    if (stages := _synchronized_stages(run)) > 1:
        return exposed_reduction(seconds, back * min(run.mesh.pp, run.grad_accum_steps), 1 / stages)
    # The gradient of the embedding is complete when there is nothing left to compute; else that of the first block.
    last = max(1 / max(2, rank.blocks), count(run, rank).embedding * run.trained.embedding / trained)
    return exposed_reduction(seconds, back, last, run.traits.bucket_elements / trained)


def _bucket_copies(run: Run, trained: float) -> float:
    """Seconds to copy gradients into DeepSpeed's buckets, to divide them there, and to flatten what is all-reduced."""
    if not (run.traits.bucket_elements and run.data_parallelism.shards_optimizer):
        return 0.0
    moved = (6 if run.traits.all_reduces else 4) * trained * run.reduced_bytes
    return moved / streamed_bandwidth(run)


def _weight_gather(run: Run, rank: Rank, trained: float) -> list[Term]:
    """The all-gather of updated weights, if each rank updates a shard of them."""
    if not run.gathers_after_step or run.replicas * run.shards == 1:
        return []
    over = _shard_group(run) if run.sharded else rank_group(run, run.optimizer_shards, run.mesh.tp)
    # A broadcast passes the same ring as an all-gather of as many bytes.
    matrices = rank.blocks * len(linears(run.shape, joined=run.traits.fused_qkv)) + 2
    parts = min(over.ranks, matrices) if run.traits.broadcasts_weights else 1
    seconds = parts * collective_seconds(run, "all-gather", over, trained * run.updated_bytes / parts)
    if not run.traits.overlaps_weight_gather:
        return [leaf("all-gather of updated weights", seconds)]
    overlap = block_compute(run).forward * rank.blocks
    first = seconds / max(2, rank.blocks)
    if (stages := _synchronized_stages(run)) > 1:
        first = max(first, (seconds - overlap) / stages)
        overlap *= min(run.mesh.pp, run.grad_accum_steps)
    return [
        leaf("all-gather of updated weights", max(first, seconds - overlap)),
        leaf("slowdown by overlapped all-gather", contention(run, over) * min(seconds, overlap)),
    ]
