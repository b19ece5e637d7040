"""An all-gather of a few host values after every step, on the host, while the device runs the next step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from shoal.mistakes import RunFailed
from shoal.parallel.collectives import all_gather_single as all_gather
from shoal.parallel.ranks import Ranks


@dataclass(frozen=True)
class Agreed:
    """True if true on any rank. The same on all ranks after the same step."""

    stop: bool
    cannot_save: bool


class Sharing(Protocol):
    """What else is shared: `train.hooks.Hooks`."""

    def share(self) -> Sequence[float]: ...

    def on_shared(self, values: Sequence[Sequence[float]]) -> None: ...


class Agreement:
    """Shares values between ranks, one step late, so that no rank waits for them."""

    def __init__(self, ranks: Ranks, others: Sharing) -> None:
        self.ranks = ranks
        self.others = others
        self._pending: tuple[dist.Work, torch.Tensor] | None = None

    def __enter__(self) -> "Agreement":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Finish the pending collective, unless this rank alone failed: the others may never join it.
        if kind is None or issubclass(kind, RunFailed):
            self._wait()

    def after_step(self, *, stop: bool, cannot_save: bool) -> Agreed:
        """Share this rank's values; returns what all ranks shared at the previous call (with one rank: at this one)."""
        shared = self._all_gather([stop, cannot_save, *self.others.share()])
        if shared:
            self.others.on_shared([one[2:] for one in shared])
        return Agreed(stop=any(one[0] for one in shared), cannot_save=any(one[1] for one in shared))

    def _all_gather(self, values: list[float]) -> list[list[float]]:
        if self.ranks.world_size == 1:
            return [values]
        previous = self._wait()
        mine = torch.tensor(values, dtype=torch.float64)
        table = mine.new_empty(self.ranks.world_size * len(values))
        work = all_gather(table, mine, async_op=True)
        assert work is not None
        self._pending = (work, table)
        return previous

    def _wait(self) -> list[list[float]]:
        """The result of the pending all-gather; empty if there is none."""
        if self._pending is None:
            return []
        work, table = self._pending
        self._pending = None
        work.wait()
        found: list[list[float]] = table.reshape(self.ranks.world_size, -1).tolist()
        return found
