"""Persistent memory of one rank: weights, gradients and optimizer state."""

from collections.abc import Iterable
from dataclasses import dataclass

from shoal.catalogue.optimizers import find_optimizer
from shoal.catalogue.shapes import block_vectors
from shoal.plan.run.blocks import MLP, Linear, expert_parameters, linears
from shoal.plan.run.layout import Counts, Rank, count
from shoal.plan.run.run import Adapter, Run
from shoal.plan.terms import Term, group, leaf

# Bytes per element: 4 bits and an fp32 scale per block of 64; the same with 8-bit scales and one fp32 scale per 256 of
# them (double quantization, the QLoRA paper); 8 bits with a negligible scale per row. GPTQ: a 16-bit scale and a 4-bit
# zero per 128.
QUANTIZED_BYTES = {"nf4": 0.5 + 4 / 64, "fp4": 0.5 + 4 / 64, "int8": 1.0, "gptq": 0.5 + 2.5 / 128}
DOUBLE_QUANTIZED_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
# Elements whose offloaded state is on the device at a time (optim/offload.py).
OFFLOAD_BUCKET = 1 << 26
# DDP's gradients are views of its buckets. Compression needs one more bucket of 25 MiB.
BUCKET_BYTES = 25 * 2**20
# ZeRO-1 all-gathers updated weights in buckets of this many elements, and holds them twice (optim/zero1.py).
ZERO1_BUCKET = 1 << 24
# The first architecture with fp8 matmuls of any layout (is_non_tn_fp8_gemm_supported in Transformer Engine).
ANY_FP8_LAYOUT = (10, 0)


@dataclass(frozen=True)
class States:
    """Bytes on the device by kind."""

    weights: Term
    gradients: Term
    optimizer: Term
    # Unsharded gradients, which FSDP reduces only after the last micro-batch: in a pipeline, or without sync.
    unreduced: Term
    # Bytes in host memory or on disk.
    host: float


def adapter_parameters(run: Run, blocks: int) -> float:
    """Adapter parameters of `blocks` blocks on a rank."""
    if run.adapter is None:
        return 0.0
    adapter = run.adapter
    found = 0.0
    for one in adapted(run):
        # Tensor parallelism shards the low-rank matrix on the sharded side of the layer.
        inputs, outputs = one.local_sizes(run.mesh.tp)
        times = 1
        if is_expert_module(run, one):  # one for each expert, in place of one for all of a token's
            times, (inputs, outputs) = run.shape.experts, one.of_one_expert(run.mesh.tp, run.shape.routed)
        found += times * (adapter.rank * (inputs + outputs) + (outputs if adapter.dora else 0))
    return found * blocks


def adapted(run: Run) -> list[Linear]:
    """The linear layers of a block that have an adapter."""
    assert run.adapter is not None
    targets = run.adapter.targets
    # `attn`: query, key and value are one layer, with one adapter.
    return [one for one in linears(run.shape, joined="attn" in targets) if one.name in targets]


def trained_parameters(run: Run, rank: Rank) -> float:
    """Trained parameters on a rank before FSDP."""
    counts, trained = count(run, rank), run.trained
    own = counts.embedding * trained.embedding + counts.blocks * trained.blocks + counts.head * trained.head
    return own + adapter_parameters(run, rank.blocks)


def optimizer_bytes(run: Run, rank: Rank) -> float:
    """Optimizer state on a rank before sharding."""
    trained = trained_parameters(run, rank)
    optimizer = find_optimizer(run.optimizer)
    if optimizer.state_option == "momentum" and not run.momentum:
        return 0.0
    each = optimizer.bytes_per_parameter(run.trained_bytes)
    if optimizer.factored:
        # A row and a column of fp32 per matrix, and one value for every other parameter.
        rows = sum(one.inputs + one.outputs for one in linears(run.shape)) * rank.blocks * run.trained.blocks
        tables = (rank.first and run.trained.embedding > 0) + (
            rank.last and not run.shape.tied and run.trained.head > 0
        )
        vectors = block_vectors(run.shape) * rank.blocks * run.trained.blocks
        return 4.0 * min(trained, rows + tables * (run.shape.vocab + run.shape.hidden) + vectors)
    if optimizer.elsewhere is None:
        wide = 0.0
        if optimizer.is_quantized and run.traits.wide_embedding_state and rank.first:
            table = count(run, rank).embedding * run.trained.embedding
            wide = table * (4 * optimizer.state_tensors - each)
        return trained * each + wide
    matrices = sum(one.parameters for one in linears(run.shape)) / run.mesh.tp * rank.blocks * run.trained.blocks
    other = find_optimizer(optimizer.elsewhere).bytes_per_parameter(run.weight_bytes)
    return trained * other - matrices * (other - each)


def saved_bytes(run: Run, rank: Rank) -> float:
    """What a checkpoint holds of a rank, before sharding: of an adapter, not the frozen base."""
    trained = trained_parameters(run, rank)
    weights = count(run, rank).all if run.adapter is None else trained
    masters = 4 * trained - 2 * weights if run.traits.masters_with_optimizer and run.mixed else 0.0
    return weights * run.weight_bytes + max(0.0, masters) + optimizer_bytes(run, rank)


def states(run: Run, rank: Rank) -> States:
    """Weights, gradients and optimizer state of one rank on its device."""
    if run.traits.masters_with_optimizer and run.mixed:
        return _zero(run, rank)
    counts, trained = count(run, rank), trained_parameters(run, rank)
    shards, away = run.shards, run.offload == "cpu"
    kept = 0.0 if away else 1.0
    weights = _weights(run, counts, rank)
    gradient = run.trained_bytes if run.sharded else run.gradient_bytes or run.trained_bytes
    state = optimizer_bytes(run, rank) / run.optimizer_shards
    on_device = state * kept
    if run.offload in ("optimizer", "nvme"):
        on_device = min(state, OFFLOAD_BUCKET * state / max(1.0, trained / shards))
    if run.paged_optimizer:
        on_device = 0.0  # unified memory, which PyTorch's allocator does not see
    waits = run.accumulates_unsharded or (run.mesh.pp > 1 and run.sharded)
    unreduced = trained * run.reduced_bytes if waits else 0.0
    return States(
        weights=weights if not away else group(weights.name, leaf("quantization scales", replicated_scales(run, rank))),
        gradients=leaf("gradients", _held_gradients(run, rank) * gradient / shards * kept),
        optimizer=leaf("optimizer state", on_device),
        unreduced=leaf("unreduced gradients", unreduced),
        host=state
        - on_device
        + (weights.amount - replicated_scales(run, rank) + trained * gradient / shards if away else 0.0),
    )


def _held_gradients(run: Run, rank: Rank) -> float:
    """Gradient elements of a rank before FSDP; if the backward pass updates, only those of its largest matrix."""
    trained = trained_parameters(run, rank)
    if not run.optimizer_in_backward or run.grad_accum_steps > 1:
        return trained
    largest = max(one.parameters for one in linears(run.shape)) * run.trained.blocks
    if rank.first or rank.last:
        largest = max(largest, run.shape.vocab * run.shape.hidden * max(run.trained.embedding, run.trained.head))
    return min(trained, largest / run.mesh.tp) if run.adapter is None else trained


def _zero(run: Run, rank: Rank) -> States:
    """ZeRO's layout: 2 bytes per weight and gradient, and fp32 master weights with the optimizer state."""
    trained = trained_parameters(run, rank)
    over = run.shards * run.replicas
    sharded = run.data_parallelism
    sharing = run.optimizer_shards if sharded.partitions_update else over
    state = (optimizer_bytes(run, rank) + 4 * trained) / (sharing if sharded.shards_optimizer else 1)
    gradients = trained * run.added_bytes / (over if sharded.shards_gradients else 1)
    if run.offload != "none" and run.traits.offloads_gradients and sharded.shards_gradients:
        gradients = 0.0
    return States(
        weights=group(
            "weights",
            leaf("parameters", 0.0 if run.offload == "cpu" else held_weights(run, rank)),
            leaf("quantization scales", replicated_scales(run, rank)),
            leaf("weights in fp8", _fp8_weights(run, rank)),
        ),
        gradients=leaf("gradients", gradients),
        optimizer=leaf("optimizer state", 0.0 if run.offload != "none" else state),
        unreduced=leaf("unreduced gradients", 0.0),
        host=(state if run.offload != "none" else 0.0) + (held_weights(run, rank) if run.offload == "cpu" else 0.0),
    )


def _fp8_weights(run: Run, rank: Rank) -> float:
    """Bytes of what Transformer Engine keeps of weights that it has cast to fp8 in the first micro-batch: the matrices
    of blocks and, but on Blackwell, whose fp8 matmuls need none, their transposed copies."""
    if run.precision != "fp8" or not run.traits.keeps_fp8_weights or run.sharded or run.adapter is not None:
        return 0.0
    layouts = 1 if (run.gpu.compute_capability or (0, 0)) >= ANY_FP8_LAYOUT else 2
    return layouts * rank.blocks * sum(one.parameters for one in linears(run.shape)) / run.mesh.tp


def _weights(run: Run, counts: Counts, rank: Rank) -> Term:
    shards, adapter = run.shards, run.adapter
    if adapter is not None:
        matrices = _frozen_matrices(run, rank)
        also = trained_parameters(run, rank) - adapter_parameters(run, rank.blocks)
        others = counts.all - matrices - also
        stored = run.frozen_bytes if adapter.quantize is None else stored_bytes(run, adapter)
        frozen = matrices * stored + others * (4 if adapter.upcasts else run.frozen_bytes)
        if has_quantized_head(run) and rank.last:
            head = run.shape.vocab * run.shape.hidden / run.mesh.tp
            frozen -= head * (run.compute_bytes - stored_bytes(run, adapter))
        scales = replicated_scales(run, rank)
        extra = trained_parameters(run, rank)
        copies = extra * run.compute_bytes if run.mixed and not run.sharded else 0.0
        replaced = (
            2 * counts.embedding * run.compute_bytes if run.traits.replaces_embedding and adapter.quantize else 0.0
        )
        return group(
            "weights",
            leaf("frozen", (frozen - scales) / shards),
            leaf("replaced embedding, gradient of the new one", replaced),
            leaf("quantization scales", scales),
            leaf("adapters", (extra - also) * run.trained_bytes / shards),
            leaf("trained base weights", also * run.trained_bytes / shards),
            leaf("compute copies", copies),
        )
    copies = counts.all * run.compute_bytes if run.mixed and not run.sharded else 0.0
    return group(
        "weights",
        leaf("master weights" if run.mixed else "parameters", counts.all * run.weight_bytes / shards),
        leaf("compute copies", copies),
    )


def stored_bytes(run: Run, adapter: Adapter) -> float:
    """Bytes per element of a frozen matrix, as it is gathered or dequantized from."""
    if adapter.quantize is None:
        return float(run.compute_bytes)
    if adapter.double_quantized and adapter.quantize in ("nf4", "fp4"):
        return DOUBLE_QUANTIZED_BYTES
    return QUANTIZED_BYTES[adapter.quantize]


def replicated_scales(run: Run, rank: Rank) -> float:
    """Bytes of scales that every rank keeps whole, though the matrices are sharded."""
    adapter = run.adapter
    if adapter is None or adapter.quantize not in ("nf4", "fp4") or not run.traits.replicates_scales:
        return 0.0
    if not (run.sharded or run.data_parallelism.shards_weights):
        return 0.0
    return _frozen_matrices(run, rank) * (stored_bytes(run, adapter) - 0.5)


def _frozen_matrices(run: Run, rank: Rank) -> float:
    """Elements of the matrices of blocks that are stored as the adapter's base is."""
    return quantized_parameters(run) / run.mesh.tp * rank.blocks


def quantized_parameters(run: Run) -> float:
    """Elements of the matrices of a block that can be quantized."""
    found = sum(one.parameters for one in quantizable(run))
    return float(found if has_joined_experts(run) else found + expert_parameters(run.shape))


def quantizable(run: Run) -> list[Linear]:
    """The linear layers of a block that can be quantized."""
    matrices = linears(run.shape, joined=run.traits.fused_qkv)
    return [one for one in matrices if not (has_joined_experts(run) and one.reads in MLP)]


def has_joined_experts(run: Run) -> bool:
    """Whether all experts of a block are one tensor, which is no linear layer."""
    return bool(run.shape.experts) and run.traits.experts != "modules"


def stored_tensors(run: Run, layers: Iterable[Linear]) -> int:
    """How many tensors these layers of a block are: one for each expert that is a module."""
    return sum(run.shape.experts if is_expert_module(run, one) else 1 for one in layers)


def is_expert_module(run: Run, one: Linear) -> bool:
    """Whether a layer stands for one of each expert of a block."""
    return bool(run.shape.experts) and run.traits.experts == "modules" and one.reads in MLP


def has_quantized_head(run: Run) -> bool:
    """Whether the head is quantized like the matrices of blocks."""
    quantized = run.adapter is not None and run.adapter.quantize is not None
    return quantized and run.traits.quantizes_head and not run.shape.tied


def dequantized_bytes(run: Run, *, forward: bool = False) -> int:
    """Bytes per element of a matrix that is dequantized while it is used: a second copy if its dtype is another, in the
    backward pass or already `forward`. An 8-bit layer's is in the dtype of its input, and multiplied by its scales in
    place."""
    if run.in_int8:
        return run.read_bytes("norm")
    twice = run.casts_dequantized is True or (run.casts_dequantized == "backward" and not forward)
    return run.compute_bytes * (2 if twice else 1)


def block_bytes(run: Run) -> float:
    """Bytes per parameter of a block that FSDP all-gathers: a frozen matrix as it is stored."""
    return float(run.compute_bytes) if run.adapter is None else stored_bytes(run, run.adapter)


def held_weights(run: Run, rank: Rank) -> float:
    """Bytes of the weights that a rank keeps, on its device or its host, without replicated scales."""
    counts = count(run, rank)
    if not (run.traits.masters_with_optimizer and run.mixed):
        return _weights(run, counts, rank).amount - replicated_scales(run, rank)
    if run.adapter is not None:
        each = (_weights(run, counts, rank).amount - replicated_scales(run, rank)) * run.shards
    else:
        each = counts.all * 2
    return each / (run.shards * run.replicas if run.data_parallelism.shards_weights else 1)
