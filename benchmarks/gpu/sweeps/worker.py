"""`python -m sweeps.worker TASK RESULTS`: train a few steps of several rows in this process, which imports torch once.

Every row is a run of the real training loop, as in `shoal bench train`. Between rows all memory is freed; if some
remains, or a row fails, the process ends, and `sweep.py` starts another for the other rows.
"""

import gc
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from peers.machine import timestamp
from peers.sequences import text_data

from shoal.bench.steps import only_measuring
from shoal.launch.run import start
from shoal.mistakes import UserMistake
from shoal.observe.metrics import Line
from shoal.parallel.device import inspect_device
from shoal.train.hooks import Hook, LogInterval, RunStart
from sweeps.folders import FOLDERS, with_weights
from sweeps.forecast import H200, PAIRS, forecast, forecast_figures, make_config
from sweeps.rows import ROWS, SEED, Row, count_steps

# More than this left after a row would be counted in the next one.
LEFT_GIB = 0.05
# Seconds until the first step of a typical row.
STARTUP = 12.0
MESSAGE = 1500


class Recorder(Hook):
    """Keeps the log lines, and the forecast that training itself has made."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.forecast: dict[str, float] = {}

    def on_run_start(self, start: RunStart) -> None:
        self.forecast = forecast_figures(start.resolved)

    def on_metrics(self, line: Line, interval: LogInterval) -> None:
        self.lines.append(line)


def main(task_file: str, results_file: str) -> None:
    task = json.loads(Path(task_file).read_text())
    by_name = {row.name: row for row in ROWS}
    work, machine = Path(task["work"]), describe()
    for name in task["rows"]:
        row = by_name[name]
        left = task["until"] - time.time()
        if left < expected_seconds(row, tiny=task["tiny"]):
            continue  # a shorter row may still fit
        Path(task["current"]).write_text(name)
        record = measure(row, work, machine, tiny=task["tiny"])
        with Path(results_file).open("a") as results:
            results.write(json.dumps(record) + "\n")
        if record["status"].startswith("failed") or clean() > LEFT_GIB:
            break


def expected_seconds(row: Row, *, tiny: bool) -> float:
    if tiny:
        return 0.0
    seconds = forecast(row.values(), H200).speed.step_seconds
    return STARTUP + sum(count_steps(seconds)) * seconds


def measure(row: Row, work: Path, machine: dict[str, Any], *, tiny: bool) -> dict[str, Any]:
    """The record of a row; a failure is recorded too."""
    values, began, recorder = row.values(tiny=tiny), time.perf_counter(), Recorder()
    warmup, steps = count_steps(forecast(values, machine).speed.step_seconds, tiny=tiny)
    record = {
        **row.as_dict(tiny=tiny),
        "machine": machine,
        "measured_at": timestamp(),
        "warmup": warmup,
        "steps": steps,
        "left_gib": round(clean(), 4),
    }
    data = text_data(work, values["data.max_length"])
    if values.get("train.objective") in PAIRS:
        data = preference_data(work, values["data.max_length"])
    # A run of its own: one that replaces another would keep its folder.
    runs = tempfile.mkdtemp(prefix="runs-", dir=work)
    more = {"seed": SEED, "train.schedule.name": "constant", "train.schedule.warmup": 0}
    more |= {f"data.{key}": value for key, value in data.items()}
    try:
        if row.shape in FOLDERS:
            more["model.from"] = str(with_weights(row.shape, work / row.shape, tiny=tiny))
        config = only_measuring(make_config(values, **more), warmup + steps)
        start(config, runs=Path(runs), hooks=[recorder])
        record |= {"status": "measured", "measured": figures(recorder.lines[warmup:]), "forecast": recorder.forecast}
    except UserMistake as mistake:
        record["status"] = f"refused: {mistake}"
    except Exception as error:
        record["status"] = f"failed: {type(error).__name__}: {error}"[:MESSAGE]
    return {**record, "seconds": round(time.perf_counter() - began, 1)}


def preference_data(work: Path, length: int) -> dict[str, Any]:
    """The `data` block of a config for pairs of answers that are truncated, so that every sequence is full."""
    path = work / f"pairs-{length}.jsonl"
    if not path.exists():
        # An answer of white space alone is refused.
        text = "".join(Path(text_data(work, length)["path"]).read_text("ascii").split())
        with path.open("w") as file:
            for start in range(0, min(len(text) - 3 * length, 2000 * length), length):
                middle, end = start + length, start + 2 * length
                pair = {"prompt": text[start : start + 8], "chosen": text[start:middle], "rejected": text[middle:end]}
                file.write(json.dumps(pair) + "\n")
    return {"source": "json", "path": str(path), "format": "preference", "max_length": length, "validation": 0}


def figures(lines: list[Line]) -> dict[str, Any]:
    """The measurements of `shoal bench train`."""
    return {
        "allocated_gib": lines[-1]["memory_gib"],
        "reserved_gib": lines[-1]["reserved_gib"],
        "tokens_per_second": round(statistics.median(line["tokens_per_second"] for line in lines), 1),
        "step_seconds": [line["seconds"] for line in lines],
        "data_seconds": statistics.median(line["data_seconds"] for line in lines),
        "mfu": statistics.median(line["mfu"] or 0.0 for line in lines),
        "loss": lines[-1]["loss"],
    }


def clean() -> float:
    """Free what the last row has left. Returns the GiB that are still allocated."""
    torch.compiler.reset()
    for _ in range(2):  # objects whose finalizers hold others
        gc.collect()
    if not torch.cuda.is_available():
        return 0.0
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated() / 2**30


def describe() -> dict[str, Any]:
    """The device; on a CPU, where only `--tiny` runs, the forecast is for an H200."""
    found = H200
    if torch.cuda.is_available():
        device = inspect_device(torch.device("cuda", 0))
        found = {"gpu": device.name, "memory_gib": device.memory_gib}
    return {**found, "torch": torch.__version__}


if __name__ == "__main__":
    main(*sys.argv[1:])
