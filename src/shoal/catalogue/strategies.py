"""The data-parallel strategies: what each one shards, and how it is implemented. Data and lookups only."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Strategy:
    """A value of `parallel.strategy`, in ZeRO's terms: what is sharded over the data-parallel ranks."""

    name: str
    implementation: Literal["none", "ddp", "fully_shard"]
    shards_weights: bool = False
    shards_gradients: bool = False
    shards_optimizer: bool = False
    # All-gathered weights stay unsharded until the backward pass, instead of being resharded after the forward pass.
    keeps_weights: bool = False
    takes_sharding: bool = False  # `parallel.sharding` selects a variant of it
    same_as: str | None = None  # another name of this strategy
    aliases: tuple[str, ...] = ()  # what other tools call it

    @property
    def fully_shard(self) -> bool:
        """Implemented by FSDP2's `fully_shard`. All others replicate the weights."""
        return self.implementation == "fully_shard"

    @property
    def ddp(self) -> bool:
        """Whether gradients are all-reduced unsharded, in DDP's buckets."""
        return self.implementation == "ddp"

    @property
    def partitions_update(self) -> bool:
        """ZeRO-1: every rank has all gradients and updates a shard of the weights."""
        return self.shards_optimizer and not self.fully_shard

    @property
    def sharded_kinds(self) -> int:
        """How many of weights, gradients and optimizer state are sharded."""
        return self.shards_weights + self.shards_gradients + self.shards_optimizer


STRATEGIES = {
    one.name: one
    for one in (
        Strategy("single", "none"),
        Strategy("ddp", "ddp"),
        Strategy(
            "fsdp",
            "fully_shard",
            shards_weights=True,
            shards_gradients=True,
            shards_optimizer=True,
            takes_sharding=True,
            aliases=("fsdp2",),
        ),
        Strategy("zero1", "ddp", shards_optimizer=True, aliases=("zero_1",)),
        # `fully_shard` also shards the weights between steps: ZeRO-2 with more memory saved.
        Strategy(
            "zero2",
            "fully_shard",
            shards_gradients=True,
            shards_optimizer=True,
            keeps_weights=True,
            aliases=("zero_2",),
        ),
        Strategy(
            "zero3",
            "fully_shard",
            shards_weights=True,
            shards_gradients=True,
            shards_optimizer=True,
            same_as="fsdp",
            aliases=("zero_3",),
        ),
    )
}

# The values of `parallel.sharding`, and the strategy that fsdp with each of them amounts to.
SHARDINGS = {"full_shard": "fsdp", "shard_grad_op": "zero2", "hybrid_shard": "fsdp", "no_shard": "ddp"}

ALIASES = {alias: one.name for one in STRATEGIES.values() for alias in one.aliases}

# Those that `shoal plan` compares, the ones that shard least first.
COMPARED = tuple(
    one.name
    for one in sorted(STRATEGIES.values(), key=lambda one: one.sharded_kinds)
    if one.implementation != "none" and one.same_as is None
)


def find_strategy(name: str, sharding: str = "full_shard") -> Strategy:
    """The strategy `name`, which is not auto, or what it amounts to with this `parallel.sharding`."""
    assert name in STRATEGIES, f"no strategy is called {name}"
    strategy = STRATEGIES[name]
    return STRATEGIES[SHARDINGS[sharding]] if strategy.takes_sharding else strategy
