"""The elementwise kernels of eager blocks, PyTorch's own, one after the other, by what limits each of them.

A kernel over contiguous tensors of one dtype is vectorized and streams its bytes. One that reads a broadcast or a
transposed tensor, widens its input or sums over tokens is not (`elementwise_kernel` and `unrolled_elementwise_kernel`
in ATen/native/cuda/CUDALoops.cuh): it computes an address for each element, and however few bytes that has, a
multiprocessor gets through as many per clock. Which kernels a block has is from traces of transformers' blocks
(benchmarks/gpu/trainer_h200/kernels.jsonl).
"""

from dataclasses import dataclass

from shoal.catalogue.gpus import Gpu
from shoal.catalogue.multiprocessors import cycles, multiprocessors
from shoal.plan.memory.activations import has_head_norms
from shoal.plan.run.blocks import biased_outputs, linears
from shoal.plan.run.run import Run
from shoal.plan.speed.cache import cached_seconds
from shoal.plan.speed.kernels import Seconds, eager_bandwidth
from shoal.plan.speed.packed import gathered_sums

# Elements per clock and multiprocessor of a kernel that is not vectorized. On an H200: products with a broadcast tensor
# 332e9 elements a second in bf16 and 312e9 in fp32, casts of bf16 to fp32 338e9, sums over tokens 355e9.
UNROLLED_RATE = 330e9 / (132 * 1.98e9)
# A compute unit of AMD's issues instructions for 64 lanes per clock, a multiprocessor for 128: 403e9 elements a second
# on an MI300X, whose sums, which were not vectorized until August 2025, were measured at 399e9 and 439e9
# (ROCm/pytorch, pull request 2492; pytorch, issue 132964).
COMPUTE_UNIT_LANES = 0.5

# Bytes per element of a softmax of whole rows or of its backward pass, by its time: it reads its inputs more than once,
# partly from the cache.
SOFTMAX_MOVED = 14.5
# The same in 16 bits, forward and backward: 2.20 and 3.02 ms for 32,768 rows of 50,304 on an H200
# (benchmarks/gpu/small_gpt_h200).
NARROW_SOFTMAX_MOVED = (5.1, 7.0)

# Steps of large compiled models take all the power that these devices may draw (an H200 693 of 700 W), which lowers
# their clocks. Where matmuls and attention take half of a step, as in eager ones, the same matmuls are faster: the
# median of nine runs, 1.11 to 1.25 (benchmarks/gpu/trainer_h200/kernels.jsonl), none where they take as much as in the
# compiled runs that `matmuls` was chosen by. So they are in compiled steps of small models: those of GPT-2 run at 786
# TFLOP/s with 0.63 of a step, where they reach 560 to 650 alone (benchmarks/gpu/small_gpt_h200).
POWER_LIMITED, SPARED, HALF, MOST = frozenset({"h100-80gb", "h800-80gb", "h200"}), 0.16, 0.55, 0.80


@dataclass(frozen=True)
class Kernel:
    """A kernel by the elements that it computes per token, and the bytes that each of them moves."""

    elements: float
    moved: float
    unrolled: bool = False
    fused: bool = False  # reaches the share of the bandwidth that fused kernels do


def cast(elements: float, before: int, after: int) -> list[Kernel]:
    """A cast from `before` to `after` bytes per element, if these differ."""
    return [] if before == after else [Kernel(elements, before + after, unrolled=after > before)]


def unrolled_rate(gpu: Gpu) -> float:
    """Elements per second of a kernel that is not vectorized, on a device whose multiprocessors are known."""
    lanes = COMPUTE_UNIT_LANES if gpu.compute_capability is None else 1.0
    return UNROLLED_RATE * lanes * cycles(gpu)


def kernel_seconds(run: Run, kernels: list[Kernel], tokens: float) -> float:
    """Seconds of kernels over `tokens`."""
    units = multiprocessors(run.gpu)
    if units is None:
        return tokens * sum(one.elements * one.moved for one in kernels) / eager_bandwidth(run)
    rate, shares = unrolled_rate(run.gpu), (eager_bandwidth(run, streams=True), eager_bandwidth(run))
    return sum(
        max(
            cached_seconds(run.gpu, tokens * one.elements * one.moved, shares[one.fused]),
            tokens * one.elements * one.unrolled / rate,
        )
        for one in kernels
    )


def block_seconds(run: Run) -> Seconds:
    """Norms, rotary embeddings, activation functions and residual sums of a block, with autocast's casts."""
    parts = [_norms(run), _rotary(run), _repeated_keys(run), _feed_forward(run), _sums(run), _casts(run)]
    ahead = [one for forward, _ in parts for one in forward]
    behind = [one for _, backward in parts for one in backward]
    return Seconds(kernel_seconds(run, ahead, run.tokens), kernel_seconds(run, behind, run.tokens))


def rotary_of(run: Run) -> str:
    """What rotary embeddings rotate."""
    of_qwen = run.shape.model_type.startswith("qwen") and run.traits.rotary != "fp32 halves"
    return "halves" if of_qwen else run.traits.rotary


def spared_power(run: Run, busy: float, others: float) -> float:
    """How much faster matmuls are than in large models' steps if they and attention take `busy` seconds of a block."""
    if run.gpu.name not in POWER_LIMITED or 0 < run.traits.software <= 2023:
        return 1.0  # the Hopper of 2023 is by eager runs
    share = busy / (busy + others)
    return 1 + SPARED * min(1.0, max(0.0, (MOST - share) / (MOST - HALF)))


def loss_seconds(run: Run, logits: float) -> float:
    """An eager loss: logits in fp32, their softmax and its gradient, which begins as zeros, and that in 16 bits."""
    # Nor are the logits of transformers' encoders cast to fp32 (BertForMaskedLM).
    narrow = run.traits.narrow_loss or (run.traits.peft and run.shape.traits.post_norm)
    if narrow and run.head_bytes < 4:
        # Autocast casts what log_softmax returns, for nll_loss, and not what it reads.
        kernels = [Kernel(1, moved) for moved in NARROW_SOFTMAX_MOVED]
        kernels += [Kernel(1, 6, unrolled=True), Kernel(1, 4), Kernel(1, 6)] if run.in_autocast else [Kernel(1, 2)]
        kernels += [Kernel(1, 6, unrolled=True)] * run.traits.widens_outputs
        return kernel_seconds(run, kernels, logits)
    kernels = [Kernel(1, SOFTMAX_MOVED), Kernel(1, SOFTMAX_MOVED), Kernel(1, 4)]
    if run.head_bytes < 4:
        kernels += [Kernel(1, 6, unrolled=True)] * (2 if run.traits.widens_outputs else 1) + [Kernel(1, 6)]
    if run.traits.splits_logits and not run.splits_head:
        kernels += [Kernel(1, 8)]  # joined
        if not run.compiled:  # pretraining has labels that are shifted already
            kernels += [Kernel(1, 4), Kernel(1, 8, unrolled=True)]  # into zeros
            kernels += [Kernel(1, 8, unrolled=True)] * (run.micro_batch > 1)  # of one sequence, they are a view
    if run.traits.logs_entropy and run.loss == "plain":
        # Another softmax, its exponential, their product and its sum; and the largest logit.
        kernels += [Kernel(1, SOFTMAX_MOVED), Kernel(1, 8), Kernel(1, 12), Kernel(1, 4), Kernel(1, 4)]
    return kernel_seconds(run, kernels, logits)


def _norm(elements: float, itemsize: int, *, fused: bool, trained: bool) -> tuple[list[Kernel], list[Kernel]]:
    """A norm whose input has `itemsize` bytes per element."""
    if fused:
        return [Kernel(elements, 2 * itemsize, fused=True)], [Kernel(elements, 4 * itemsize, fused=True)]
    # Squared, averaged, multiplied with the root of the mean and with the weight. An input in 16 bits is cast to fp32
    # first, and back before the weight.
    ahead = [Kernel(elements, 8), Kernel(elements, 4), Kernel(elements, 8, unrolled=True)]
    # The gradient times the weight, times the root; the root's own; the mean's, as wide as the input; the square's, a
    # copy and two products; and the sum of both.
    behind = [Kernel(elements, 2 * itemsize, unrolled=True), Kernel(elements, 8, unrolled=True)]
    behind += [Kernel(elements, 12), Kernel(elements, 4), Kernel(elements, 4, unrolled=True)]
    behind += [Kernel(elements, 8), Kernel(elements, 8), Kernel(elements, 12), Kernel(elements, 12)]
    ahead.append(Kernel(elements, 2 * itemsize, unrolled=True))
    if itemsize < 4:
        ahead += [Kernel(elements, 6, unrolled=True), Kernel(elements, 6)]
        behind += [Kernel(elements, 6, unrolled=True), Kernel(elements, 6)]
    if trained:
        behind += [Kernel(elements, 3 * itemsize), Kernel(elements, itemsize, unrolled=True)]
    return ahead, behind


def _norms(run: Run) -> tuple[list[Kernel], list[Kernel]]:
    shape, trained = run.shape, run.trained.blocks > 0
    fused = not (run.traits.unfused_norms and shape.traits.rms_norm)
    # Without sequence parallelism every tensor-parallel rank computes the norms of all tokens.
    ahead, behind = _norm(
        (1 if shape.shared_norm else 2) * shape.hidden * run.stream_tokens / run.tokens,
        run.residual_bytes,
        fused=fused,
        trained=trained,
    )
    if has_head_norms(run):
        heads = (shape.query_width + shape.kv_width) / run.mesh.tp
        forward, backward = _norm(heads, run.compute_bytes, fused=fused, trained=trained)
        ahead, behind = ahead + forward, behind + backward
    return ahead, behind


def _rotary(run: Run) -> tuple[list[Kernel], list[Kernel]]:
    """Rotary embeddings of queries and keys, whose heads are transposed, and the transposed output of attention."""
    shape, itemsize, tp = run.shape, run.compute_bytes, run.mesh.tp
    out = [Kernel(shape.query_width / tp, 2 * itemsize, unrolled=True)]
    heads = (shape.query_width + 2 * shape.kv_width) / tp
    # Batched matmuls of scores need copies of the transposed queries, keys and values.
    copied = [Kernel(heads, 2 * itemsize, unrolled=True)] if run.attention == "scores" else []
    if run.traits.unpads and run.attention == "fused":
        # Gathered token by token, and the output into zeros; backward the other way around.
        out = [Kernel(heads, 2 * itemsize, unrolled=True), *out, Kernel(shape.query_width / tp, itemsize)]
    if not shape.traits.rotary:
        return copied + out, [Kernel(heads, 2 * itemsize, unrolled=True), *out]
    if run.traits.fused_rotary:
        turned = [Kernel((shape.query_width + shape.kv_width) / tp, 2 * run.layer_bytes, fused=True)]
        return copied + turned + out, turned + out
    if rotary_of(run) != "halves":
        rotated = _fp32_halves if rotary_of(run) == "fp32 halves" else _rotated_pairs
        ahead, behind = rotated(run, (shape.query_width + shape.kv_width) / tp)
        return copied + ahead + out, behind + out
    # Multiplied with cosines and sines in the dtype of the residual stream under autocast.
    wide = max(run.layer_bytes, run.residual_bytes if run.in_autocast else 0)
    heads = (shape.query_width + shape.kv_width) / tp
    halves = [Kernel(heads / 2, 2 * run.layer_bytes, unrolled=True)]
    twice = [Kernel(heads, run.layer_bytes + wide, unrolled=True)] * 2
    summed = [Kernel(heads, 3 * wide, unrolled=True)]
    joined = [*copied, Kernel(heads, 2 * run.layer_bytes, unrolled=True)]
    # Backward, each half is written into zeros, and both are added.
    zeros = [Kernel(heads, 2 * run.layer_bytes), Kernel(heads, 2 * run.layer_bytes, unrolled=True)]
    zeros.append(Kernel(heads, 3 * run.layer_bytes))
    narrowed: list[Kernel] = []
    widened: list[Kernel] = []
    if wide > itemsize and wide > run.layer_bytes:
        narrowed, widened = [Kernel(heads, wide + itemsize)], [Kernel(heads, wide + itemsize, unrolled=True)]
    return twice + halves + joined + summed + narrowed + out, twice + halves + summed + zeros + widened + out


def _fp32_halves(run: Run, heads: float) -> tuple[list[Kernel], list[Kernel]]:
    """Halves rotated in fp32, cast back and joined with channels that are not rotated, though there may be none. Then
    backward every slice and half is written into zeros of its own, and these are added up."""
    itemsize, rotated = run.layer_bytes, heads * run.shape.rotary_share
    half, turned = (Kernel(size, 2 * itemsize, unrolled=True) for size in (rotated / 2, rotated))
    joined = Kernel(heads, 2 * itemsize, unrolled=True)
    twice = [Kernel(rotated, itemsize + 4, unrolled=True)] * 2
    ahead = [half, turned, *twice, Kernel(rotated, 12, unrolled=True), *cast(rotated, 4, itemsize), joined]
    behind = [*cast(rotated, itemsize, 4), *[Kernel(rotated, 8, unrolled=True), *cast(rotated, 4, itemsize)] * 2, half]
    behind += [Kernel(rotated, itemsize)] * 2 + [half, half] + [Kernel(rotated, 3 * itemsize)] * 2
    behind += [Kernel(heads, itemsize)] * 2 + [joined, Kernel(heads, 3 * itemsize)]
    # Gradients of queries, keys and values, which are one matmul.
    behind.append(Kernel(heads + run.shape.kv_width / run.mesh.tp, 2 * itemsize))
    return ahead, behind


def _rotated_pairs(run: Run, heads: float) -> tuple[list[Kernel], list[Kernel]]:
    """Rotary embeddings of pairs of neighbours in fp32. A kernel over one of each pair moves both, which share a
    sector of memory; if it writes them, it also reads them. An H200 takes 55 ps per element, and 56 by this count
    (benchmarks/gpu/torchtune_h200)."""
    up, down = cast(heads, run.layer_bytes, 4), cast(heads, 4, run.layer_bytes)
    if rotary_of(run) == "complex":
        product = [*up, Kernel(heads / 2, 16, unrolled=True), *down]
        return product, product
    # Four products with cosines and sines, the sums of two, both halves stacked.
    ahead = [Kernel(2 * heads, 12, unrolled=True), Kernel(heads, 12), Kernel(heads, 20, unrolled=True)]
    # One half negated, four products, each of them written into zeros, and these added up.
    behind = [Kernel(heads / 2, 12, unrolled=True), Kernel(2 * heads, 12, unrolled=True)]
    behind += [Kernel(4 * heads, 4), Kernel(2 * heads, 20, unrolled=True), Kernel(3 * heads, 12)]
    return up + ahead + down, up + behind + down


def _repeated_keys(run: Run) -> tuple[list[Kernel], list[Kernel]]:
    """Copies of keys and values for every query head, and the sums of their gradients over the heads of a group."""
    shape, itemsize = run.shape, run.compute_bytes
    if not run.traits.repeats_keys or shape.kv_width >= shape.query_width:
        return [], []
    moved = itemsize * (1 + shape.kv_width / shape.query_width)
    repeated = [Kernel(2 * shape.query_width / run.mesh.tp, moved, unrolled=True)]
    return repeated, repeated


def _feed_forward(run: Run) -> tuple[list[Kernel], list[Kernel]]:
    """The activation function, and its product with the gate's other half."""
    inner, itemsize = run.shape.ffn / run.mesh.tp, run.layer_bytes
    if run.fuses_activation and run.shape.traits.gated:
        return [Kernel(inner, 3 * itemsize, fused=True)], [Kernel(inner, 5 * itemsize, fused=True)]
    one, product = [Kernel(inner, 2 * itemsize)], [Kernel(inner, 3 * itemsize)]
    if run.shape.experts and run.traits.experts != "modules":
        # Both factors are halves of one tensor, whose rows are not next to each other.
        itemsize = run.expert_bytes
        halves = Kernel(inner, 3 * itemsize, unrolled=True)
        return [Kernel(inner, 2 * itemsize, unrolled=True), halves], [halves, halves, Kernel(inner, 3 * itemsize)]
    return (one + product, 3 * product) if run.shape.traits.gated else (one, product)


def _sums(run: Run) -> tuple[list[Kernel], list[Kernel]]:
    """Sums with the residual stream, of the gradients of layers that read one tensor, and over tokens for biases."""
    shape, stream = run.shape, run.residual_bytes
    hidden = shape.hidden * run.stream_tokens / run.tokens
    mixed = stream != run.layer_bytes
    ahead = [Kernel(2 * hidden, 2 * stream + run.layer_bytes, unrolled=mixed)]
    behind = [Kernel(2 * hidden, 3 * stream)]
    if mixed:
        behind.append(Kernel(2 * hidden, stream + run.layer_bytes))
    # Under autocast each of them has cast its input itself, so that their gradients are in fp32. Tensor-parallel ranks
    # add up those of all tokens before they are scattered.
    wide = stream if run.casts_weights or run.layer_bytes == 4 else run.compute_bytes
    behind.append(Kernel(gathered_sums(run) * shape.hidden, 3 * wide))
    behind.append(Kernel(biased_outputs(shape, run.mesh.tp) * run.trained.blocks, run.compute_bytes, unrolled=True))
    return ahead, behind


def _casts(run: Run) -> tuple[list[Kernel], list[Kernel]]:
    """Casts of inputs and outputs of linear layers to the compute dtype and back, and of their weights."""
    itemsize, tp, ahead, behind = run.compute_bytes, run.mesh.tp, list[Kernel](), list[Kernel]()
    matrices = linears(run.shape)
    if run.casts_weights:
        weights = sum(one.parameters for one in matrices) / tp / run.tokens
        ahead.append(Kernel(weights, run.weight_bytes + itemsize))
        behind.append(Kernel(weights * run.trained.blocks, run.weight_bytes + itemsize, unrolled=True))
        if run.residual_bytes > itemsize:
            read = sum(one.local_sizes(tp)[0] for one in matrices if one.reads in ("norm", "second norm"))
            ahead.append(Kernel(read, itemsize + run.residual_bytes))
            behind.append(Kernel(read, itemsize + run.residual_bytes, unrolled=True))
    if run.layer_bytes > itemsize:
        # A layer casts its input to the compute dtype, and its output back; attention's output is in that dtype.
        inputs = sum(one.local_sizes(tp)[0] for one in matrices if one.reads != "attention")
        outputs = sum(one.local_sizes(tp)[1] for one in matrices if one.reads != "attention")
        moved = itemsize + run.layer_bytes
        ahead += [Kernel(inputs, moved), Kernel(outputs, moved, unrolled=True)]
        behind += [Kernel(outputs, moved), Kernel(inputs, moved, unrolled=True)]
    return ahead, behind
