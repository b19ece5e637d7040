"""Forecast against traced memory, term by term: `python benchmarks/plan/traced.py` writes traced.json and traced.md.

No GPU is needed: a run is one step of the training code on fake tensors (`shoal bench rank --traced`). All runs take
five to fifteen minutes on two cores; with names as arguments only those run, and nothing is written.
"""

import json
import sys
import time
from pathlib import Path

from shoal.api import config_from_mapping
from shoal.bench.rank import trace_rank

HERE = Path(__file__).parent
LENGTH = 4096
# name: (ranks, shape, global batch, overrides)
RUNS: dict[str, tuple[int, str, int, dict[str, object]]] = {
    "1B, single, no accumulation": (1, "llama3.2-1b", 1, {}),
    "1B, ddp": (8, "llama3.2-1b", 8, {"parallel.strategy": "ddp"}),
    "1B, zero1, 2 micro-batches": (8, "llama3.2-1b", 16, {"parallel.strategy": "zero1"}),
    "Pythia-1B, fsdp": (8, "pythia-1b", 8, {"parallel.strategy": "fsdp", "data.max_length": 2048}),
    "7B, fsdp": (8, "llama2-7b", 8, {"parallel.strategy": "fsdp"}),
    "8B, fsdp, selective": (8, "llama3-8b", 8, {"parallel.strategy": "fsdp", "train.recompute": "selective"}),
    "8B, fsdp, full": (8, "llama3-8b", 8, {"parallel.strategy": "fsdp", "train.recompute": "full"}),
    "8B, fsdp, adamw8bit": (8, "llama3-8b", 8, {"parallel.strategy": "fsdp", "train.optimizer.name": "adamw8bit"}),
    "8B, zero2, 2 micro-batches": (8, "llama3-8b", 16, {"parallel.strategy": "zero2"}),
    "8B, hybrid": (16, "llama3-8b", 16, {"parallel.strategy": "fsdp", "parallel.sharding": "hybrid_shard"}),
    "8B, fsdp × tp 2": (8, "llama3-8b", 4, {"parallel.strategy": "fsdp", "parallel.tp": 2}),
    "8B, fsdp × cp 2": (8, "llama3-8b", 4, {"parallel.strategy": "fsdp", "parallel.cp": 2}),
    "70B, fsdp, full": (64, "llama3-70b", 64, {"parallel.strategy": "fsdp", "train.recompute": "full"}),
    "405B, fsdp × tp 8, full": (
        512,
        "llama3.1-405b",
        64,
        {"parallel.strategy": "fsdp", "parallel.tp": 8, "train.recompute": "full"},
    ),
}


def main() -> None:
    wanted = sys.argv[1:] or list(RUNS)
    rows = {}
    for name in wanted:
        ranks, shape, batch, overrides = RUNS[name]
        began = time.perf_counter()
        found = trace_rank(config_from_mapping(settings(shape, batch, overrides)), ranks).as_dict()
        rows[name] = {"ranks": ranks, "seconds": round(time.perf_counter() - began, 1), **found}
        print(name, rows[name]["seconds"], "s", found["difference"].get("allocated_gib"), found["notes"], flush=True)
    text = table(rows)
    print(text)
    if wanted == list(RUNS):
        (HERE / "traced.json").write_text(json.dumps(rows, indent=1) + "\n")
        (HERE / "traced.md").write_text(text)


def settings(shape: str, batch: int, overrides: dict[str, object]) -> dict[str, object]:
    found: dict[str, dict[str, object]] = {
        "model": {"shape": shape, "tokenizer": "bytes"},
        "data": {"source": "text", "path": "none.txt", "max_length": LENGTH},
        "train": {"global_batch": batch, "micro_batch": 1},
        "hardware": {"gpu": "h100-80gb"},
    }
    for key, value in overrides.items():
        block, *path = key.split(".")
        section = found.setdefault(block, {})
        for part in path[:-1]:
            section = section.setdefault(part, {})  # type: ignore[assignment]
        section[path[-1]] = value
    return dict(found)


def table(rows: dict[str, dict]) -> str:
    """Forecast → traced in GiB: the total, and the terms at the peak of the trace."""
    terms = list(next(iter(rows.values()))["forecast"]["terms"])
    lines = [
        "| run | ranks | peak at | allocated | " + " | ".join(terms) + " |",
        "| --- | --- | --- | --- |" + " --- |" * len(terms),
    ]
    for name, row in rows.items():
        forecast, measured = row["forecast"], row["measured"]
        share = row["difference"]["allocated_gib"]
        cells = [_cell(forecast["terms"][term], measured["terms"][term]) for term in terms]
        total = f"{_cell(forecast['allocated_gib'], measured['allocated_gib'])} ({share:+.1%})"
        lines.append(f"| {name} | {row['ranks']} | {measured['peak_at']} | {total} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(forecast: float, measured: float) -> str:
    return "" if max(forecast, measured) < 0.005 else f"{forecast:.2f} → {measured:.2f}"


if __name__ == "__main__":
    main()
