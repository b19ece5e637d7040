"""A run as its files tell it: metrics, events and plan. Reads only, also while the run goes on, and without torch."""

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.observe.curve import Point, thinned
from shoal.observe.events import EVENTS, FAULT, RESTART, SAVE, START, WARNING
from shoal.observe.json_lines import GrowingLines
from shoal.observe.progress import Trend, waits
from shoal.observe.run_reader import kept_lines

CURVES = ("loss", "eval_loss", "tokens_per_second", "samples_per_second", "lr", "grad_norm")
POINTS = 400  # of a curve
SHOWN = 20  # newest events of a kind


@dataclass
class RunView:
    """What is known of a run. `refresh` reads what was added to its files."""

    run: Path
    lines: dict[int, dict[str, Any]] = field(default_factory=dict)  # step → its last training line
    evaluations: dict[int, dict[str, Any]] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    plan: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._metrics, self._happened = GrowingLines(self.run / "metrics.jsonl"), GrowingLines(self.run / EVENTS)
        self.refresh()

    def refresh(self) -> None:
        training, evaluations = kept_lines(self._metrics.read())
        self.lines = {line["step"]: line for line in training}
        self.evaluations = {line["step"]: line for line in evaluations}
        self.events = [one for one in self._happened.read() if isinstance(one.get("event"), str)]
        with suppress(OSError, ValueError):
            found = json.loads((self.run / "plan.json").read_text())
            self.plan = found if isinstance(found, dict) else {}

    @property
    def newest(self) -> dict[str, Any]:
        return self.lines[next(reversed(self.lines))] if self.lines else {}

    @property
    def steps(self) -> int | None:
        found = self.plan.get("steps")
        return found if isinstance(found, int) else None

    @property
    def trend(self) -> str:
        trend, arrow = Trend(), ""
        for line in list(self.lines.values())[-30:]:
            arrow = trend.after(line.get("loss"))
        return arrow

    @property
    def seconds_left(self) -> float | None:
        seconds, step = self.newest.get("seconds"), self.newest.get("step")
        if self.steps is None or seconds is None or step is None:
            return None
        return float((seconds + (self.newest.get("save_seconds") or 0)) * max(0, self.steps - step))

    def curve(self, name: str) -> list[Point]:
        lines = self.evaluations if name.startswith("eval_") else self.lines
        return [(step, line[name]) for step, line in lines.items() if isinstance(line.get(name), int | float)]

    def of_kind(self, *kinds: str) -> list[dict[str, Any]]:
        return [one for one in self.events if one["event"] in kinds]

    def as_dict(self, status: Mapping[str, Any]) -> dict[str, Any]:
        """For `--json`; `status` is what `shoal status` tells."""
        newest = self.newest
        last_evaluation = next(reversed(self.evaluations.values()), {})
        return {
            **status,
            **{name: newest.get(name) for name in ("step", "loss", "grad_norm", "lr", "tokens", "tokens_per_second")},
            **{name: newest.get(name) for name in ("samples", "samples_per_second")},
            **{name: newest.get(name) for name in ("mfu", "memory_gib", "memory_total_gib", "seconds", "skipped")},
            **{name: newest.get(name) for name in ("gpu_utilization", "power_watts", "temperature_celsius")},
            "attempt": newest.get("attempt"),
            "trend": {"↓": "falling", "↑": "rising", "→": "flat"}.get(self.trend),
            "eval_loss": last_evaluation.get("eval_loss"),
            "waits": {name: round(share, 4) for name, share in waits(newest).items()},
            "seconds_left": self.seconds_left,
            "seconds_since_last_line": round(time.time() - newest["time"], 1) if "time" in newest else None,
            "starts": len(self.of_kind(START)),
            "saves": self.of_kind(SAVE)[-SHOWN:],
            "faults": self.of_kind(FAULT)[-SHOWN:],
            "restarts": self.of_kind(RESTART)[-SHOWN:],
            "warnings": self.of_kind(WARNING)[-SHOWN:],
            "curves": {name: [list(point) for point in thinned(self.curve(name), POINTS)] for name in CURVES},
        }
