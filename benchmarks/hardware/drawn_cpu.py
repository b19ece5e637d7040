"""Runs drawn at random, forecast for a CPU that `shoal bench hardware` has just measured, and then trained.

    python benchmarks/hardware/drawn_cpu.py OUTPUT.jsonl [--runs 24] [--seed 1]
    python benchmarks/hardware/drawn_cpu.py OUTPUT.jsonl --runs 0                 # what those in OUTPUT are off by

What the measurement of a device is worth where little else is known of it. The runs of seed 1 were in view: the size of
the tensor that is copied on a CPU was 4 MiB, and became 64 MiB because their first three were forecast 2.9 to 5.6 times
as fast as they are. Those of seed 2 were drawn after everything. The machine is measured again before every run,
because virtual machines change their speed.
"""

import argparse
import json
import math
import random
import statistics
from pathlib import Path
from typing import Any

from shoal import api
from shoal.bench.hardware import measure_hardware

ROOT = Path(__file__).parents[2]
# Of a step, so that a run takes seconds.
MOST_FLOPS = 0.6e12


def draw(chance: random.Random) -> dict[str, Any]:
    """A config, with one or two processes."""
    while True:
        head = chance.choice([16, 32, 64])
        heads = chance.choice([2, 4, 8, 12])
        shape: dict[str, Any] = {
            "family": chance.choice(["llama", "llama", "qwen3", "gpt2", "neox"]),
            "hidden": head * heads,
            "heads": heads,
            "layers": chance.randint(2, 10),
            "vocab": chance.choice([260, 1024, 8192, 32000]),
            "positions": 1024,
            "tied": chance.random() < 0.5,
        }
        length, micro = chance.choice([64, 128, 256, 512, 1024]), chance.choice([1, 2, 4, 8, 16])
        accumulation, devices = chance.choice([1, 1, 2, 4]), chance.choice([1, 1, 2])
        parameters = 12 * shape["layers"] * shape["hidden"] ** 2 + shape["vocab"] * shape["hidden"]
        if 6 * parameters * length * micro * accumulation * devices < MOST_FLOPS:
            break
    return {
        "name": "drawn",
        "model": {"shape": shape, "tokenizer": "bytes"},
        "data": {"source": "text", "path": str(ROOT / "src/shoal/**/*.py"), "max_length": length, "pack": True},
        "train": {
            "steps": 100,
            "micro_batch": micro,
            "global_batch": micro * accumulation * devices,
            "precision": "32-true",
            "recompute": chance.choice(["none", "none", "full"]),
        },
        "parallel": {"strategy": chance.choice(["ddp", "fsdp"]) if devices > 1 else "single"},
        "hardware": {"devices": devices},
    }


def summarize(output: Path) -> None:
    """Prints the median and the 90th percentile of the errors with and without what was measured."""
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    for name in ("forecast", "forecast_without"):
        errors = sorted(abs(row[name] / row["tokens_per_second"] - 1) for row in rows)
        ninety = errors[math.ceil(0.9 * len(errors)) - 1]
        print(f"{name}: {len(errors)} runs, {statistics.median(errors):.0%} and {ninety:.0%}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs drawn at random on a CPU that was measured.")
    parser.add_argument("output", type=Path)
    parser.add_argument("--runs", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    chance = random.Random(given.seed)
    for _ in range(given.runs):
        config = draw(chance)
        found = measure_hardware(devices=config["hardware"]["devices"], output=None, report=lambda _: None)
        measured = {**config, "hardware": {**config["hardware"], **found.block}}
        usual = {**config, "hardware": {**config["hardware"], "gpu": "cpu"}}
        trained = api.bench_train(config, steps=10, warmup=4)
        forecast, without = (
            api.plan(one).as_dict()["speed"]["tokens_per_second_per_gpu"] * config["hardware"]["devices"]
            for one in (measured, usual)
        )
        row = {
            "config": {key: config[key] for key in ("model", "train", "parallel", "hardware")},
            "max_length": config["data"]["max_length"],
            "hardware": found.block,
            "tokens_per_second": trained.tokens_per_second,
            "forecast": round(forecast, 1),
            "forecast_without": round(without, 1),
        }
        with given.output.open("a") as file:
            file.write(json.dumps(row) + "\n")
        errors = [one / trained.tokens_per_second - 1 for one in (forecast, without)]
        print(f"{errors[0]:+.0%} ({errors[1]:+.0%}) {row['config']}", flush=True)
    summarize(given.output)


if __name__ == "__main__":
    main()
