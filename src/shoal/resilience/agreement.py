"""What ranks tell each other after every step, over the host, while the device is busy with the next."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from shoal.mistakes import RunFailed
from shoal.parallel.ranks import Ranks
from shoal.parallel.renamed import all_gather
from shoal.resilience.stragglers import Pace, StragglerDetector


@dataclass(frozen=True)
class Agreed:
    """What holds if it holds for any rank: the same on all of them, after the same step."""

    stop: bool
    cannot_save: bool


class Agreement:
    """Every rank's numbers for every rank, one step late, so that nobody waits for them."""

    def __init__(self, ranks: Ranks, slow: StragglerDetector) -> None:
        self.ranks = ranks
        self.slow = slow
        self.pace = Pace(ranks)
        self._asked: tuple[dist.Work, torch.Tensor] | None = None

    def __enter__(self) -> "Agreement":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # No collective is left open; but where something broke on this rank alone, the others may never answer.
        if kind is None or issubclass(kind, RunFailed):
            self._hear()

    def after_step(self, *, stop: bool, cannot_save: bool, data_seconds: float, step_seconds: float) -> Agreed:
        """Tell the others; returns what all told at the previous call (alone: at this one)."""
        told = self._exchange([stop, cannot_save, *self.pace.after_step(data_seconds)])
        if self.ranks.first:  # who would say it
            self.slow.look([(product, data) for _, _, product, data in told], step_seconds)
        return Agreed(stop=any(one[0] for one in told), cannot_save=any(one[1] for one in told))

    def _exchange(self, numbers: list[float]) -> list[list[float]]:
        if self.ranks.world_size == 1:
            return [numbers]
        heard = self._hear()
        mine = torch.tensor(numbers, dtype=torch.float64)
        table = mine.new_empty(self.ranks.world_size * len(numbers))
        work = all_gather(table, mine, async_op=True)
        assert work is not None
        self._asked = (work, table)
        return heard

    def _hear(self) -> list[list[float]]:
        """What is on its way; nothing if nothing is."""
        if self._asked is None:
            return []
        work, table = self._asked
        self._asked = None
        work.wait()
        found: list[list[float]] = table.reshape(self.ranks.world_size, -1).tolist()
        return found
