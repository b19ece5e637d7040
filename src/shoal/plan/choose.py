"""How a run is carried out, and how many steps it has."""

from dataclasses import asdict, dataclass
from typing import Any

from shoal.mistakes import UserMistake


@dataclass(frozen=True)
class Chosen:
    """How a run is carried out; `plan.json` holds this."""

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
        """The strategy, what it is combined with, and why it was taken."""
        cuts = "".join(f" × {name} {self.mesh[name]}" for name in ("tp", "pp", "cp") if self.mesh[name] > 1)
        return f"{self.strategy}{cuts} ({self.reason})"

    def rounds(self) -> str:
        return "1 pass" if self.grad_accum_steps == 1 else f"{self.grad_accum_steps} passes"


def nearest_multiples(value: int, unit: int) -> str:
    """The multiples of `unit` on either side of `value`, for a sentence."""
    below = value // unit * unit
    return " and ".join(str(one) for one in (below, below + unit) if one > 0)


def count_steps(
    *, epochs: int | None, steps: int | None, tokens: int | None, rows: int, loss_tokens: int, global_batch: int
) -> int:
    """Optimizer steps of the run; `loss_tokens` are the target tokens of all `rows`."""
    if steps is not None:
        return steps
    if tokens is not None:
        return max(1, -(-tokens * rows // (loss_tokens * global_batch)))
    assert epochs is not None
    total = epochs * rows // global_batch
    if total < 1:
        raise UserMistake(
            f"{epochs} epoch{'s' if epochs > 1 else ''} of {rows} rows give no whole step of train.global_batch "
            f"{global_batch}; lower it to {epochs * rows} or less, or set train.steps."
        )
    return total
