"""Time of the collectives inside blocks and between pipeline stages, which overlap with nothing."""

from shoal.plan.memory.activations import block_input
from shoal.plan.run.blocks import linears
from shoal.plan.run.layout import Rank
from shoal.plan.run.run import Run
from shoal.plan.speed.communication import Group, collective_seconds, contention, rank_group, ring_speed
from shoal.plan.speed.compute import block_compute
from shoal.plan.speed.kernels import bandwidth, eager_bandwidth, matmul_seconds
from shoal.plan.terms import Term, group, leaf

# Bytes, by their time, that PyTorch's ring attention moves for each block of keys: per element of the output that it
# merges in fp32, and per element of the gradients of queries, keys and values that it adds up. For 8,192 tokens with 32
# heads 0.6 and 1.0 ms on an H200, whatever the ranks, more with flash attention and less with cuDNN
# (benchmarks/gpu/context_h200).
MERGED_OUTPUT, MERGED_GRADIENTS = 58, 32


def model_parallel(run: Run, rank: Rank) -> Term:
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
        # Without sequence parallelism each pair is one all-reduce, which moves as many bytes.
        tensor = 4 * gathered + 4 * summed
        if run.gathers_inputs_again and not run.traits.overlaps_tensor:
            tensor = 2 * gathered + 2 * summed + _summed_beside_matmuls(run, over, gathered, summed)
        tensor += run.repeated_share * (2 * gathered + summed)
        if run.reference_pass:
            tensor += 2 * gathered + 2 * summed
        tensor *= rank.blocks
        if run.traits.overlaps_tensor:
            # The first chunk of each is exposed; the others overlap with a matmul.
            tensor *= 1 / mesh.tp + contention(run, over) * (1 - 1 / mesh.tp)
        else:
            tensor += _copied_sequences(run, size, size / (2 if halved else 1)) * rank.blocks
    if mesh.cp > 1:
        context = _context_parallel(run) * rank.blocks
    stages = _stage_transfers(run, rank) if mesh.pp > 1 else 0.0
    return group(
        "collectives in blocks",
        leaf("tensor parallel", tensor),
        leaf("context parallel", context),
        leaf("between pipeline stages", stages),
    )


def _summed_beside_matmuls(run: Run, over: Group, gathered: float, summed: float) -> float:
    """Seconds per block of the collectives of a backward pass, of which only those of the gradients that row-parallel
    layers read are exposed: inputs are gathered again beside the matmuls of their gradients, and these are summed
    beside those of the weights' gradients. Without sequence parallelism there is only the sum, an all-reduce."""
    read = [one.local_sizes(run.mesh.tp) for one in linears(run.shape, joined=run.traits.fused_qkv) if not one.row]
    matmuls = sum(matmul_seconds(run, run.tokens, *sizes, fp8=run.precision == "fp8") for sizes in read)
    slowdown = contention(run, over) * 2 * (gathered + summed)
    if not run.sequence_parallel:
        return slowdown + max(0.0, 2 * (gathered + summed) - matmuls)
    return 2 * gathered + slowdown + max(0.0, 2 * gathered - matmuls) + max(0.0, 2 * summed - matmuls)


def _copied_sequences(run: Run, summed: float, gathered: float) -> float:
    """Seconds per block to bring what was gathered, or is to be summed and scattered, along the sequence into the order
    in which collectives have it: ranks first. Where blocks are compiled, nothing of it shows: torchtitan's 70B model is
    5.7% faster with asynchronous tensor parallelism (829 and 876 tokens/s), less than its collectives take."""
    copies = run.traits.copies_sequences
    apart = copies == "always" or (copies == "batched" and run.micro_batch > 1)
    if run.compiled or not apart or not run.sequence_parallel:
        return 0.0
    again, reference = run.repeated_share, run.reference_pass
    moved = 2 * summed * (4 + again + 2 * reference) + 2 * gathered * (4 + 2 * again + 2 * reference)
    return moved / eager_bandwidth(run)


def _context_parallel(run: Run) -> float:
    """Seconds per block: keys and values of all ranks, and their gradients."""
    mesh, shape, ring = run.mesh, run.shape, run.traits.ring_attention
    width = 2 * (shape.query_width if run.traits.repeats_keys else shape.kv_width) / mesh.tp
    over = rank_group(run, mesh.cp, mesh.tp)
    each = collective_seconds(run, "all-gather", over, run.tokens * mesh.cp * width * run.compute_bytes)
    forwards = 1 + run.repeated_share + run.reference_pass
    if run.traits.overlaps_context:
        # Keys and values, and backward their gradients too, while the attention to those before is computed.
        attention = block_compute(run).attention
        back = max(0.0, 2 * each - attention.backward)
        return forwards * max(each / mesh.cp, each - attention.forward) + max(each / mesh.cp, back)
    if not ring:
        return (forwards + 1) * each
    # The backward pass sends keys and values around again, and their gradients in fp32.
    backward = (1 + 4 / run.compute_bytes) * each
    queries = run.tokens * shape.query_width / mesh.tp
    merged = MERGED_OUTPUT * queries / bandwidth(run)
    gradients = (MERGED_GRADIENTS * queries + MERGED_GRADIENTS * run.tokens * width) / bandwidth(run)
    return forwards * each + backward + (mesh.cp - 1) * (forwards * merged + gradients)


def _stage_transfers(run: Run, rank: Rank) -> float:
    """Seconds to receive the hidden states of the stage before, and the gradients of the stage behind."""
    stride = run.world_size // run.mesh.pp
    over = rank_group(run, run.mesh.pp, stride)
    ends = sum((not stage.first) + (not stage.last) for stage in rank.stages)
    seconds = ends * block_input(run) / ring_speed(run, over)
    if run.traits.overlaps_pipeline and len(rank.stages) > 1:
        return contention(run, over) * seconds
    return seconds
