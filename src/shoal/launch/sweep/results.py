"""What the members of a sweep have reached: their metrics, a table with the best first, and the best config."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.config.load import config_to_yaml
from shoal.files import write_atomically
from shoal.launch.sweep.members import Base
from shoal.launch.sweep.state import Entry, Sweep
from shoal.mistakes import UserMistake, suggestion
from shoal.observe.metrics import read_lines

BEST = "best.yaml"
# In the names of metrics of which more is better.
HIGHER_IS_BETTER = ("tokens_per_second", "mfu", "accuracy", "accuracies", "margin", "chosen")
# Metrics of one step vary from batch to batch: their mean over this share of the log lines is compared, and the median
# of those that are a speed.
LAST_SHARE = 0.1


@dataclass(frozen=True)
class Metric:
    """What members are compared by."""

    name: str

    @property
    def maximized(self) -> bool:
        return any(word in self.name for word in HIGHER_IS_BETTER)

    def better(self, one: float, other: float) -> bool:
        return one > other if self.maximized else one < other

    def curve(self, lines: Sequence[dict[str, Any]]) -> dict[int, float]:
        """Step → value; of a step that was repeated after a restart, the last."""
        found = {one["step"]: one[self.name] for one in lines if isinstance(one.get(self.name), int | float)}
        return dict(sorted(found.items()))

    def value(self, lines: Sequence[dict[str, Any]]) -> float | None:
        """Of the last evaluation; of training metrics, over the end of the run."""
        values = list(self.curve(lines).values())
        if not values:
            return None
        if self.name.startswith("eval_"):
            return float(values[-1])
        if self.name in ("tokens_per_second", "mfu", "seconds", "data_seconds"):
            return float(statistics.median(values[1:] or values))  # the first step includes compilation
        return float(statistics.fmean(values[-max(1, round(len(values) * LAST_SHARE)) :]))


@dataclass(frozen=True)
class Result:
    """A member and what it has reached."""

    entry: Entry
    value: float | None
    step: int | None
    lines: tuple[dict[str, Any], ...]

    def as_dict(self, sweep: Sweep) -> dict[str, Any]:
        last = {key: value for line in self.lines for key, value in line.items() if key != "attempt"}
        return {
            "name": self.entry.name,
            "run": str(sweep.run_of(self.entry)),
            "overrides": list(self.entry.member.overrides),
            "state": self.entry.state,
            "attempts": self.entry.attempts,
            "seconds": self.entry.seconds,
            "error": self.entry.error,
            "job": self.entry.job,
            "value": self.value,
            "metrics": last,
        }


@dataclass(frozen=True)
class Table:
    """The members of a sweep, best first; those without a value last."""

    sweep: Sweep
    metric: Metric
    results: tuple[Result, ...]

    @property
    def best(self) -> Result | None:
        """The best of the members that have finished: a pruned one has not been trained as long."""
        return next((one for one in self.results if one.entry.state == "done" and one.value is not None), None)

    def count(self, *states: str) -> int:
        return sum(one.entry.state in states for one in self.results)

    def text(self) -> str:
        keys = [override.partition("=")[0] for one in self.results for override in one.entry.member.overrides]
        columns = list(dict.fromkeys(keys))
        rows = [["member", "state", self.metric.name, "step", *columns]]
        for one in self.results:
            values = dict(override.split("=", 1) for override in one.entry.member.overrides)
            shown = "–" if one.value is None else f"{one.value:,.0f}" if abs(one.value) >= 1000 else f"{one.value:.4f}"
            step = "–" if one.step is None else str(one.step)
            rows.append([one.entry.name, one.entry.state, shown, step, *(values.get(key, "") for key in columns)])
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        failed = [one.entry for one in self.results if one.entry.state == "failed"]
        lines += [f"{one.name}: {one.error}" for one in failed if one.error]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        best = self.best
        return {
            "sweep": str(self.sweep.folder),
            "metric": self.metric.name,
            "maximized": self.metric.maximized,
            "best": None if best is None else best.entry.name,
            "members": [one.as_dict(self.sweep) for one in self.results],
        }


def gather(sweep: Sweep, wanted: str | None) -> Table:
    """Read the metrics of every member. By default they are compared by eval_loss, or loss without evaluations."""
    read = [(entry, _lines(sweep.run_of(entry) / "metrics.jsonl")) for entry in sweep.entries]
    names = dict.fromkeys(
        name for _, lines in read for line in lines for name in line if name not in ("step", "attempt")
    )
    if wanted is None:
        metric = Metric("eval_loss" if "eval_loss" in names or not names else "loss")
    else:
        metric = Metric(wanted)
        if names and wanted not in names and any(entry.state == "done" for entry, _ in read):
            raise UserMistake(
                f"--metric {wanted} is not in metrics.jsonl of any member, which has {', '.join(names)}."
                f"{suggestion(wanted, names)}"
            )
    results = [Result(entry, metric.value(lines), _last_step(lines), tuple(lines)) for entry, lines in read]
    finished = ("done", "pruned")

    def order(one: Result) -> tuple[bool, bool, float]:
        value = one.value or 0.0
        return one.value is None, one.entry.state not in finished, -value if metric.maximized else value

    return Table(sweep, metric, tuple(sorted(results, key=order)))


def _lines(path: Path) -> list[dict[str, Any]]:
    return [one for one in read_lines(path) if isinstance(one.get("step"), int)] if path.is_file() else []


def _last_step(lines: Sequence[dict[str, Any]]) -> int | None:
    return max((line["step"] for line in lines), default=None)


def write_best(table: Table, base: Base, name: str) -> Path | None:
    """The config of the best member as a file for `shoal train`; its run is NAME-best."""
    best = table.best
    if best is None:
        return None
    config = base.load(best.entry.member.overrides).model_copy(update={"name": f"{name}-best"})
    path = table.sweep.folder / BEST
    comment = f"# The best member of {table.sweep.folder}: {best.entry.name}, {table.metric.name} {best.value:.6g}.\n"
    try:
        write_atomically(path, comment + config_to_yaml(config))
    except OSError as error:
        raise UserMistake(f"{path} cannot be written: {error.strerror}.") from None
    return path


def last_sentence(log: Path) -> str | None:
    """What a failed `shoal train` said last."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return None
    said = [line.removeprefix("shoal: ") for line in lines if line.startswith("shoal: ")]
    return said[-1] if said else next((line for line in reversed(lines) if line.strip()), None)
