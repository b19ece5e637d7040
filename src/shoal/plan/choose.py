"""The chosen execution of a run, and its number of steps."""

from dataclasses import asdict, dataclass
from typing import Any

from shoal.config.mesh import CONFIGURED_AXES
from shoal.mistakes import UserMistake


@dataclass(frozen=True)
class Chosen:
    """The chosen execution of a run, as stored in `plan.json`."""

    strategy: str
    reason: str
    world_size: int
    data_parallel: int
    micro_batch: int
    grad_accum_steps: int
    global_batch: int
    mesh: dict[str, int]  # degrees by name
    sharding: str = "full_shard"  # what fsdp shards
    recompute: str = "none"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def describe(self) -> str:
        """The strategy with its parallel degrees, and why it was chosen."""
        degrees = "".join(f" × {name} {self.mesh[name]}" for name in CONFIGURED_AXES if self.mesh[name] > 1)
        return f"{self.strategy}{degrees} ({self.reason})"

    def describe_accumulation(self) -> str:
        return "1 accumulation step" if self.grad_accum_steps == 1 else f"{self.grad_accum_steps} accumulation steps"


def nearest_multiples(value: int, unit: int) -> str:
    """The multiples of `unit` on either side of `value`, for an error message."""
    below = value // unit * unit
    return " and ".join(str(one) for one in (below, below + unit) if one > 0)


def count_steps(
    *, epochs: int | None, steps: int | None, tokens: int | None, sequences: int, loss_tokens: int, global_batch: int
) -> int:
    """Optimizer steps of the run; `loss_tokens` are those of all `sequences`."""
    if steps is not None:
        return steps
    if tokens is not None:
        return max(1, -(-tokens * sequences // (loss_tokens * global_batch)))
    assert epochs is not None
    total = epochs * sequences // global_batch
    if total < 1:
        raise UserMistake(
            f"{epochs} epoch{'s' if epochs > 1 else ''} of {sequences} sequences give less than one step of "
            f"train.global_batch {global_batch}; lower it to {epochs * sequences} or less, or set train.steps."
        )
    return total
