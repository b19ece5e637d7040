"""Time of a step: compute, exposed communication, and the overlap of both."""

from dataclasses import dataclass

from shoal.catalogue.shapes import block_matrices
from shoal.plan.activations import block_input
from shoal.plan.communication import Group, collective_seconds, contention, rank_group, ring_speed, straggling
from shoal.plan.compute import BlockCompute, block_compute, elementwise_bandwidth, head_seconds, optimizer_seconds
from shoal.plan.layout import Rank, count, ranks
from shoal.plan.ring import Operation
from shoal.plan.run import Run
from shoal.plan.stages import bubble_share
from shoal.plan.states import block_bytes, optimizer_bytes, trained_parameters
from shoal.plan.terms import Term, group, leaf, scaled

# Host time to launch the kernels of a block, forward and backward; a faster device waits for its host.
EAGER_BLOCK_HOST = 2.0e-3
COMPILED_BLOCK_HOST = 2.2e-3  # measured on the host of an H200: benchmarks/gpu/small_h200
# CUDA graphs are used if the device needs less than this many times the host time of a step without them: hosts differ,
# and so does what else they do.
GRAPHS_BELOW = 3.0
# Share of the nominal bandwidth of the link to the host that copies of pinned memory reach.
HOST_LINK_SHARE = 0.8
# Memory bandwidth of a host that runs the optimizer step, for all of its ranks together.
HOST_MEMORY = 100e9
# Bytes that PyTorch's ring attention moves for each block of keys, per element of the output that it merges in fp32, and
# per element of the gradients of queries, keys and values that it adds up.
MERGED_OUTPUT, MERGED_GRADIENTS = 40, 16


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
    def mfu(self) -> float:
        return self.tokens_per_second_per_gpu * self.flops_per_token / self.peak


def flops_per_token(run: Run) -> float:
    """As published tables count: 6 per matmul parameter (4 if frozen), and attention without the causal discount."""
    shape = run.shape
    blocks, head = shape.layers * block_matrices(shape), shape.vocab * shape.hidden
    trained_head = run.trained.embedding if shape.tied else run.trained.head
    matmuls = 4 * (blocks + head) + 2 * (blocks * run.trained.blocks + head * trained_head)
    return matmuls + 12 * shape.layers * shape.heads * shape.head_size * run.length


def forecast_speed(run: Run) -> Speed:
    """The time of one optimizer step of `run`."""
    pipeline_ranks = ranks(run.shape, run.mesh.pp, run.schedule)
    slowest = max((_micro_batch(run, rank) for rank in pipeline_ranks), key=lambda term: term.amount)
    parts = list(scaled(slowest, run.grad_accum_steps).parts)
    worked = sum(part.amount for part in parts)
    if run.mesh.pp > 1:
        share = bubble_share(run.mesh.pp, run.grad_accum_steps, 1 if run.schedule == "1f1b" else 2)
        if run.schedule == "zero-bubble":
            share /= 2  # weight-gradient matmuls fill most of the bubble
        parts.append(leaf("pipeline bubble", worked * share / (1 - share)))
    parts.extend(_per_step(run, pipeline_ranks[0]))
    parts.append(leaf("stragglers", straggling(run.nodes) * sum(part.amount for part in parts)))
    step = group("step", *parts)
    tokens = run.micro_batch * run.length * run.grad_accum_steps * run.mesh.data_parallel
    return Speed(step, tokens, run.world_size, flops_per_token(run), run.peak)


def replays_graphs(run: Run) -> bool:
    """Whether forward and backward pass are replayed as CUDA graphs: see parallel/cuda_graphs.py."""
    applies = run.compiled and run.traits.cuda_graphs and not run.gpu.is_cpu and run.world_size == 1
    if not applies or run.offload != "none" or run.offloads_inputs:
        return False
    if run.cuda_graphs != "auto":
        return bool(run.cuda_graphs)
    block, head = block_compute(run), head_seconds(run)
    busy = (block.forward + block.backward) * run.shape.layers + head.both
    return busy < GRAPHS_BELOW * _host_seconds(run, run.shape.layers)


def _host_seconds(run: Run, blocks: int) -> float:
    """Host time to launch the kernels of a micro-batch, forward and backward."""
    return (COMPILED_BLOCK_HOST if run.compiled else EAGER_BLOCK_HOST) * blocks


def _micro_batch(run: Run, rank: Rank) -> Term:
    """Forward and backward pass of one micro-batch on one pipeline rank."""
    block, blocks = block_compute(run), rank.blocks
    loss = head_seconds(run) if rank.last else None
    compute = [
        leaf("matmuls", block.matmuls.both * blocks),
        leaf("attention", block.attention.both * blocks),
        leaf("elementwise kernels", block.elementwise.both * blocks),
        leaf("activation recomputation", block.recomputed * blocks),
        leaf("head and loss", loss.both if loss else 0.0),
    ]
    ahead = block.forward * blocks + (loss.forward if loss else 0.0)
    if run.reference_pass:
        compute.append(leaf("reference forward pass", ahead))
        ahead *= 2
    back = block.backward * blocks + (loss.backward if loss else 0.0)
    host = 0.0 if run.gpu.is_cpu or replays_graphs(run) else _host_seconds(run, blocks)
    waiting = leaf("kernel launch overhead", max(0.0, host - ahead - back))
    copied = leaf("exposed activation transfer", _activation_transfer(run, block) * blocks)
    exposed, hidden = _sharding(run, rank, ahead, back)
    model_parallel = _model_parallel(run, rank)
    slowed = leaf("slowdown by overlapped collectives", contention(run, _shard_group(run)) * hidden)
    return group("micro-batch", *compute, waiting, copied, group("communication", exposed, model_parallel, slowed))


def _host_link(run: Run) -> float:
    """Bytes per second between a device and its host's memory, in either direction."""
    return run.gpu.host_link.bytes_per_second * HOST_LINK_SHARE


def _activation_transfer(run: Run, block: BlockCompute) -> float:
    """Seconds per block in which compute waits for the transfer of its input to the host, and back."""
    if not run.offloads_inputs:
        return 0.0
    seconds = block_input(run) / _host_link(run)
    return max(0.0, seconds - block.forward) + max(0.0, seconds - block.backward)


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
        return collective_seconds(run, "reduce-scatter", over, parameters * run.reduced_bytes) if parameters else 0.0

    gather, scatter = gathered(counts.block, block_bytes(run)), scattered(counts.block * run.trained.blocks)
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
    passes = 2 if run.reference_pass else 1
    gathers = gather * rank.blocks * (1 / run.grad_accum_steps if run.keeps_weights else passes)
    again = 0.0 if run.keeps_weights else gather * rank.blocks
    scatters = scatter * rank.blocks
    if run.gathers_after_step:
        gathers, gather, embedding_and_head = 0.0, 0.0, scattered(embedding + head)
    # The first all-gathers and the last reduce-scatters overlap with nothing: those of the embedding and one block; and
    # of the head, if it is in one FSDP unit with the embedding.
    elif run.separate_head_unit:
        gathers += gathered(counts.head)
        scatters += scattered(head)
        embedding_and_head = gathered(counts.embedding) + scattered(embedding)
    exposed = max(0.0, gathers - ahead) + max(0.0, again + scatters - back) + embedding_and_head + gather + scatter
    return leaf("exposed FSDP collectives", exposed), max(
        0.0, gathers + again + scatters + embedding_and_head - exposed
    )


def _model_parallel(run: Run, rank: Rank) -> Term:
    """Collectives inside blocks, which do not overlap: the next kernel needs their result."""
    mesh, shape = run.mesh, run.shape
    tensor, context = 0.0, 0.0
    if mesh.tp > 1:
        size = run.tokens * shape.hidden * run.compute_bytes
        over = rank_group(run, mesh.tp, 1)
        summed = collective_seconds(run, "reduce-scatter", over, size)
        halved = run.precision == "fp8" and run.traits.gathers_in_fp8
        gathered = collective_seconds(run, "all-gather", over, size / (2 if halved else 1))
        # Two all-gathers and two reduce-scatters forward, the same backward; recomputation skips only the last one.
        tensor = 4 * gathered + 4 * summed
        if run.repeats_forward:
            tensor += 2 * gathered + summed
        if run.reference_pass:
            tensor += 2 * gathered + 2 * summed
        tensor *= rank.blocks
    if mesh.cp > 1:
        context = _context_parallel(run) * rank.blocks
    stages = _stage_transfers(run, rank) if mesh.pp > 1 else 0.0
    return group(
        "collectives in blocks",
        leaf("tensor parallel", tensor),
        leaf("context parallel", context),
        leaf("between pipeline stages", stages),
    )


def _context_parallel(run: Run) -> float:
    """Seconds per block: keys and values of all ranks, and their gradients."""
    mesh, shape, ring = run.mesh, run.shape, run.traits.ring_attention
    width = 2 * (shape.query_width if run.traits.repeats_keys else shape.kv_width) / mesh.tp
    over = rank_group(run, mesh.cp, mesh.tp)
    each = collective_seconds(run, "all-gather", over, run.tokens * mesh.cp * width * run.compute_bytes)
    forwards = 1 + run.repeats_forward + run.reference_pass
    if not ring:
        return (forwards + 1) * each
    # The backward pass sends keys and values around again, and their gradients in fp32.
    backward = (1 + 4 / run.compute_bytes) * each
    queries = run.tokens * shape.query_width / mesh.tp
    merged = MERGED_OUTPUT * queries / elementwise_bandwidth(run)
    gradients = (MERGED_GRADIENTS * queries + MERGED_GRADIENTS * run.tokens * width) / elementwise_bandwidth(run)
    return forwards * each + backward + (mesh.cp - 1) * (forwards * merged + gradients)


def _stage_transfers(run: Run, rank: Rank) -> float:
    """Seconds to receive the hidden states of the stage before, and the gradients of the stage behind."""
    stride = run.world_size // run.mesh.pp
    over = rank_group(run, run.mesh.pp, stride)
    ends = sum((not stage.first) + (not stage.last) for stage in rank.stages)
    return ends * block_input(run) / ring_speed(run, over)


def _per_step(run: Run, rank: Rank) -> list[Term]:
    """The optimizer, and communication once per step."""
    trained = trained_parameters(run, rank)
    own = trained / run.optimizer_shards
    found = [leaf("optimizer", optimizer_seconds(run, own))]
    communication = [*_gradient_all_reduce(run, rank, trained), *_weight_gather(run, rank, trained)]
    found.append(group("communication per step", *communication))
    if run.offload in ("optimizer", "nvme"):
        moved = 2 * optimizer_bytes(run, rank) / run.optimizer_shards
        found.append(leaf("optimizer state transfer", moved / (_host_link(run) if run.offload != "nvme" else 3e9)))
    if run.offload == "cpu":
        # Gradients move to the host and weights to the device for every micro-batch; the host runs the optimizer.
        counts = count(run, rank)
        moved = (2 * counts.all * run.weight_bytes + trained * run.weight_bytes) / run.shards * run.grad_accum_steps
        stepping = own * 28 * run.devices / HOST_MEMORY
        found.append(leaf("weight transfer and CPU optimizer step", moved / _host_link(run) + stepping))
    return found


def _gradient_all_reduce(run: Run, rank: Rank, trained: float) -> list[Term]:
    """Gradient all-reduce over replicas, overlapped with the backward pass of the last micro-batch."""
    if run.replicas == 1:
        return []
    stride = run.mesh.tp * (run.shards if run.sharded else 1)
    over = rank_group(run, run.replicas, stride)
    itemsize = run.compress_bytes or (run.reduced_bytes if run.mixed else run.weight_bytes)
    # ZeRO reduces each gradient to the rank that updates it.
    scatters = run.gathers_after_step and run.traits.masters_with_optimizer
    operation: Operation = "reduce-scatter" if scatters else "all-reduce"
    seconds = collective_seconds(run, operation, over, trained / run.shards * itemsize)
    overlap = block_compute(run).backward * rank.blocks
    # The last bucket, or the last block's gradients, start when there is nothing left to compute.
    last = seconds / max(2, rank.blocks)
    return [
        leaf(f"gradient {operation}", max(last, seconds - overlap)),
        leaf("slowdown by overlapped all-reduce", contention(run, over) * min(seconds, overlap)),
    ]


def _weight_gather(run: Run, rank: Rank, trained: float) -> list[Term]:
    """The all-gather of updated weights, if each rank updates a shard of them."""
    if not run.gathers_after_step or run.replicas * run.shards == 1:
        return []
    over = _shard_group(run) if run.sharded else rank_group(run, run.replicas, run.mesh.tp)
    seconds = collective_seconds(run, "all-gather", over, trained * run.updated_bytes)
    if not run.traits.overlaps_weight_gather:
        return [leaf("all-gather of updated weights", seconds)]
    overlap = block_compute(run).forward * rank.blocks
    return [
        leaf("all-gather of updated weights", max(seconds / max(2, rank.blocks), seconds - overlap)),
        leaf("slowdown by overlapped all-gather", contention(run, over) * min(seconds, overlap)),
    ]
