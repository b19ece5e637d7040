"""Seconds of the adapters of a block: LoRA and DoRA, ours and PEFT's."""

from shoal.catalogue.multiprocessors import multiprocessors
from shoal.plan.memory.activations import padded_adapters
from shoal.plan.memory.states import adapted, stored_bytes
from shoal.plan.run.blocks import Linear, linears
from shoal.plan.run.run import FUSED_TOGETHER, Adapter, Run
from shoal.plan.speed.cache import cached_rate
from shoal.plan.speed.eager import Kernel, cast, kernel_seconds
from shoal.plan.speed.kernels import Seconds, bandwidth, contiguous_rate, matmul_seconds

# The kernels of a GPTQ matrix that PyTorch dequantizes, as in AutoGPTQ where neither exllama's nor Triton's run, by the
# bytes that they move per element: shifted (0.5 read, 4 written), cast to 8 bits, masked, less its zero, times its
# scale. Most of them read a broadcast tensor or cast.
GPTQ_KERNELS = [
    *(Kernel(1, 4.5, unrolled=True), Kernel(1, 5, unrolled=True), Kernel(1, 2)),
    *(Kernel(1, 2, unrolled=True), Kernel(1, 3, unrolled=True)),
]
# Bytes per second and multiprocessor that bitsandbytes dequantizes NF4 at, read and written: 1.9 to 2.2 TB/s on an H200
# (benchmarks/gpu/adapters_h200/kernels.json).
DEQUANTIZATION_RATE = 2.1e12 / 132
# How many times as long `index_copy_` takes per element as other kernels that are not vectorized: it copies 63.6e9
# elements a second on an H200 (benchmarks/gpu/litgpt_h200/kernels.jsonl).
INDEXED = 5.2
# Bytes per element that are read for nothing where DoRA adds a transposed matrix, by what its forward pass of a Llama's
# block takes an H200 (benchmarks/gpu/adapters_h200/dora_blocks.json).
TRANSPOSED = 28


def dequantization_seconds(run: Run, adapter: Adapter, elements: float) -> tuple[float, float]:
    """Seconds to dequantize `elements` of the frozen matrices in the forward and the backward pass."""
    if adapter.quantize == "gptq":
        # Autograd saves the dequantized matrix, which no parameter is: the backward pass has it.
        return kernel_seconds(run, GPTQ_KERNELS, elements), 0.0
    moved = elements * (stored_bytes(run, adapter) + run.compute_bytes)
    rate = contiguous_rate(run, DEQUANTIZATION_RATE)
    if (units := multiprocessors(run.gpu)) is not None:
        # The matmul reads what was written, and its memory is used again: it need not leave the cache.
        each = moved / len(linears(run.shape, joined=run.traits.fused_qkv))
        limit = DEQUANTIZATION_RATE * units
        rate = min(cached_rate(run.gpu, each, rate), limit)
    again = kernel_seconds(run, [Kernel(1, 4, unrolled=True)], elements) if run.casts_dequantized else 0.0
    return moved / rate + again * (run.casts_dequantized is True), moved / rate + again


def adapter_seconds(run: Run, adapter: Adapter) -> tuple[float, float]:
    """Seconds of a block's adapters in the forward and the backward pass."""
    forward = backward = 0.0
    fuses = run.compiled and not run.traits.liger_kernels
    computed = run.adapter_bytes
    for one in adapted(run):
        inputs, outputs = one.local_sizes(run.mesh.tp)
        # `A x`: layers that read one tensor are computed together, so that it and its gradient are moved once.
        shared = sum(1 for other in adapted(run) if other.reads == one.reads) if fuses else _joined(run, one)
        narrow = matmul_seconds(run, run.tokens, inputs, adapter.rank * shared, itemsize=computed) / shared
        thin = narrow + matmul_seconds(run, run.tokens, adapter.rank, outputs, itemsize=computed)
        around = _compiled_kernels(run, adapter, one, shared) if fuses else _eager_kernels(run, adapter, one)
        forward += thin + around.forward
        backward += 2 * thin + around.backward
        if adapter.dora:
            ahead, back = _dora(run, adapter, inputs, outputs)
            forward, backward = forward + ahead, backward + back
    return forward, backward


def _compiled_kernels(run: Run, adapter: Adapter, one: Linear, shared: int) -> Seconds:
    """What a compiled adapter moves beside its matmuls. Its output is added in the kernel that reads it."""
    inputs, outputs = one.local_sizes(run.mesh.tp)
    # Dropout reads the input, writes it and the mask; backward reads gradient and mask, and adds to the input's.
    dropped = 2.5 * inputs if adapter.dropout else 0.0
    each = run.tokens * run.compute_bytes / bandwidth(run)
    return Seconds((outputs + dropped) * each, (inputs / shared + dropped) * each)


def _eager_kernels(run: Run, adapter: Adapter, one: Linear) -> Seconds:
    """The elementwise kernels of an adapter that is not compiled, as layer.py and bnb.py in peft/tuners/lora launch
    them: the input is cast to the adapter's dtype, and by autocast back; dropout; the output is scaled, and added to a
    copy of what a 4-bit layer returned, or to that itself. Backward: their gradients, and the sum with the layer's."""
    inputs, outputs = one.local_sizes(run.mesh.tp)
    inputs /= _joined(run, one)  # once for all of them
    read = run.read_bytes(one.reads)
    made, computed = run.layer_bytes, run.adapter_bytes
    fused = run.fuses_adapter(one.name)
    peft = run.traits.peft and not fused
    stored = 4 if peft and not run.narrow_adapters else run.compute_bytes
    if fused:
        # The matmul that adds reads what it adds to, in either pass.
        return _seconds(run, [Kernel(outputs, made)], [Kernel(inputs, read)])
    quantized, autocast = adapter.quantize is not None, run.autocasts
    seen = stored if peft and not (quantized and autocast) else read  # by dropout
    ahead = [*cast(inputs, read, seen), *cast(inputs, seen, computed)]
    back = [*cast(inputs, computed, seen), *cast(inputs, seen, read), Kernel(inputs, 3 * read)]
    # Dropout is as fast as kernels that are not vectorized in fp32, on an H200 355e9 elements a second, in bf16 not.
    dropped = [Kernel(inputs, 2 * seen + 1, unrolled=seen == 4)] if adapter.dropout else []
    scaled = [Kernel(outputs, 2 * computed)]
    if run.traits.joined_adapters and one.name in FUSED_TOGETHER[0]:
        transposed = Kernel(outputs, 2 * computed, unrolled=True)
        ahead, back = [*ahead, transposed], [*back, transposed, transposed]
        own, missing = padded_adapters(run)
        if missing:
            # Into zeros, which are scaled and added in full.
            padded = missing * outputs / own
            ahead += [Kernel(INDEXED * outputs, 2 * computed / INDEXED, unrolled=True), Kernel(padded, 2 * computed)]
            ahead += [Kernel(padded + outputs, computed), Kernel(padded, 3 * made)]
            back.append(Kernel(padded, 2 * computed))
    ahead, back = ahead + dropped + scaled, back + dropped + scaled
    if peft and adapter.quantize in ("nf4", "fp4"):
        ahead.append(Kernel(outputs, 2 * made))
    if quantized and not autocast:
        ahead += [*cast(outputs, computed, made), Kernel(outputs, 3 * made)]
        return _seconds(run, ahead, [*back, *cast(outputs, made, computed)])
    widest = max(made, computed)
    ahead.append(Kernel(outputs, made + computed + widest, unrolled=made != computed))
    back += cast(outputs, widest, computed)
    if not quantized:
        ahead += cast(outputs, widest, made)
        back += [*cast(outputs, made, widest), *cast(outputs, widest, made)]
    return _seconds(run, ahead, back)


def _joined(run: Run, one: Linear) -> int:
    """How many layers have their adapter in common with this one."""
    if not run.traits.joined_adapters or one.name not in FUSED_TOGETHER[0]:
        return 1
    return sum(each.name in FUSED_TOGETHER[0] for each in adapted(run))


def _seconds(run: Run, ahead: list[Kernel], back: list[Kernel]) -> Seconds:
    return Seconds(kernel_seconds(run, ahead, run.tokens), kernel_seconds(run, back, run.tokens))


def _dora(run: Run, adapter: Adapter, inputs: float, outputs: float) -> tuple[float, float]:
    """What DoRA adds to an adapted layer: the norms of the rows of `W + B A`, and their scale."""
    elements, itemsize = inputs * outputs, run.compute_bytes
    dequantized = 0.0 if adapter.quantize is None else elements * (stored_bytes(run, adapter) + itemsize)
    scaled = run.tokens * outputs * itemsize / bandwidth(run)
    if not run.traits.peft:
        # A matmul of the matrix with `A`, and its own norms: it is read once more, or dequantized and read.
        forward = matmul_seconds(run, outputs, inputs, adapter.rank)
        reads = 1 if adapter.quantize is None else 2
        # The gradient is scaled, and for the scale's own multiplied with what frozen layer and adapter have returned.
        return forward + reads * elements * itemsize / bandwidth(run), 5 * scaled
    # `B A` is a matmul with the identity, in full; W is cast to the adapter's dtype, and the norms are of their sum.
    stored, computed = itemsize if run.narrow_adapters else 4, run.adapter_bytes
    identity = [Kernel(1, stored), *cast(1, stored, computed)]
    matrix = [*cast(1, computed, stored), *cast(1, itemsize, stored), Kernel(1, 2 * stored)]
    matrix += [Kernel(1, 3 * stored + TRANSPOSED), *cast(1, stored, 4 if run.autocasts else stored)]
    matrix.append(Kernel(1, 4 if run.autocasts else stored))
    thin = matmul_seconds(run, inputs, inputs, adapter.rank, itemsize=computed)
    forward = thin + matmul_seconds(run, inputs, adapter.rank, outputs, itemsize=computed)
    forward += kernel_seconds(run, identity, inputs * inputs) + dequantized / bandwidth(run)
    # Both outputs are multiplied by a row of magnitudes over norms and added; the magnitudes' own gradient is summed
    # over tokens, for either of them.
    ahead = [Kernel(outputs, run.layer_bytes + stored, unrolled=True), Kernel(outputs, 3 * stored)]
    ahead.append(Kernel(outputs, computed + stored, unrolled=True))
    back = [Kernel(outputs, 2 * stored, unrolled=True)] * 2 + cast(outputs, stored, run.layer_bytes)
    back += [Kernel(outputs, 2 * stored + run.layer_bytes, unrolled=True), Kernel(outputs, 3 * stored)]
    back += [Kernel(outputs, stored, unrolled=True)] * 2
    around = _seconds(run, ahead, back)
    backward = around.backward
    if adapter.dropout:
        # The frozen layer's output is of the input without dropout, so it is computed once more, by the cast matrix.
        matrix += cast(1, stored, computed)
        forward += matmul_seconds(run, run.tokens, inputs, outputs, itemsize=computed)
        backward += matmul_seconds(run, run.tokens, outputs, inputs, itemsize=computed)
    forward += around.forward + kernel_seconds(run, matrix, elements)
    return forward, backward
