"""The forecast of a recorded run, by the code as it is now. Needs neither a GPU nor torch."""

from dataclasses import dataclass
from typing import Any

from shoal.config.load import config_from_mapping
from shoal.config.schema import Config
from shoal.plan.decide import choose
from shoal.plan.machine import machine_at_hand
from shoal.plan.models import read_shape
from shoal.plan.resolved import ResolvedRun
from shoal.plan.terms import GIB
from sweeps.folders import FOLDERS, described

# As the driver and PyTorch report it.
H200 = {"gpu": "NVIDIA H200", "memory_gib": 139.8}
PAIRS = ("dpo", "orpo")  # objectives that train on preferences
FIGURES = ("allocated_gib", "reserved_gib", "tokens_per_second")


def make_config(values: dict[str, Any], **more: Any) -> Config:
    """The config with these values by dotted key."""
    mapping: dict[str, Any] = {"name": "sweep", "model": {"tokenizer": "bytes"}, "data": {"validation": 0}}
    if (named := values.get("model.from")) in FOLDERS:
        more = {"model.from": str(described(named)), **more}
    for key, value in {**values, **more}.items():
        *blocks, last = key.split(".")
        inner = mapping
        for block in blocks:
            inner = inner.setdefault(block, {})
        inner[last] = value
    return config_from_mapping(mapping)


def forecast(values: dict[str, Any], machine: dict[str, Any]) -> ResolvedRun:
    """The run with these values on one device of this kind."""
    source = ("json", "pairs.jsonl") if values.get("train.objective") in PAIRS else ("text", "text.txt")
    config = make_config(values, **dict(zip(("data.source", "data.path"), source, strict=True)))
    return choose(config, read_shape(config.model), machine_at_hand(machine["gpu"], machine["memory_gib"], 1))


def forecast_figures(resolved: ResolvedRun) -> dict[str, float]:
    """What is compared with measurements."""
    memory, speed = resolved.memory, resolved.speed
    return {
        "allocated_gib": round(memory.allocated / GIB, 3),
        "reserved_gib": round(memory.reserved / GIB, 3),
        "tokens_per_second": round(speed.tokens_per_second_per_gpu, 1),
    }


@dataclass(frozen=True)
class Compared:
    """One figure of a measured row, with its forecast."""

    row: str
    figure: str
    measured: float
    forecast: float
    held_out: bool

    @property
    def error(self) -> float:
        """measured / forecast − 1: positive if the forecast is too low."""
        return self.measured / self.forecast - 1

    def within(self, memory: float, speed: float) -> bool:
        return abs(self.error) <= (speed if self.figure == "tokens_per_second" else memory)


def compare(records: list[dict[str, Any]], *, recorded: bool = False) -> list[Compared]:
    """Every figure of every measured row; with `recorded`, the forecast at the time of the measurement."""
    found = []
    for record in records:
        if record["status"] != "measured":
            continue
        expected = record["forecast"] if recorded else forecast_figures(forecast(record["config"], record["machine"]))
        for figure in FIGURES:
            if record["measured"][figure] is not None:
                compared = Compared(
                    record["row"], figure, record["measured"][figure], expected[figure], record["held_out"]
                )
                found.append(compared)
    return found


def outside(compared: list[Compared], *, memory: float = 0.05, speed: float = 0.10) -> list[Compared]:
    """The figures whose forecast is off by more than these bounds, worst first."""
    found = [one for one in compared if not one.within(memory, speed)]
    return sorted(found, key=lambda one: -abs(one.error))
