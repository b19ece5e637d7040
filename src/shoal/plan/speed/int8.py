"""Layers in 8 bits, as bitsandbytes computes them (MatMul8bitLt in bitsandbytes/autograd/_functions.py).

Forward, inputs are quantized by row, multiplied in int8, and dequantized; outlier channels, with values beyond a
threshold, are multiplied in 16 bits, and the host reads which these are. Backward, the matrix is dequantized to the
dtype of the layer's input, and the gradient of the input is a matmul in that: in fp32 if PEFT has upcast the norms
before it.
"""

from shoal.plan.memory.states import quantizable
from shoal.plan.run.blocks import Linear
from shoal.plan.run.run import Run
from shoal.plan.speed.eager import Kernel, cast, kernel_seconds
from shoal.plan.speed.experts import times_run
from shoal.plan.speed.kernels import Seconds

# The first devices that multiply in int8.
TURING = (7, 5)
# Seconds that the device is idle in the forward pass of a layer, whose host has waited to know its outlier channels and
# now launches some 25 kernels: what steps on an H200 (benchmarks/gpu/trainer_h200/trainer.jsonl) have beside busy_ms
# and between_ms of kernels.jsonl there. Host time of both passes: steps of one sequence of 512 tokens.
WAITING, HOST = 0.53e-3, 0.86e-3


def int8_kernels(run: Run) -> Seconds:
    """Seconds of the kernels around the matmuls of a block."""
    around = _in_layouts if run.traits.int8_layouts else _in_rows
    forward = backward = 0.0
    for one in quantizable(run):
        read = run.read_bytes(one.reads)
        ahead, back = around(run, *one.local_sizes(run.mesh.tp), read)
        whole = _whole_matrix(run, one, read)
        forward += kernel_seconds(run, ahead, run.tokens) + whole.forward
        backward += kernel_seconds(run, back, run.tokens) + whole.backward
    return Seconds(forward, backward)


def multiplies_dequantized(run: Run) -> bool:
    """Whether the forward pass multiplies by the dequantized matrix, because the device has no int8."""
    return run.in_int8 and (run.gpu.compute_capability or TURING) < TURING


def _in_rows(run: Run, inputs: float, outputs: float, read: int) -> tuple[list[Kernel], list[Kernel]]:
    """Outliers are searched in four kernels. Autocast adds their product, in 16 bits, to what it casts to that."""
    made = run.compute_bytes
    ahead = [Kernel(inputs, 2 + read, unrolled=read == made), Kernel(inputs, 4), Kernel(inputs, 3)]
    ahead += [Kernel(inputs, 4)] * 2 + [Kernel(inputs, 3, unrolled=True)]
    ahead += [Kernel(outputs, 6), Kernel(outputs, 2 + read, unrolled=True)]
    if run.autocasts and read > made:
        ahead += [*cast(outputs, read, made), Kernel(outputs, 2 * made), Kernel(outputs, 2 * made)]
    return ahead, cast(outputs, run.layer_bytes, read)


def _in_layouts(run: Run, inputs: float, outputs: float, read: int) -> tuple[list[Kernel], list[Kernel]]:
    """Inputs and gradients are quantized by row and by column, and inputs laid out for the matmul."""
    ahead = cast(inputs, read, 2)
    ahead += [Kernel(inputs, 2, unrolled=True), Kernel(inputs, 4, unrolled=True), Kernel(inputs, 2, unrolled=True)]
    # Dequantized, cast, and summed with the product in 16 bits; and a copy of that.
    ahead += [Kernel(outputs, 6), *cast(outputs, 2, read), Kernel(outputs, 2 * read + 2, unrolled=read > 2)]
    ahead.append(Kernel(outputs, 2 * read))
    back = [*cast(outputs, run.layer_bytes, 2), Kernel(outputs, 2, unrolled=True), Kernel(outputs, 4, unrolled=True)]
    return ahead, back


def _whole_matrix(run: Run, one: Linear, read: int) -> Seconds:
    """Its matrix in the dtype of the input, times its scales; before, out of the layout."""
    elements = one.parameters / run.mesh.tp
    if (times := times_run(run, one)) > 1:
        elements *= times / run.shape.routed
    back = [Kernel(1, 1 + read, unrolled=True), Kernel(1, 2 * read, unrolled=True)]
    if run.traits.int8_layouts:
        back += [Kernel(1, 2, unrolled=True)] * 3
    ahead: list[Kernel] = []
    if multiplies_dequantized(run):
        ahead = [*cast(1, 1, read), *(cast(1, read, run.compute_bytes) if run.autocasts else [])]
    return Seconds(kernel_seconds(run, ahead, elements), kernel_seconds(run, back, elements))


def int8_host(run: Run) -> float:
    """Host time of the 8-bit layers of a block, forward and backward."""
    return HOST * _layers(run) if run.in_int8 else 0.0


def int8_waiting(run: Run) -> float:
    """Seconds that the device is idle in the forward passes of a block's 8-bit layers."""
    if not run.in_int8 or run.gpu.is_cpu:
        return 0.0
    return WAITING * _layers(run) * (1 + run.repeated_share + run.reference_pass)


def _layers(run: Run) -> float:
    """The 8-bit layers of a block that a micro-batch reaches."""
    return sum(times_run(run, one) for one in quantizable(run))
