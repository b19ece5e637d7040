"""The charts of runs as data for `pages/charts.js`: series over steps, tokens, samples and hours, thinned for a screen.

One run has several series in a chart, such as training and evaluation loss; of several runs, each has one.
"""

from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from shoal.observe.run_reader import RunRecord, Values, column, number

MOST_POINTS = 400  # of a series
MOST_OTHERS = 8  # charts of metrics that are not listed here
FAULTS = ("restart", "fault", "stop")  # events that are marked in the charts of one run

AXES = ("step", "tokens", "samples", "hours")

Chart = dict[str, Any]


@dataclass(frozen=True)
class Curve:
    """A metric with a chart of its own, or a line in one that is shared."""

    metric: str
    label: str
    chart: str
    evaluation: bool = False


# The charts in their order, with the format of their values.
CHARTS = {
    "loss": ("Loss", "number"),
    "lr": ("Learning rate", "small"),
    "grad_norm": ("Gradient norm", "number"),
    "speed": ("Throughput in tokens/s", "tokens"),
    "samples": ("Throughput in samples/s", "tokens"),
    "mfu": ("MFU", "percent"),
    "memory": ("Memory per device", "gib"),
    "seconds": ("Time per step", "seconds"),
    "utilization": ("GPU utilization", "whole_percent"),
    "power": ("Power", "watts"),
    "temperature": ("Temperature", "celsius"),
}
CURVES = (
    Curve("loss", "training", "loss"),
    Curve("eval_loss", "evaluation", "loss", evaluation=True),
    Curve("lr", "learning rate", "lr"),
    Curve("grad_norm", "gradient norm", "grad_norm"),
    Curve("tokens_per_second", "tokens/s", "speed"),
    Curve("samples_per_second", "samples/s", "samples"),
    Curve("mfu", "MFU", "mfu"),
    Curve("memory_gib", "allocated", "memory"),
    Curve("reserved_gib", "reserved", "memory"),
    Curve("seconds", "step", "seconds"),
    Curve("data_seconds", "waiting for data", "seconds"),
    Curve("communication_seconds", "exposed communication", "seconds"),
    Curve("save_seconds", "waiting for checkpoints", "seconds"),
    Curve("gpu_utilization", "GPU utilization", "utilization"),
    Curve("power_watts", "power", "power"),
    Curve("temperature_celsius", "temperature", "temperature"),
)
# Not metrics, or shown elsewhere. Perplexity is the loss again.
NOT_DRAWN = {"step", "attempt", "time", "tokens", "loss_tokens", "samples", "skipped", "eval_perplexity"}
NOT_DRAWN |= {"memory_total_gib"}


_DRAWN: "WeakKeyDictionary[RunRecord, list[Chart]]" = WeakKeyDictionary()


def charts_of(run: RunRecord) -> list[Chart]:
    """The charts of one run, made once per record."""
    found = _DRAWN.get(run)
    if found is None:
        found = _DRAWN[run] = _charts_of(run)
    return found


def _charts_of(run: RunRecord) -> list[Chart]:
    axis = Axis(run)
    drawn = [
        _chart(name, title, form, [_series(run, axis, curve, curve.label) for curve in CURVES if curve.chart == name])
        for name, (title, form) in CHARTS.items()
    ]
    drawn += [
        _chart(metric, _title(metric), "number", [_series(run, axis, curve, curve.label)])
        for metric in _others([run])
        for curve in [Curve(metric, _title(metric), metric, evaluation=metric.startswith("eval_"))]
    ]
    forecast = number(run.planned("forecast", "memory", "allocated_gib"))
    for chart in drawn:
        chart["marks"] = _marks(run, axis)
        if chart["id"] == "memory" and forecast is not None and not _on_cpu(run):
            chart["levels"] = [{"label": "forecast", "y": forecast}]
    return [chart for chart in drawn if chart["series"]]


def compared_charts(runs: Sequence[tuple[str, RunRecord]], only: Collection[str] | None = None) -> list[Chart]:
    """The charts of several runs, or `only` some of them, with one line each: for a shared chart that of its first
    metric."""
    axes = {label: Axis(run) for label, run in runs}

    def draw(name: str, title: str, form: str, curve: Curve) -> Chart:
        found = []
        for index, (label, run) in enumerate(runs):
            found += [{**one, "colour": index} for one in [_series(run, axes[label], curve, label)] if one["y"]]
        return _chart(name, title, form, found)

    drawn = []
    for name, (title, form) in CHARTS.items():
        if only is not None and name not in only:
            continue
        first = next(curve for curve in CURVES if curve.chart == name)
        drawn.append(draw(name, title, form, first))
        if name == "loss":
            drawn.append(draw("eval_loss", "Evaluation loss", form, CURVES[1]))
    for metric in _others([run for _, run in runs]) if only is None else ():
        curve = Curve(metric, _title(metric), metric, evaluation=metric.startswith("eval_"))
        drawn.append(draw(metric, _title(metric), "number", curve))
    return [chart for chart in drawn if chart["series"]]


class Axis:
    """Where a step is on the axes: its tokens or samples, and its hours since the run's start."""

    def __init__(self, run: RunRecord) -> None:
        times = [
            found for one in (*run.events[:1], *run.training[:1]) if (found := number(one.get("time"))) is not None
        ]
        self.start = min(times) if times else None
        self._steps = [one["step"] for one in run.training]
        self._training = run.training

    def place(self, line: Values) -> dict[str, float | None]:
        """By the name of each axis."""
        counted = line
        if "loss" not in line:  # of an evaluation: as after the training step before it
            index = bisect_right(self._steps, line["step"]) - 1
            counted = self._training[index] if index >= 0 else {}
        seconds = number(line.get("time"))
        return {
            "step": line["step"],
            "tokens": number(counted.get("tokens")),
            "samples": number(counted.get("samples")),
            "hours": None if seconds is None or self.start is None else _short((seconds - self.start) / 3600),
        }


def _series(run: RunRecord, axis: Axis, curve: Curve, label: str) -> Chart:
    lines = run.evaluations if curve.evaluation else run.training
    found, values = column(lines, curve.metric)
    kept = [(found[index], values[index]) for index in thinned(values)]
    places = [axis.place(line) for line, _ in kept]
    return {
        "label": label,
        "points": curve.evaluation,
        **{name: [place[name] for place in places] for name in AXES},
        "y": [_short(value) for _, value in kept],
    }


def _chart(name: str, title: str, form: str, series: Iterable[Chart]) -> Chart:
    # A wait that was never more than nothing is no line.
    kept = [one for one in series if any(one["y"])]
    return {"id": name, "title": title, "format": form, "series": kept, "marks": [], "levels": []}


def _marks(run: RunRecord, axis: Axis) -> list[Chart]:
    """The restarts and faults."""
    found = []
    for event in run.events:
        step = number(event.get("step"))
        if event["event"] in FAULTS and step is not None:
            found.append({"label": event["event"], **axis.place({"step": step, "time": event.get("time")})})
    return found


def _others(runs: Sequence[RunRecord]) -> list[str]:
    """Metrics of the objective, which are not in `CURVES`."""
    known = NOT_DRAWN | {curve.metric for curve in CURVES}
    found: dict[str, None] = {}
    for run in runs:
        for line in (*run.training[-1:], *run.evaluations[-1:]):
            found |= {
                str(name): None for name, value in line.items() if name not in known and number(value) is not None
            }
    return list(found)[:MOST_OTHERS]


def _title(metric: str) -> str:
    name = metric.removeprefix("eval_").replace("_", " ")
    return f"Evaluation: {name}" if metric.startswith("eval_") else name.capitalize()


def _on_cpu(run: RunRecord) -> bool:
    """On a CPU memory is that of the whole process, which the forecast does not count."""
    return bool(run.planned("machine", "device") == "cpu")


def thinned(values: Sequence[float], most: int = MOST_POINTS) -> list[int]:
    """Indices of at most `most` values: of each range of equal length the smallest and the largest, so that no spike is
    lost, and the first and the last."""
    if len(values) <= most:
        return list(range(len(values)))
    ranges = most // 2 - 1
    kept = {0, len(values) - 1}
    for one in range(ranges):
        first = one * len(values) // ranges
        some = values[first : (one + 1) * len(values) // ranges]
        kept |= {first + some.index(min(some)), first + some.index(max(some))}
    return sorted(kept)


def _short(value: float) -> float:
    """Six digits are more than a screen shows."""
    return float(f"{value:.6g}")
