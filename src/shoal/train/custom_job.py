"""The job of a custom loop."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal.data.custom_loader import CustomLoader
from shoal.data.order import Order
from shoal.mistakes import UserMistake
from shoal.parallel.collectives import broadcast_first
from shoal.train.custom_run import CustomRun
from shoal.train.custom_schedule import Per
from shoal.train.custom_turns import Turns
from shoal.train.job import AnyJob


@dataclass(kw_only=True)
class CustomJob(AnyJob):
    """The run of a custom loop."""

    resolved: CustomRun
    optimizer: Turns
    loader: CustomLoader
    schedule_per: Per
    last_step: int
    tied: Mapping[str, str]  # other names of weights that modules share, and the name that each is saved by

    @property
    def order(self) -> Order:
        return self.loader.share.order

    @property
    def steps(self) -> int:
        return self.last_step

    @property
    def items(self) -> str:
        return "samples"

    @property
    def epoch(self) -> int:
        """Complete epochs so far."""
        return self.progress.tokens // max(1, self.order.training_count or 0)

    def count(self) -> bool:
        """A step is done. Returns whether it was the last one of an epoch."""
        before = self.epoch
        self.progress.step += 1
        self.progress.tokens += self.resolved.global_batch
        return self.epoch > before

    def fingerprint(self) -> dict[str, dict[str, int | str]]:
        return {
            "training": {
                "samples": self.order.training_count or 0,
                "order": type(self.order).__name__,
                "global_batch": self.resolved.global_batch,
            }
        }

    def synchronize_buffers(self) -> None:
        """Buffers such as the statistics of batch normalization become those of rank 0."""
        if self.ranks.world_size > 1:
            for buffer in self.model.buffers.values():
                broadcast_first(buffer)

    def before_save(self) -> None:
        self.synchronize_buffers()
        self.progress.schedule = self.optimizer.numbers()

    def load(self, checkpoint: Any) -> None:
        super().load(checkpoint)
        if not self.progress.schedule:
            raise UserMistake(f"{checkpoint} was not saved by a custom loop; start a new run under another name=…")
        self.optimizer.load(self.progress.schedule)
