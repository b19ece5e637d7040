"""What `auto` means: the strategy, the micro-batch and the passes of a run, from sizes alone."""

from dataclasses import asdict, dataclass
from typing import Any

from shoal.config.schema import ParallelConfig
from shoal.mistakes import UserMistake

# Mixed precision with AdamW: fp32 weight, gradient and two moments, and the copy to compute with.
STATE_BYTES = 18
# Kept for the backward pass, per token, layer and hidden unit, without recomputation, in bytes of bf16: attention's
# inputs and outputs, two norms, and an MLP of three to four times the width.
ACTIVATION_BYTES = 34
# What is left for everything the two numbers above do not count.
USABLE_SHARE = 0.85
# Fewer, and a pipeline's devices wait too long for the first pass to arrive and the last to leave.
PASSES_PER_STAGE = 4
# On a CPU nothing overlaps, and past a few rows larger passes only take memory.
CPU_ROWS = 8


@dataclass(frozen=True)
class Sizes:
    """What the choice needs to know of a model and its rows."""

    parameters: int
    layers: int
    hidden: int
    vocabulary: int
    length: int


@dataclass(frozen=True)
class Chosen:
    """How a run is carried out; `plan.json` holds this."""

    strategy: str
    reason: str
    world_size: int
    data_parallel: int
    micro_batch: int
    passes: int
    global_batch: int
    mesh: dict[str, int]  # degrees by name

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def describe(self) -> str:
        """The strategy, what it is combined with, and why it was taken."""
        cuts = "".join(f" × {name} {self.mesh[name]}" for name in ("tp", "pp", "cp") if self.mesh[name] > 1)
        return f"{self.strategy}{cuts} ({self.reason})"

    def rounds(self) -> str:
        return "1 pass" if self.passes == 1 else f"{self.passes} passes"


def state_gib(sizes: Sizes, shards: int = 1) -> float:
    return sizes.parameters * STATE_BYTES / shards / 2**30


def row_gib(sizes: Sizes) -> float:
    """Activations of one row, and its logits in the two copies a plain loss makes of them."""
    activations = sizes.layers * sizes.hidden * ACTIVATION_BYTES
    return sizes.length * (activations + 8 * sizes.vocabulary) / 2**30


def choose_strategy(
    parallel: ParallelConfig, sizes: Sizes, world_size: int, memory_gib: float | None
) -> tuple[str, str]:
    """The strategy and the reason for it. `memory_gib` is a device's memory; None where devices share the host's."""
    wanted = parallel.strategy
    if parallel.offload == "cpu":  # FSDP's machinery, worth having on one device too
        return ("fsdp", "for parallel.offload cpu") if wanted == "auto" else (wanted, "asked for")
    if wanted != "auto":
        if wanted == "single" and world_size > 1:
            raise UserMistake(f"parallel.strategy is single, but there are {world_size} processes; use ddp or fsdp.")
        if world_size == 1 and wanted != "single":
            return "single", f"{wanted} on one device is single"
        if wanted == "fsdp" and parallel.sharding == "no_shard":
            return "ddp", "fsdp with no_shard is ddp"
        if wanted != "ddp" and world_size == parallel.tp * parallel.pp:
            return "ddp", f"one copy of the model over all devices, so {wanted} has nothing to shard over"
        return wanted, "asked for"
    if world_size == 1:
        return "single", "one device"
    # Tensor and pipeline ranks share a copy of the model between them.
    needed = state_gib(sizes, parallel.tp * parallel.pp) + row_gib(sizes) / (parallel.tp * parallel.cp)
    if memory_gib is None:
        return "ddp", "no device memory to run out of"
    if needed <= memory_gib * USABLE_SHARE:
        return "ddp", f"{needed:.1f} GiB fit on a device of {memory_gib:.0f} GiB"
    return "fsdp", f"{needed:.1f} GiB do not fit on a device of {memory_gib:.0f} GiB"


def choose_batch(
    global_batch: int,
    micro_batch: int | str,
    data_parallel: int,
    sizes: Sizes,
    *,
    shards: int,
    memory_gib: float | None,
    stages: int = 1,
    sharing: int = 1,
) -> tuple[int, int]:
    """(micro-batch, passes), so that micro-batch × passes × data-parallel ranks is the global batch exactly.

    `stages` of a pipeline want several passes each; `sharing` ranks have parts of every row.
    """
    if global_batch % data_parallel:
        raise UserMistake(
            f"train.global_batch {global_batch} does not divide over {data_parallel} data-parallel devices; "
            f"the nearest that do are {nearest_multiples(global_batch, data_parallel)}."
        )
    rows = global_batch // data_parallel
    if isinstance(micro_batch, int):
        if rows % micro_batch:
            unit = micro_batch * data_parallel
            raise UserMistake(
                f"train.global_batch {global_batch} is not a multiple of micro_batch {micro_batch} × {data_parallel} "
                f"devices = {unit}; the nearest that are: {nearest_multiples(global_batch, unit)}."
            )
        return micro_batch, rows // micro_batch
    most: float = CPU_ROWS
    if memory_gib is not None:
        most = (memory_gib * USABLE_SHARE - state_gib(sizes, shards)) / (row_gib(sizes) / sharing)
    if stages > 1:  # so that its devices wait for at most a fifth of a step
        most = min(most, rows / (PASSES_PER_STAGE * stages))
    chosen = max(size for size in range(1, rows + 1) if rows % size == 0 and (size <= most or size == 1))
    return chosen, rows // chosen


def nearest_multiples(value: int, unit: int) -> str:
    """The multiples of `unit` on either side of `value`, for a sentence."""
    below = value // unit * unit
    return " and ".join(str(one) for one in (below, below + unit) if one > 0)


def count_steps(
    *, epochs: int | None, steps: int | None, tokens: int | None, rows: int, targets: int, global_batch: int
) -> int:
    """Optimizer steps of the run; `targets` are the target tokens of all `rows`."""
    if steps is not None:
        return steps
    if tokens is not None:
        return max(1, -(-tokens * rows // (targets * global_batch)))
    assert epochs is not None
    total = epochs * rows // global_batch
    if total < 1:
        raise UserMistake(
            f"{epochs} epoch{'s' if epochs > 1 else ''} of {rows} rows give no whole step of train.global_batch "
            f"{global_batch}; lower it to {epochs * rows} or less, or set train.steps."
        )
    return total
