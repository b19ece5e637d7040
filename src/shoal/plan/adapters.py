"""Seconds of the adapters of a block: LoRA and DoRA, ours and PEFT's."""

from shoal.plan.kernels import bandwidth, matmul_seconds
from shoal.plan.run import Adapter, Run
from shoal.plan.states import adapted, stored_bytes

# Bytes per element of a GPTQ matrix that PyTorch's kernels dequantize, as in AutoGPTQ where neither exllama's nor
# Triton's run: shifted (0.5 read, 4 written), cast to 8 bits (5), masked (2), less its zero (2), times its scale (3).
GPTQ_TRAFFIC = 16.5


def dequantization_seconds(run: Run, adapter: Adapter, elements: float) -> tuple[float, float]:
    """Seconds to dequantize `elements` of the frozen matrices in the forward and the backward pass."""
    if adapter.quantize == "gptq":
        # Autograd saves the dequantized matrix, which no parameter is: the backward pass has it.
        return elements * GPTQ_TRAFFIC / bandwidth(run), 0.0
    once = elements * (stored_bytes(run, adapter) + run.compute_bytes) / bandwidth(run)
    return once, once


def adapter_seconds(run: Run, adapter: Adapter) -> tuple[float, float]:
    """Seconds of a block's adapters in the forward and the backward pass."""
    forward = backward = 0.0
    itemsize, fuses = run.compute_bytes, run.compiled and not run.traits.liger_kernels
    computed = run.adapter_bytes
    for one in adapted(run):
        inputs, outputs = one.local_sizes(run.mesh.tp)
        # `A x`: layers that read one tensor are computed together, so that it and its gradient are moved once.
        shared = sum(1 for other in adapted(run) if other.reads == one.reads) if fuses else 1
        narrow = matmul_seconds(run, run.tokens, inputs, adapter.rank * shared, itemsize=computed) / shared
        thin = narrow + matmul_seconds(run, run.tokens, adapter.rank, outputs, itemsize=computed)
        # Added to the frozen layer's output, which is read and written once more; the compiler adds it in the kernel
        # that reads both.
        added = outputs if fuses else 3 * outputs
        added_backward = inputs / shared if fuses else 6 * outputs
        if run.fuses_adapters:
            # The matmul that adds reads what it adds to, in either pass.
            added, added_backward = outputs, inputs
        elif run.traits.peft:
            added += 2 * outputs  # scaled by a kernel of its own
        if run.traits.peft and adapter.quantize is None and not (run.traits.narrow_adapters or run.fuses_adapters):
            # The input in fp32 and back, and its gradient.
            added, added_backward = added + 6 * inputs, added_backward + 6 * inputs
        if adapter.dropout:
            # Reads the input, writes it and the mask; backward reads gradient and mask, and adds to the input's. PEFT
            # does so in the dtype of its adapters.
            wide = run.traits.peft and not (run.traits.narrow_adapters or run.fuses_adapters)
            passed = 4.5 if wide else 2.5
            added, added_backward = added + passed * inputs, added_backward + passed * inputs
        forward += thin + run.tokens * added * itemsize / bandwidth(run)
        backward += 2 * thin + run.tokens * added_backward * itemsize / bandwidth(run)
        if adapter.dora:
            ahead, back = _dora(run, adapter, inputs, outputs)
            forward, backward = forward + ahead, backward + back
    return forward, backward


def _dora(run: Run, adapter: Adapter, inputs: float, outputs: float) -> tuple[float, float]:
    """What DoRA adds to an adapted layer: the norms of the rows of `W + B A`, and their scale."""
    elements, itemsize = inputs * outputs, run.compute_bytes
    dequantized = 0.0 if adapter.quantize is None else elements * (stored_bytes(run, adapter) + itemsize)
    if not run.traits.peft:
        # A matmul of the matrix with `A`, and its own norms: it is read once more, or dequantized and read.
        forward = matmul_seconds(run, outputs, inputs, adapter.rank)
        reads = 1 if adapter.quantize is None else 2
        return forward + reads * elements * itemsize / bandwidth(run), 0.0
    # `B A` as a matmul with the identity (written and read), the scaled `B A` (read, written), its sum with `W` (two
    # reads, written) and the norms (read); then three kernels over the output, and their backward ones.
    matrices = 7 * elements + 2 * inputs * inputs
    forward = matmul_seconds(run, inputs, inputs, adapter.rank) + matmul_seconds(run, inputs, adapter.rank, outputs)
    scaled = run.tokens * outputs * itemsize / bandwidth(run)
    forward += (matrices * itemsize + dequantized) / bandwidth(run) + 7 * scaled
    backward = 9 * scaled
    if adapter.dropout:
        # The frozen layer's output is of the input without dropout, so it is computed once more.
        forward += matmul_seconds(run, run.tokens, inputs, outputs)
        backward += matmul_seconds(run, run.tokens, outputs, inputs)
    return forward, backward
