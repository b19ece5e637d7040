"""One rank of a distributed job, run by itself and compared with the forecast term by term."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal.bench.output import envelope
from shoal.bench.steps import MISTAKE, Steps, last_sentence
from shoal.config.load import config_to_yaml, config_values
from shoal.config.schema import Config
from shoal.mistakes import RunFailed, UserMistake
from shoal.plan.resolved import describe_accumulation
from shoal.temporary import temporary_folder

# Deviations above this are reported in a note; for a term only if they are also this share of the total.
TOLERANCE = 0.10
MIN_SHARE = 0.01


@dataclass(frozen=True)
class RankReport:
    """Forecast and measurement of one rank. `steps` is None if it was traced."""

    traced: bool
    world_size: int
    chosen: Mapping[str, Any]
    device: str  # of the forecast
    machine: Mapping[str, Any]  # that the measurement ran on
    parameters: int | None
    forecast: Mapping[str, Any]
    measured: Mapping[str, Any]
    steps: Steps | None = None
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def difference(self) -> dict[str, Any]:
        """measured / forecast − 1, for every value that is in both."""
        return _differences(self.forecast, self.measured)

    def notes(self) -> list[str]:
        """Caveats about the measurement, and large deviations from the forecast."""
        found = []
        if self.traced:
            found.append(
                "Traced on fake tensors, with blocks that are not compiled; the forecast is for uncompiled blocks too."
            )
        elif not self.difference:
            found.append(
                "On a CPU there is nothing to compare: memory is that of the process, and speed is not forecast."
            )
        return found + list(self._deviations())

    def _deviations(self) -> list[str]:
        found, difference = [], self.difference
        whole = self.forecast.get("allocated_gib")
        names = {
            "allocated_gib": "memory",
            "reserved_gib": "reserved memory",
            "tokens_per_second": "speed",
        }
        for key, name in names.items():
            if abs(difference.get(key) or 0.0) > TOLERANCE:
                found.append(_deviation(name, difference[key]))
        for term, forecast in self.forecast.get("terms", {}).items():
            measured = self.measured.get("terms", {}).get(term)
            if measured is None or not whole or abs(measured - forecast) < MIN_SHARE * whole:
                continue
            if abs(measured - forecast) > TOLERANCE * forecast:
                share = difference["terms"].get(term)
                found.append(
                    f"{term}: {measured:.2f} GiB, but none was forecast." if share is None else _deviation(term, share)
                )
        return found

    def as_dict(self) -> dict[str, Any]:
        shared = {} if self.steps is None else self.steps.as_dict()
        notes = self.notes()
        common = envelope("rank", machine=self.machine, config=self.config, rows=self._rows(), caveats=notes)
        return {**common, **shared, **common} | {
            "traced": self.traced,
            "world_size": self.world_size,
            "parameters": self.parameters,
            "device": self.device,
            "chosen": dict(self.chosen),
            "forecast": _rounded(self.forecast),
            "measured": _rounded(self.measured),
            "difference": _rounded(self.difference),
            "notes": notes,
        }

    def _rows(self) -> list[dict[str, Any]]:
        """Every figure that was measured, beside its forecast."""
        return [
            _rounded({"figure": name, "measured": value, "forecast": expected, "difference": difference})
            for name, value, expected, difference in _compared(self.measured, self.forecast)
        ]

    def text(self) -> str:
        mesh = " × ".join(f"{name} {size}" for name, size in self.chosen["mesh"].items() if size > 1)
        accumulation = describe_accumulation(self.chosen["grad_accum_steps"])
        batch = f"micro-batch {self.chosen['micro_batch']}, {accumulation}"
        how = f"{self.chosen['strategy']}{f' ({mesh})' if mesh else ''}, {batch}"
        lines = [] if self.steps is None else [self.steps.text()]
        lines.append(f"rank 0 of {self.world_size} × {self.device}: {how}")
        lines.append("")
        lines.append(f"{'':32} {'forecast':>12} {'measured':>12} {'difference':>10}")
        difference = self.difference
        for key, name in (
            ("allocated_gib", "memory allocated, GiB"),
            ("reserved_gib", "memory reserved, GiB"),
            ("tokens_per_second", "tokens/s, compute only"),
        ):
            if key in self.measured and key in self.forecast:
                lines.append(_row(name, self.forecast[key], self.measured[key], difference.get(key)))
        for group, title in (
            ("terms", "memory by term at: " + str(self.measured.get("terms_at"))),
            ("moments", "peak of each part of the step"),
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
    """Trace rank 0 of `world_size` on fake tensors: memory only, for any model on any machine."""
    with temporary_folder("shoal-bench-") as folder:
        described, result = folder / "config.yaml", folder / "traced.json"
        described.write_text(config_to_yaml(config))
        command = [sys.executable, "-m", "shoal.bench.trace_worker", str(described), str(result)]
        command += ["--world", str(world_size)]
        with (
            tempfile.TemporaryFile("w+") as output,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=output, text=True) as process,
        ):
            assert process.stdout is not None
            for line in process.stdout:
                report(line.rstrip())
            if process.wait():
                output.seek(0)
                message = output.read().strip()
                if process.returncode == MISTAKE:
                    raise UserMistake(last_sentence(message))
                raise RunFailed(f"The traced step failed: {last_sentence(message)}")
        found = json.loads(result.read_text())
    return RankReport(traced=True, world_size=world_size, config=config_values(config), **found)


def report_steps(steps: Steps, forecast: Mapping[str, Any] | None) -> RankReport:
    """The report of measured steps of one rank, with the forecast for its device: None on a CPU."""
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
        config=steps.config,
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


def _compared(
    measured: Mapping[str, Any], forecast: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, float, float | None, float | None]]:
    """(figure, measured, forecast, measured / forecast − 1); those of a group have its name before theirs."""
    for key, value in measured.items():
        expected = forecast.get(key)
        if isinstance(value, Mapping):
            yield from _compared(value, expected if isinstance(expected, Mapping) else {}, f"{prefix}{key}.")
        elif isinstance(value, int | float):
            known = expected if isinstance(expected, int | float) else None
            yield prefix + key, value, known, value / known - 1 if known else None


def _deviation(name: str, share: float) -> str:
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
