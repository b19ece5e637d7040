"""The experts of a mixture: their matmuls, and what else transformers' blocks do for the tokens that reach them.

Since transformers 5 (integrations/moe.py) tokens are sorted by expert, and grouped matmuls compute all experts at once.
Before, experts were modules that run one after the other: the host reads which expert is next and which tokens it has,
and waits for the device both times, so that a block with many small experts takes as long as the host.
"""

from shoal.plan.memory.states import is_expert_module
from shoal.plan.run.blocks import Linear
from shoal.plan.run.run import Run
from shoal.plan.speed.eager import Kernel
from shoal.plan.speed.kernels import matmul_seconds

# Rows of every expert that its last tiles compute in vain: on an H200, grouped matmuls with 256 rows per expert reach
# 0.61 of what one matmul of the same inner dimension does, with 1,024 rows 0.84, with 2,048 rows 0.94, if experts get
# unequal numbers of tokens (benchmarks/gpu/grouped_matmuls_h200).
LAST_TILES = 160
# Host time of an expert that runs on its own, forward and backward: some 50 kernels and two waits. Of blocks with 128
# experts on the host of an H200, that is 0.92 ms with full training, 1.0 with adapters on attention, and 1.0 to 1.3
# with a recomputed forward pass (benchmarks/gpu/mixtures_h200/transformers4.jsonl).
AHEAD_HOST, BACK_HOST = 0.3e-3, 0.65e-3
# Under autocast 58 operations in place of 47.
AUTOCAST_HOST = 58 / 47
# What matmuls in fp32 with 128 to 512 rows reach of large ones (benchmarks/gpu/mixtures_h200/transformers5.jsonl).
SMALL_FP32 = 0.6


def expert_linear(run: Run, one: Linear) -> tuple[float, float, float]:
    """(forward pass, gradient of the input, gradient of the weight) of a layer of all experts on one rank, which has
    the width of all experts of a token."""
    routed, count = run.shape.routed, visited(run)
    inputs, outputs = one.of_one_expert(run.mesh.tp, routed)
    rows, itemsize, fp8 = run.tokens * routed, run.expert_bytes, run.precision == "fp8"
    if runs_one_by_one(run) or itemsize > run.compute_bytes:
        # In fp32, grouped matmuls are matmuls one after the other too, without waiting for the host.
        each, times = rows / count, count / (SMALL_FP32 if itemsize > run.compute_bytes else 1.0)
        behind = max(itemsize, run.read_bytes(one.reads) if run.in_int8 else 0)
        slower = SMALL_FP32 if behind > itemsize else 1.0
        return (
            times * matmul_seconds(run, each, inputs, outputs, itemsize=itemsize),
            times / slower * matmul_seconds(run, each, outputs, inputs, itemsize=behind),
            times * matmul_seconds(run, inputs, each, outputs, itemsize=itemsize),
        )
    longer = 1 + LAST_TILES * count / rows
    return (
        longer * matmul_seconds(run, rows, inputs, outputs, fp8=fp8),
        longer * matmul_seconds(run, rows, outputs, inputs, fp8=fp8),
        matmul_seconds(run, inputs * count, rows / count, outputs, fp8=fp8),
    )


def runs_one_by_one(run: Run) -> bool:
    """Whether experts run one after the other, also in compiled blocks: which tokens an expert has is data."""
    return bool(run.shape.experts) and run.traits.experts != "grouped"


def visited(run: Run) -> float:
    """Experts of a block that the tokens of a micro-batch reach, if all are as likely."""
    shape = run.shape
    if shape.routed >= shape.experts:
        return float(shape.experts)
    return shape.experts * (1 - (1 - shape.routed / shape.experts) ** run.tokens)


def times_run(run: Run, one: Linear) -> float:
    """How many layers of this name run in a block per micro-batch: one for each expert that runs on its own."""
    return visited(run) if is_expert_module(run, one) else 1.0


def routed_kernels(run: Run) -> tuple[list[Kernel], list[Kernel]]:
    """The elementwise kernels around the experts of an eager block, forward and backward."""
    shape, itemsize = run.shape, run.expert_bytes
    if not shape.experts:
        return [], []
    rows = shape.routed * shape.hidden
    if runs_one_by_one(run):
        return _one_by_one(run, rows)
    copied = Kernel(rows, 2 * itemsize)
    weighted, summed = Kernel(rows, 2 * itemsize, unrolled=True), Kernel(rows, itemsize, unrolled=True)
    # The gradients of the weighted outputs, and of the weights.
    behind = [weighted, Kernel(rows, 3 * itemsize), summed]
    scattered = Kernel(rows, 3 * itemsize, unrolled=True)
    # Gathered by expert and back; each is the other way around in the backward pass, whose rows are added to zeros.
    ahead = [copied, weighted, copied, summed]
    behind += [Kernel(rows, 2 * itemsize, unrolled=True), Kernel(rows, itemsize), scattered, scattered]
    behind.append(Kernel(2 * shape.ffn, 2 * itemsize))  # both factors' gradients as one tensor
    filled = _filled(run)
    return ahead + filled, behind + filled


def _one_by_one(run: Run, rows: float) -> tuple[list[Kernel], list[Kernel]]:
    """The same if experts run one after the other, on hidden states that autocast leaves in fp32."""
    shape, itemsize, narrow = run.shape, run.residual_bytes, run.compute_bytes
    weighted, scattered = Kernel(rows, 2 * itemsize, unrolled=True), Kernel(rows, 3 * itemsize, unrolled=True)
    # `index_add_` takes three times as long as another kernel that is not vectorized. In the backward pass, every
    # expert has zeros for the gradients of all tokens, and these are added up.
    ahead = [weighted, weighted, *[scattered] * 3]
    behind = [weighted, Kernel(rows, 3 * itemsize), Kernel(rows, itemsize, unrolled=True)]
    behind += [Kernel(rows, 2 * itemsize), scattered, Kernel(visited(run) * shape.hidden, 4 * itemsize)]
    weights = visited(run) * shape.hidden * shape.ffn / shape.routed * (3 if shape.traits.gated else 2) / run.tokens
    if run.casts_weights:
        # Of these weights, those of the experts that a token is routed to are counted with other layers'.
        others = weights * (1 - shape.routed / visited(run))
        inputs = rows * (2 if shape.traits.gated else 1)
        ahead += [Kernel(others, run.weight_bytes + narrow), Kernel(inputs, itemsize + narrow)]
        behind += [Kernel(others * run.trained.blocks, run.weight_bytes + narrow, unrolled=True)]
        behind.append(Kernel(inputs, itemsize + narrow, unrolled=True))
    if run.traits.experts == "slices" and run.trained.blocks:
        # So has each slice of the weights: for the gradient of all of them.
        behind.append(Kernel(weights * shape.experts, 4 * run.weight_bytes))
    return ahead, behind


def _filled(run: Run) -> list[Kernel]:
    """Rows that no expert of this rank has are filled with zeros, also where there are none: the inputs and outputs of
    experts, and what is between their layers, which is copied."""
    itemsize, fills = run.expert_bytes, run.traits.masked_experts
    found = [Kernel(run.shape.routed * run.shape.hidden, 2 * itemsize, unrolled=True)] * min(fills, 2)
    if fills > 2:
        inner = 2 * run.shape.ffn
        found += [Kernel(inner, 2 * itemsize), Kernel(inner, 2 * itemsize, unrolled=True)]
    return found


def experts_host(run: Run) -> float:
    """Host time of the experts of a block, forward and backward, if they run one after the other."""
    if not runs_one_by_one(run):
        return 0.0
    again = run.repeated_share + run.reference_pass
    found = visited(run) * (AHEAD_HOST * (1 + again) + BACK_HOST)
    return found * (AUTOCAST_HOST if run.casts_weights else 1.0)


def experts_waiting(run: Run) -> float:
    """Seconds that the device is idle in a block's forward passes because the host has waited for it, and now launches
    the kernels of the next expert."""
    if not runs_one_by_one(run) or run.gpu.is_cpu:
        return 0.0
    return visited(run) * AHEAD_HOST * (1 + run.repeated_share + run.reference_pass)
