"""One rank of a job of many, by itself: what it takes, held against the forecast term by term."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.bench.steps import MISTAKE, Steps
from shoal.config.load import config_to_yaml
from shoal.config.schema import Config
from shoal.mistakes import RunFailed, UserMistake
from shoal.plan.choose import Chosen

# A forecast that is off by more is told in a sentence; of a term, where it is also this share of the whole.
BAR = 0.10
WORTH_TELLING = 0.01


@dataclass(frozen=True)
class RankReport:
    """Forecast and measurement of one rank. `steps` are those that really ran, if any did."""

    traced: bool
    world_size: int
    chosen: Mapping[str, Any]
    device: str  # that the forecast is for
    machine: Mapping[str, Any]  # that measured
    parameters: int | None
    forecast: Mapping[str, Any]
    measured: Mapping[str, Any]
    steps: Steps | None = None

    @property
    def difference(self) -> dict[str, Any]:
        """How much more was measured than forecast, as a share of the forecast, wherever there are both numbers."""
        return _differences(self.forecast, self.measured)

    def notes(self) -> list[str]:
        """What a reader should know of these numbers, and where the forecast is wrong."""
        found = []
        if self.traced:
            found.append("Traced: shapes are real, values are not, and blocks are not compiled; nor is the forecast's.")
        elif not self.difference:
            found.append("A CPU's memory is the whole process's, and its speed is not forecast: nothing to compare.")
        return found + list(self._faults())

    def _faults(self) -> list[str]:
        found, difference = [], self.difference
        whole = self.forecast.get("allocated_gib")
        names = {
            "allocated_gib": "memory",
            "reserved_gib": "reserved memory",
            "tokens_per_second": "speed",
        }
        for key, name in names.items():
            if abs(difference.get(key) or 0.0) > BAR:
                found.append(_fault(name, difference[key]))
        for term, forecast in self.forecast.get("terms", {}).items():
            measured = self.measured.get("terms", {}).get(term)
            if measured is None or not whole or abs(measured - forecast) < WORTH_TELLING * whole:
                continue
            if abs(measured - forecast) > BAR * forecast:
                share = difference["terms"].get(term)
                found.append(
                    f"{term}: {measured:.2f} GiB where none were forecast." if share is None else _fault(term, share)
                )
        return found

    def as_dict(self) -> dict[str, Any]:
        shared = {} if self.steps is None else self.steps.as_dict()
        return shared | {
            "traced": self.traced,
            "world_size": self.world_size,
            "parameters": self.parameters,
            "device": self.device,
            "chosen": dict(self.chosen),
            "machine": dict(self.machine),
            "forecast": _rounded(self.forecast),
            "measured": _rounded(self.measured),
            "difference": _rounded(self.difference),
            "notes": self.notes(),
        }

    def text(self) -> str:
        mesh = " × ".join(f"{name} {size}" for name, size in self.chosen["mesh"].items() if size > 1)
        chosen = Chosen(**self.chosen)
        how = f"{chosen.strategy}{f' ({mesh})' if mesh else ''}, {chosen.micro_batch} × {chosen.rounds()} a step"
        lines = [] if self.steps is None else [self.steps.text()]
        lines.append(f"rank 0 of {self.world_size} × {self.device}: {how}")
        lines.append("")
        lines.append(f"{'':32} {'forecast':>12} {'measured':>12} {'difference':>10}")
        difference = self.difference
        for key, name in (
            ("allocated_gib", "memory allocated, GiB"),
            ("reserved_gib", "memory reserved, GiB"),
            ("tokens_per_second", "tokens/s, computing alone"),
        ):
            if key in self.measured and key in self.forecast:
                lines.append(_row(name, self.forecast[key], self.measured[key], difference.get(key)))
        for group, title in (
            ("terms", "of which at: " + str(self.measured.get("terms_at"))),
            ("moments", "fullest at"),
        ):
            if group not in self.measured:
                continue
            lines.append(title)
            for name, measured in self.measured[group].items():
                forecast = self.forecast[group].get(name)
                if forecast is not None and max(forecast, measured) >= 0.005:
                    lines.append(_row(f"  {name}", forecast, measured, difference[group].get(name)))
        return "\n".join([*lines, "", *self.notes()])


def trace_rank(config: Config, world_size: int, report: Callable[[str], None] = lambda _: None) -> RankReport:
    """The first of `world_size` ranks, on tensors without values: any model, on any machine, memory alone."""
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        described, result = Path(folder) / "config.yaml", Path(folder) / "traced.json"
        described.write_text(config_to_yaml(config))
        command = [sys.executable, "-m", "shoal.bench.trace_worker", str(described), str(result)]
        command += ["--world", str(world_size)]
        with (
            tempfile.TemporaryFile("w+") as heard,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=heard, text=True) as process,
        ):
            assert process.stdout is not None
            for line in process.stdout:
                report(line.rstrip())
            if process.wait():
                heard.seek(0)
                message = heard.read().strip()
                if process.returncode == MISTAKE:
                    raise UserMistake(message.rpartition("shoal: ")[2])
                raise RunFailed(f"The step that was to be traced failed:\n{message[-4000:]}")
        found = json.loads(result.read_text())
    return RankReport(traced=True, world_size=world_size, **found)


def report_steps(steps: Steps, forecast: Mapping[str, Any] | None) -> RankReport:
    """Steps that really ran as one rank, with the forecast for the device they ran on: None on a CPU."""
    measured = {"tokens_per_second": steps.tokens_per_second, "step_seconds": steps.step_seconds}
    measured |= {"allocated_gib": steps.allocated_gib}
    if steps.reserved_gib is not None:
        measured["reserved_gib"] = steps.reserved_gib
    return RankReport(
        traced=False,
        world_size=steps.world_size,
        chosen=steps.chosen,
        device=str(steps.machine["device"]),
        machine=steps.machine,
        parameters=None,
        forecast=forecast or {},
        measured=measured,
        steps=steps,
    )


def _differences(forecast: Mapping[str, Any], measured: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in measured.items():
        expected = forecast.get(key)
        if isinstance(value, Mapping) and isinstance(expected, Mapping):
            found[key] = _differences(expected, value)
        elif isinstance(value, int | float) and isinstance(expected, int | float) and expected:
            found[key] = value / expected - 1
    return found


def _fault(name: str, share: float) -> str:
    return f"{name}: {abs(share):.0%} {'more' if share > 0 else 'less'} than forecast."


def _row(name: str, forecast: float, measured: float, difference: float | None) -> str:
    digits = 0 if max(forecast, measured) > 1000 else 2
    share = "" if difference is None else f"{difference:+.1%}"
    return f"{name:32} {forecast:12,.{digits}f} {measured:12,.{digits}f} {share:>10}"


def _rounded(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _rounded(value) if isinstance(value, Mapping) else round(value, 4) if isinstance(value, float) else value
        for key, value in values.items()
    }
