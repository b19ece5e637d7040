"""Metric sinks: `metrics.jsonl` always, others as `log.to` says, all with the same names. Training depends on none."""

import json
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shoal.mistakes import UserMistake
from shoal.observe.background import Background
from shoal.observe.metrics import About, Csv, JsonLines, Line, Sink, read_lines

PACKAGES = {"wandb": "wandb", "mlflow": "mlflow"}  # of sinks that are extras


def newest_step(run: Path) -> int:
    """The last step that a run has logged so far."""
    try:
        return max((int(line["step"]) for line in read_lines(run / "metrics.jsonl") if "step" in line), default=0)
    except (OSError, ValueError, TypeError):
        return 0


class TensorBoard:
    name = "tensorboard"

    def __init__(self, about: About) -> None:
        self._folder = about.run / "logs" / "tensorboard"
        self._step = about.step
        self._writer = self._open(about.step + 1)
        self._writer.add_text("config", _code(about.config), about.step)
        self._writer.add_text("plan", _code(about.plan), about.step)

    def _open(self, step: int) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard hides what an earlier writer has written of this step and later ones.
        return SummaryWriter(str(self._folder), purge_step=step)

    def write(self, line: Line) -> None:
        step = line["step"]
        assert isinstance(step, int)
        if step < self._step:  # rolled back
            self._writer.close()
            self._writer = self._open(step)
        self._step = step
        for name, value in measured(line).items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


def measured(line: Line) -> dict[str, float]:
    """The metrics of a line, without those that are null and those that say when it was written."""
    return {
        name: value for name, value in line.items() if name not in ("step", "attempt", "time") and value is not None
    }


def _code(values: Mapping[str, Any]) -> str:
    """As Markdown, which TensorBoard renders."""
    return "\n".join(f"    {line}" for line in json.dumps(values, indent=2, default=str).splitlines())


def _wandb(about: About) -> Sink:
    from shoal.observe.wandb_sink import WeightsAndBiases

    return WeightsAndBiases(about)


def _mlflow(about: About) -> Sink:
    from shoal.observe.mlflow_sink import MLflow

    return MLflow(about)


# Each is opened when the run starts. The last two may wait for a network, so a thread of theirs opens and writes them.
OPENERS: dict[str, Callable[[About], Sink]] = {
    "tensorboard": TensorBoard,
    "csv": lambda about: Csv(about.run),
    "wandb": lambda about: Background("wandb", lambda: _wandb(about)),
    "mlflow": lambda about: Background("mlflow", lambda: _mlflow(about)),
}


def check_packages(names: Sequence[str]) -> None:
    """A UserMistake if a sink's package is not installed."""
    for name in names:
        if name in PACKAGES and find_spec(PACKAGES[name]) is None:
            raise UserMistake(
                f"log.to {name} needs the package {name}, which is not installed: pip install 'shoal[{name}]'."
            )


class Sinks:
    """All sinks of a run. One that fails is warned of once and left out from then on."""

    def __init__(self, names: Sequence[str], about: About, warn: Callable[[str], None]) -> None:
        """Raises `OSError` if `metrics.jsonl` cannot be opened."""
        self.warn = warn
        self._first = JsonLines(about.run / "metrics.jsonl")
        self._refused = False  # metrics.jsonl could not be written, which is tried again with every line
        self._others: list[Sink] = []
        for name in names:
            try:
                self._others.append(OPENERS[name](about))
            except Exception as error:
                self.warn(f"log.to {name} cannot be opened ({explained(error)}): it is off. Training continues.")

    def write(self, line: Line) -> None:
        try:
            self._first.write(line)
        except OSError as failure:  # a full disk must not end a run that does not depend on this file
            if not self._refused:
                self._refused = True
                self.warn(f"{self._first.name} cannot be written: {failure.strerror}. Training continues.")
        for sink in list(self._others):
            try:
                sink.write(line)
            except Exception as error:
                self._others.remove(sink)
                self.warn(f"log.to {sink.name} failed ({explained(error)}): it is off. Training continues.")

    def close(self) -> None:
        for sink in (self._first, *self._others):
            try:
                sink.close()
            except Exception as error:
                self.warn(f"{sink.name} could not be written completely: {explained(error)}.")


def explained(error: BaseException) -> str:
    """An exception in one line, also one without a message."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
