"""Runs of other systems that were measured on an H200, beside their forecast."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from shoal.plan.memory.forecast import forecast_memory
from shoal.plan.run.run import Run
from shoal.plan.terms import GIB

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@dataclass(frozen=True)
class Errors:
    """One run, with what its forecast is off by: forecast / measured - 1, without sign."""

    label: str
    run: Run
    allocated: float
    reserved: float
    speed: float


def errors_of(folder: str, monkeypatch: pytest.MonkeyPatch) -> list[Errors]:
    """Of the runs in `drawn.jsonl` of a folder of benchmarks/gpu."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    import plan_published as published

    path = BENCHMARKS / "gpu" / folder / "drawn.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found = []
    for row, line in zip(published.read_measured(path), lines, strict=True):
        assert row.run is not None, row.unsaid
        memory = forecast_memory(row.run)
        [speed] = [one for one in published.compare([row]) if one.what == "speed"]
        allocated = memory.allocated / GIB / line["allocated_gib"] - 1
        reserved = memory.reserved / GIB / line["memory"][0] - 1
        found.append(Errors(row.label, row.run, abs(allocated), abs(reserved), abs(speed.error)))
    return found
