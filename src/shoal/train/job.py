"""One rank's share of a run: all that the loop uses."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.checkpoint import state
from shoal.checkpoint.saver import Saver
from shoal.checkpoint.state import Progress, Stateful
from shoal.config.run import RunDirectory
from shoal.config.schema import Config
from shoal.observe.progress import Reporter
from shoal.optim.loss_scaler import LossScaler
from shoal.optim.optimizer import NamedOptimizer
from shoal.parallel.model import ParallelModel
from shoal.parallel.ranks import Ranks
from shoal.plan.choose import Chosen
from shoal.train.forecast import Forecast
from shoal.train.inputs import Inputs
from shoal.train.log import StepLog
from shoal.train.step import TrainStep


@dataclass
class Job:
    """Made by `train.setup`, used by `train.loop`."""

    config: Config
    run: RunDirectory
    ranks: Ranks
    reporter: Reporter
    inputs: Inputs
    forecast: Forecast
    chosen: Chosen
    plan: dict[str, Any]  # what plan.json holds
    model: ParallelModel
    optimizer: NamedOptimizer
    scaler: LossScaler
    controls: Mapping[str, Stateful]  # the few numbers beside the optimizer that a run goes on with
    step: TrainStep
    log: StepLog
    flops: Callable[[int, int], float]
    progress: Progress
    saver: Saver
    saved: Path | None  # the newest checkpoint
    cannot_save: bool = False  # the run's folder does not take it any more
    rollbacks: Counter[str] = field(default_factory=Counter)  # how often the run went back to which checkpoint
    beat: Callable[[str], None] = field(default=lambda doing: None)  # says that the run goes on
    rest: Callable[[str], None] = field(default=lambda doing: None)  # says that the next beat may take long

    def load(self, checkpoint: Path) -> None:
        """Fill the model and all that belongs to it from a checkpoint."""
        self.model.forget_gathered()
        self.progress = state.load(
            checkpoint,
            tensors=self.model.saved,
            placement=self.model.placement,
            optimizer=self.optimizer,
            controls=self.controls,
            ranks=self.ranks,
        )
        self.model.weights_changed()
        self.saved = checkpoint
