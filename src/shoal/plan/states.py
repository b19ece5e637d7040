"""What stays from step to step: weights, gradients and the optimizer's state, on one rank."""

from dataclasses import dataclass

from shoal.plan.blocks import Linear, linears
from shoal.plan.layout import Counts, Rank, count
from shoal.plan.run import Adapter, Run
from shoal.plan.terms import Term, group, leaf

# Bytes a number takes: 4 bits and an fp32 scale for every 64 numbers; the same with scales in 8 bits and a scale of
# theirs for every 256 (the QLoRA paper); 8 bits with a scale for each row, which is next to nothing.
QUANTIZED_BYTES = {"nf4": 0.5 + 4 / 64, "fp4": 0.5 + 4 / 64, "int8": 1.0}
DOUBLE_QUANTIZED_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
# Optimizer state in 8 bits has an fp32 scale for every 256 numbers.
EIGHT_BIT = 1 + 4 / 256
# Numbers of which the offloaded state is on the device at the same time (optim/offload.py).
OFFLOAD_BUCKET = 1 << 26
# DDP's gradients lie in its buckets. One of 25 MiB more, where they are shrunk for the wire.
BUCKET_BYTES = 25 * 2**20
# ZeRO-1 sends updated rows in pieces of so many numbers, and holds them twice (optim/zero1.py).
ROWS_BUCKET = 1 << 24


@dataclass(frozen=True)
class States:
    """Bytes on the device, by kind."""

    weights: Term
    gradients: Term
    optimizer: Term
    # Whole gradients of a stage that FSDP reduces only after the last pass of a pipeline.
    unreduced: Term
    # Optimizer state outside the device.
    host: float


def adapter_parameters(run: Run, blocks: int) -> float:
    """Parameters of the adapters of `blocks` blocks on a rank."""
    if run.adapter is None:
        return 0.0
    adapter = run.adapter
    found = 0.0
    for one in adapted(run):
        # Of the two matrices, the one on the side that tensor parallelism cuts is cut with it.
        inputs, outputs = one.cut(run.mesh.tp)
        found += adapter.rank * (inputs + outputs) + (outputs if adapter.dora else 0)
    return found * blocks


def adapted(run: Run) -> list[Linear]:
    """The matrices of a block that have an adapter."""
    assert run.adapter is not None
    targets = run.adapter.targets
    return [one for one in linears(run.shape) if one.name in targets]


def trained_parameters(run: Run, rank: Rank) -> float:
    """What has gradients and optimizer state on a rank, before sharding."""
    counts, trained = count(run, rank), run.trained
    own = counts.embedding * trained.embedding + counts.blocks * trained.blocks + counts.head * trained.head
    return own + adapter_parameters(run, rank.blocks)


def optimizer_bytes(run: Run, rank: Rank) -> float:
    """The optimizer's state on a rank, before sharding."""
    trained = trained_parameters(run, rank)
    number = run.weight_bytes
    if run.optimizer == "adamw":
        return trained * 2 * number
    if run.optimizer == "adamw8bit":
        return trained * 2 * EIGHT_BIT
    if run.optimizer == "sgd":
        return trained * number if run.momentum else 0.0
    if run.optimizer == "lion":
        return trained * number
    assert run.optimizer == "muon", run.optimizer
    # Matrices of blocks have one momentum; everything else learns by AdamW.
    matrices = sum(one.parameters for one in linears(run.shape)) / run.mesh.tp * rank.blocks * run.trained.blocks
    return (2 * trained - matrices) * number


def states(run: Run, rank: Rank) -> States:
    """Weights, gradients and optimizer state of one rank on its device."""
    if run.traits.masters_with_optimizer and run.mixed:
        return _zero(run, rank)
    counts, trained = count(run, rank), trained_parameters(run, rank)
    shards, away = run.shards, run.offload == "cpu"
    kept = 0.0 if away else 1.0
    weights = _weights(run, counts, rank)
    gradient = run.weight_bytes if run.sharded else run.gradient_bytes or run.weight_bytes
    state = optimizer_bytes(run, rank) / (shards if run.strategy != "zero1" else run.replicas)
    on_device = state * kept
    if run.offload in ("optimizer", "nvme"):
        on_device = min(state, OFFLOAD_BUCKET * state / max(1.0, trained / shards))
    unreduced = trained * run.reduce_bytes if run.mesh.pp > 1 and run.sharded else 0.0
    return States(
        weights=Term(weights.name, weights.amount * kept, weights.parts if not away else ()),
        gradients=leaf("gradients", trained * gradient / shards * kept),
        optimizer=leaf("optimizer state", on_device),
        unreduced=leaf("gradients of the whole stage", unreduced),
        host=state - on_device + (weights.amount + trained * gradient / shards if away else 0.0),
    )


def _zero(run: Run, rank: Rank) -> States:
    """ZeRO's layout: 2 bytes a weight, 2 a gradient, and 4 more for the fp32 weight beside the optimizer's state."""
    everything, trained = count(run, rank).all, trained_parameters(run, rank)
    over = run.shards * run.replicas
    state = (optimizer_bytes(run, rank) + 4 * trained) / (1 if run.strategy in ("single", "ddp") else over)
    sharded = ("zero3", "fsdp")
    return States(
        weights=group("weights", leaf("values", everything * 2 / (over if run.strategy in sharded else 1))),
        gradients=leaf("gradients", trained * 2 / (over if run.strategy in (*sharded, "zero2") else 1)),
        optimizer=leaf("optimizer state", 0.0 if run.offload != "none" else state),
        unreduced=leaf("gradients of the whole stage", 0.0),
        host=state if run.offload != "none" else 0.0,
    )


def _weights(run: Run, counts: Counts, rank: Rank) -> Term:
    shards, adapter = run.shards, run.adapter
    if adapter is not None:
        matrices = sum(one.parameters for one in linears(run.shape)) / run.mesh.tp * rank.blocks
        others = counts.all - matrices
        frozen = matrices * stored_bytes(run, adapter) + others * run.compute_bytes
        extra = adapter_parameters(run, rank.blocks)
        copies = extra * run.compute_bytes if run.mixed and not run.sharded else 0.0
        return group(
            "weights",
            leaf("frozen", frozen / shards),
            leaf("adapters", extra * run.weight_bytes / shards),
            leaf("copies to compute with", copies),
        )
    copies = counts.all * run.compute_bytes if run.mixed and not run.sharded else 0.0
    return group(
        "weights",
        leaf("trained copy" if run.mixed else "values", counts.all * run.weight_bytes / shards),
        leaf("copies to compute with", copies),
    )


def stored_bytes(run: Run, adapter: Adapter) -> float:
    """Bytes of a number of a frozen matrix."""
    if adapter.quantize is None:
        return float(run.compute_bytes)
    if adapter.double_quantized and adapter.quantize in ("nf4", "fp4"):
        return DOUBLE_QUANTIZED_BYTES
    return QUANTIZED_BYTES[adapter.quantize]
