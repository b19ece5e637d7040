"""Read committed results, and write figures as pages do."""

import json
import math
import re
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.pictures.forecast import gib as in_gib
from benchmarks.pictures.forecast import plan

ROOT = Path(__file__).parents[2]
# Words with {} for each figure, and the figures.
Line = tuple[str, list[str]]
# Results of benchmarks/gpu/speed.py, in benchmarks/gpu.
SPEED, SMALL = "speed_h200/speed", "small_h200/speed"
ADAPTERS, EARLIER = "adapters_h200/adapters", "adapters_h200/lora_and_hand_loop"


@cache
def result(path: str) -> Any:
    return json.loads((ROOT / path).read_text())


@cache
def json_lines(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ROOT / path).read_text().splitlines()]


@cache
def kernels(path: str) -> list[tuple[str, float]]:
    """Names of kernels and their milliseconds per step, in a list that a profile gave."""
    lines = re.findall(r"^ *([\d.]+) ms +[\d.]+x? +(.*)$", (ROOT / path).read_text(), re.MULTILINE)
    # A range of the profiler is no kernel: it is the sum of those inside.
    return [(name, float(milliseconds)) for milliseconds, name in lines if not name.startswith("Optimizer.step")]


def kernel_time(path: str, pattern: str) -> float:
    """Milliseconds per step of the kernels whose name matches."""
    return sum(milliseconds for name, milliseconds in kernels(path) if re.search(pattern, name))


def case(folder: str, name: str) -> dict[str, Any]:
    """One case of benchmarks/gpu/speed.py."""
    found: dict[str, Any] = result(f"benchmarks/gpu/{folder}.json")["cases"][name]
    return found


def count(value: float) -> str:
    return f"{value:,.0f}"


def thousands(value: float) -> str:
    return f"{value / 1000:.0f}"


def percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f}"


def within(share: float) -> str:
    """Per cent of a bound: rounded up."""
    return f"{math.ceil(1000 * share) / 10:.1f}"


def speed(name: str, folder: str = SPEED) -> str:
    return count(case(folder, name)["tokens_per_second"])


def gib(name: str, folder: str = SPEED) -> str:
    return f"{case(folder, name)['allocated_gib']:.1f}"


def mfu(name: str) -> str:
    return percent(case(SPEED, name)["mfu"])


def both(name: str, folder: str = SPEED) -> list[str]:
    return [speed(name, folder), gib(name, folder)]


def all_three(*names: str) -> list[str]:
    return [one for name in names for one in (speed(name), mfu(name), gib(name))]


def unsloth(name: str) -> list[str]:
    found = result("benchmarks/gpu/adapters_h200/unsloth.json")[name]
    return [count(found["tok_s"]), f"{found['peak_gib']:.1f}"]


def small(*names: str) -> list[str]:
    return [thousands(case(SMALL, name)["tokens_per_second"]) for name in names]


def legal(*names: str) -> list[str]:
    return [percent(result("benchmarks/chess/legal.json")[name]["legal_share"]) for name in names]


def restart() -> str:
    return f"{result('benchmarks/checkpoints/two_shared_cores.json')['restart']['kill_to_training_seconds']:.1f}"


def forecast(settings: str) -> list[str]:
    """Tokens per second and GiB by today's plan."""
    choice = plan(settings).choice
    return [count(choice.speed.tokens_per_second_per_gpu), f"{in_gib(choice.memory.worst.allocated):.1f}"]
