"""The state of a run on one rank: everything the training loop uses."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.checkpoint import state
from shoal.checkpoint.saver import Saver
from shoal.checkpoint.state import Progress, Stateful, StatefulOptimizer
from shoal.config.resolve import ResolvedConfig
from shoal.config.run import RunDirectory
from shoal.config.schema import Config
from shoal.data.order import Order
from shoal.objectives import Objective
from shoal.observe.progress import Reporter
from shoal.optim.loss_scaler import LossScaler
from shoal.optim.optimizer import NamedOptimizer
from shoal.parallel.exposed import ExposedCommunication
from shoal.parallel.model import ParallelModel, TrainedModel
from shoal.parallel.ranks import Ranks
from shoal.plan.resolved import ResolvedRun
from shoal.train.data_changes import fingerprint
from shoal.train.hooks import Hooks
from shoal.train.inputs import Inputs
from shoal.train.log import StepLog
from shoal.train.save_interval import SaveInterval
from shoal.train.step import TrainStep


@dataclass(kw_only=True)
class AnyJob(ABC):
    """What every run has, whatever its model and data: a language model's, and one of a custom loop."""

    resolved: ResolvedConfig
    run: RunDirectory
    ranks: Ranks
    reporter: Reporter
    model: TrainedModel
    optimizer: StatefulOptimizer
    scaler: LossScaler
    controls: Mapping[str, Stateful]  # other state that a checkpoint holds: loss scale, spike statistics
    step: TrainStep
    hooks: Hooks
    log: StepLog
    progress: Progress
    communication: ExposedCommunication
    saver: Saver
    interval: SaveInterval
    plan: dict[str, Any]  # the contents of plan.json
    saved: Path | None = None  # the newest checkpoint
    cannot_save: bool = False  # the run folder is not writable any more
    rollbacks: Counter[str] = field(default_factory=Counter)  # rollbacks per checkpoint

    @property
    @abstractmethod
    def order(self) -> Order:
        """The global order of the training data."""

    @property
    @abstractmethod
    def steps(self) -> int:
        """The last step."""

    @property
    @abstractmethod
    def items(self) -> str:
        """What a batch consists of, for messages: "sequences" or "samples"."""

    @abstractmethod
    def fingerprint(self) -> dict[str, dict[str, int | str]]:
        """What tells whether the data has changed."""

    def before_save(self) -> None:
        """Called on every rank before the state is collected for a checkpoint."""
        self.model.before_save()

    @property
    def config(self) -> Config:
        """The config of this run, without `auto`."""
        return self.resolved.config

    @property
    def no_longer_improves(self) -> bool:
        """Whether `train.early_stop` ends the run: `patience` evaluations without a better loss."""
        stop = self.config.train.early_stop
        return stop is not None and self.progress.evaluations_without_gain >= stop.patience

    def load(self, checkpoint: Path) -> None:
        """Load model, optimizer and progress from a checkpoint."""
        self.model.reshard()
        self.progress = state.load(
            checkpoint,
            tensors=self.model.saved,
            placement=self.model.placement,
            optimizer=self.optimizer,
            controls=self.controls,
            ranks=self.ranks,
        )
        # A stream of other data, for `--from`, begins here.
        same = self.progress.data.get("training") == self.fingerprint()["training"]
        position = self.progress.step * self.resolved.global_batch
        self.order.restore(self.progress.stream if same else [], position)
        self.model.weights_changed()
        self.saved = checkpoint


@dataclass(kw_only=True)
class Job(AnyJob):
    """A run of a language model. Made by `train.setup`, used by `train.loop`."""

    resolved: ResolvedRun
    inputs: Inputs
    objective: Objective
    model: ParallelModel
    optimizer: NamedOptimizer
    flops: Callable[[int, int], float]

    @property
    def order(self) -> Order:
        return self.inputs.sets.order

    @property
    def steps(self) -> int:
        return self.inputs.steps

    @property
    def items(self) -> str:
        return "sequences"

    def fingerprint(self) -> dict[str, dict[str, int | str]]:
        return fingerprint(self.inputs.sets)
