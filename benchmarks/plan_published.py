"""Results that others published, and the forecast's error on them, by source and by kind of training.

python benchmarks/plan_published.py [--held-out] [--source NAME]

The rows are `plan/published/rows.jsonl`, their sources `sources.json`, and models that the catalogue does not have
`models.json`. A row whose system is NAME@YEAR-MONTH is forecast as the command would with `--like` (and `--trait`, for
its traits); the systems of the others are in `nearest/`. Some sources are held out: no constant and no trait may be
chosen with them in view, and their error is computed only with `--held-out`.
"""

import argparse
import json
import math
import re
import statistics
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from nearest import NEAREST
from plan_accuracy import TRAITS
from published_config import asked

from shoal.catalogue.gpus import GPUS, LINKS, Link
from shoal.catalogue.optimizers import OPTIMIZERS
from shoal.catalogue.shapes import NAMED, ModelShape, block_matrices
from shoal.config.mesh import Mesh
from shoal.mistakes import UserMistake
from shoal.plan.machine import usual_network
from shoal.plan.memory.forecast import forecast_memory
from shoal.plan.run.run import FROZEN, Adapter, Run, Trained
from shoal.plan.speed.forecast import forecast_speed
from shoal.plan.systems.earlier import (
    BUCKET_ALL_REDUCE,
    DUMMY_GRADIENTS,
    FP32_ADAPTERS,
    FUSED_ADAMW,
    FUSED_RMS_NORM,
    HOPPER_WHEELS,
    MASK_BUFFERS,
    NEW_WHEELS,
    NOT_REENTRANT,
    WIDE_ROTARY,
    litgpt_of,
)
from shoal.plan.terms import GIB

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks" / "plan" / "published"
# Share of a device's peak that no training reaches.
POSSIBLE = 0.9
UNITS = {"GiB": 1.0, "GB": 1e9 / GIB, "MiB": 1 / 1024}
# Versions of PyTorch whose wheels have the CUDA libraries of 2024.
HOPPER_VERSIONS = re.compile(r"orch 2\.[567]\b")
# Systems without traits of a time that use the model's own activation checkpointing.
MODEL_CHECKPOINTS = {
    *("deepspeed", "deepspeed-balanced", "deepspeed-qwen"),
    *("huggingface", "huggingface-bf16", "huggingface-foreach", "huggingface-2022"),
}
# Whose results are of containers or builds with the libraries of their day.
CONTAINERS = {
    *(
        "bert-apex",
        "bert-apex-pretraining",
        "flagscale",
        "llama3",
        "llm.c",
        "maxtext",
        "megatron",
        "megatron-0.6",
        "megatron-overlapped",
        "nemo",
    ),
    *("nemo-flash2", "nemo-graphs", "nemo-plain", "pax"),
}
# Keys of a row that describe the run and are fields of `Run`, under the same name.
SETTINGS = {one.name for one in fields(Run)} - {"gpu", "link", "network", "mesh", "adapter", "traits", "devices"}
# What `Run.recompute` may be besides a number; single parts are `recomputed_parts`.
RECOMPUTE = {"none", "cheap", "selective", "full", "offload", "offload-all", "parts"}
# Keys that say where a figure comes from, or that `_run` reads.
OTHERS = {
    *("source", "system", "model", "gpu", "gpus", "per_node", "mesh", "sequence", "accum", "adapter", "network"),
    *("link", "traits", "layers", "experts"),
    *("memory", "tokens_per_second_per_gpu", "unknown", "date"),
    *("not_counted", "memory_not_counted"),
}


@dataclass(frozen=True)
class Published:
    """One row: a run that somebody published, with its memory or its speed."""

    source: str
    label: str
    kind: str  # full, LoRA, QLoRA
    run: Run | None  # None: the forecast cannot describe it
    gib: float | None
    memory_kind: str  # allocated, reserved, device (with the CUDA context)
    tokens: float | None  # per second and GPU
    unknown: str
    unsaid: tuple[str, ...]  # what of the run the forecast cannot say
    not_counted: str = ""  # why its speed says nothing about the forecast
    memory_not_counted: str = ""  # and its memory

    def with_run(self, run: Run) -> "Published":
        return replace(self, run=run)


@dataclass(frozen=True)
class Figure:
    """One figure with its forecast."""

    row: Published
    what: str  # memory, speed
    published: float
    forecast: float

    @property
    def error(self) -> float:
        return self.forecast / self.published - 1


@cache
def sources() -> dict[str, dict[str, Any]]:
    """Address, date and versions of every source, and whether it is held out."""
    found: dict[str, dict[str, Any]] = json.loads((FOLDER / "sources.json").read_text())
    return found


def read_published(*, held_out: bool = False) -> list[Published]:
    """The rows of the sources that are held out, or of those that are not."""
    models = json.loads((FOLDER / "models.json").read_text())
    return [read_row(one, models) for one in rows_of(held_out=held_out)]


def rows_of(*, held_out: bool = False) -> list[dict[str, Any]]:
    """The lines of `rows.jsonl`, of the same sources."""
    found = [json.loads(line) for line in (FOLDER / "rows.jsonl").read_text().splitlines()]
    return [one for one in found if sources()[one["source"]]["held_out"] is held_out]


def read_measured(path: Path) -> list[Published]:
    """Runs of other systems that were measured here, as `benchmarks/gpu/trainer_runs.py` writes them: the same rows."""
    return read_lines([json.loads(line) for line in path.read_text().splitlines()])


def read_lines(lines: list[dict[str, Any]]) -> list[Published]:
    """Such runs, of models that the catalogue has."""
    return [read_row({key: one[key] for key in one if key != "allocated_gib"}, {}) for one in lines]


def read_row(line: dict[str, Any], models: dict[str, Any]) -> Published:
    adapter = line.get("adapter")
    kind = "full" if adapter is None else "QLoRA" if adapter.get("quantize") else "LoRA"
    unsaid = [key for key in line if key not in SETTINGS | OTHERS]
    run: Run | None = None
    if "@" in line["system"]:
        try:
            run, unsaid = asked(line, models, line["system"]), []
        except UserMistake as mistake:
            unsaid = [str(mistake)]
    elif line["gpu"] not in GPUS:
        unsaid.append(line["gpu"])
    elif line.get("optimizer", "adamw") not in OPTIMIZERS:
        unsaid.append(line["optimizer"])
    else:
        shape = NAMED[line["model"]] if line["model"] in NAMED else ModelShape(**models[line["model"]])
        shape = replace(shape, layers=line.get("layers", shape.layers))
        run = _run(line, shape)
    value, unit, memory_kind = line.get("memory", (math.nan, "GiB", ""))
    mesh = " ".join(f"{axis}{degree}" for axis, degree in line["mesh"].items() if degree > 1)
    extra = [kind] if kind != "full" else []
    extra += [str(line[key]) for key in ("optimizer", "offload") if key in line]
    label = (
        f"{line['system']} {line['model']} {' '.join(extra)}, {line['gpus']} × {line['gpu']}, {line['strategy']} "
        f"{mesh}, {line['micro_batch']} × {line['sequence']} × {line['accum']}, recompute {line['recompute']}, "
        f"{line['precision']}"
    )
    return Published(
        line["source"],
        " ".join(label.split()).replace(" ,", ","),
        kind,
        run,
        None if math.isnan(value) else value * UNITS[unit],
        memory_kind,
        line.get("tokens_per_second_per_gpu"),
        line["unknown"],
        tuple(unsaid),
        line.get("not_counted", "") or (_impossible(run, line) if run is not None else ""),
        line.get("memory_not_counted", ""),
    )


def _impossible(run: Run, line: dict[str, Any]) -> str:
    """A sentence if the published speed is more than the device's peak: then something else than stated was run."""
    blocks = run.shape.layers * block_matrices(run.shape)
    head = run.shape.vocab * run.shape.hidden * run.head_share
    needed = 4 * (blocks + head) + 2 * (blocks + head) * (run.adapter is None)
    needed += 2 * blocks * (run.recompute == "full")
    peak = run.gpu.fp8 if run.precision == "fp8" else run.peak
    share = line.get("tokens_per_second_per_gpu", 0.0) * needed / (peak or run.peak)
    return f"matmuls alone would need {share:.2f} of the device's peak" if share > POSSIBLE else ""


def _run(line: dict[str, Any], shape: ModelShape) -> Run:
    gpu = GPUS[line["gpu"]]
    if line["system"] in ("litgpt", "thunder"):
        shape = replace(shape, tied=False)  # its models have a head of their own
    network = LINKS[usual_network(gpu)]
    if "network" in line:
        name, latency = ("ethernet", 50e-6) if line["network"].get("tcp") else ("given", 10e-6)
        network = Link(name, line["network"]["gb_per_second"] * 1e9, latency)
    traits = TRAITS.get(line["system"]) or NEAREST[line["system"]]
    traits = replace(traits, software=_year(line))
    adapter = None
    plain = line["precision"] == "bf16-true" and not (line.get("adapter") or {}).get("quantize")
    if traits.peft and plain and year_and_month(line) < FP32_ADAPTERS:
        traits = replace(traits, narrow_adapters=True)
    if line["system"] in ("huggingface", "huggingface-bf16") and year_and_month(line) < FUSED_ADAMW:
        traits = replace(traits, foreach_step=True)
    if line["system"] == "torchtune":  # 0.6.1 and before, whatever their date
        traits = replace(traits, chunks="upcast")
    if line["system"] == "litgpt":
        traits = replace(traits, **litgpt_of(year_and_month(line)))
    if line["system"] == "torchtitan-2025" and year_and_month(line) < FUSED_RMS_NORM:
        traits = replace(traits, unfused_norms=True)
    if year_and_month(line) < DUMMY_GRADIENTS:
        traits = replace(traits, dummy_gradients=False)
    if traits.bucket_elements and year_and_month(line) < BUCKET_ALL_REDUCE:
        traits = replace(traits, all_reduces=False)
    held = line.get("adapter") is not None and line["strategy"] in ("fsdp", "zero3")
    if line["system"] in MODEL_CHECKPOINTS and year_and_month(line) < NOT_REENTRANT and not held:
        traits = replace(traits, reentrant=True)
    if line["system"] in {*MODEL_CHECKPOINTS, "transformers-no-loss"}:
        buffers = year_and_month(line) < MASK_BUFFERS.get(shape.model_type, (0, 0))
        traits = replace(traits, mask_buffers=buffers, wide_rotary=year_and_month(line) < WIDE_ROTARY)
    if line.get("adapter") is not None:
        given = dict(line["adapter"])
        adapter = Adapter(given.pop("rank"), tuple(given.pop("targets")), **given)
    traits = replace(traits, **line.get("traits", {}))
    settings = {
        key: tuple(value) if isinstance(value, list) else value  # a run is a key of a cache
        for key, value in line.items()
        if key in SETTINGS and key not in OTHERS
    }
    narrow = line["precision"] == "bf16-true" or traits.narrow_weights
    assert line["recompute"] in RECOMPUTE or isinstance(line["recompute"], int), line
    return Run(
        **{
            **settings,
            "shape": shape,
            "gpu": gpu,
            "link": _link(line.get("link", gpu.link)),
            "network": network,
            "length": line["sequence"],
            "devices": line["per_node"],
            "mesh": Mesh(**line["mesh"]),
            "grad_accum_steps": line["accum"],
            "reduce_bytes": 2 if narrow or traits.masters_with_optimizer else 4,
            "adapter": adapter,
            "trained": Trained() if adapter is None else FROZEN,
            "traits": traits,
        }
    )


def _link(given: str | dict[str, float]) -> Link:
    """The link between the devices of a node by its name, or PCI Express as fast as the source says that it is."""
    return LINKS[given] if isinstance(given, str) else Link("pcie-given", given["gb_per_second"] * 1e9, 10e-6)


def _year(line: dict[str, Any]) -> int:
    """The year of a row's libraries, by its own date, such as 24.09, or that of its source, or by the version of
    PyTorch that this names."""
    year, month = year_and_month(line)
    if line["system"] in CONTAINERS:
        return year
    if (year, month) < NEW_WHEELS:
        return 2023 if year == 2024 else year
    versions = sources().get(line["source"], {}).get("versions", "")
    if GPUS[line["gpu"]].compute_capability != (9, 0) or "NGC" in versions or line["system"].startswith("torchtitan"):
        return year
    earlier = HOPPER_VERSIONS.search(versions) if "orch 2." in versions else (year, month) < HOPPER_WHEELS
    return 2024 if earlier else year


def year_and_month(line: dict[str, Any]) -> tuple[int, int]:
    """Year and month of a row, by its own date or that of its source."""
    date = f"20{line['date']}" if "date" in line else sources()[line["source"]]["date"]
    return int(date[:4]), int(date[5:7] or 1)


def compare(rows: list[Published], *, all_counted: bool = False) -> list[Figure]:
    """Every figure that the forecast can say something about; `all_counted`: also those that are not counted."""
    found = []
    for row in rows:
        if row.run is None:
            continue
        if row.gib is not None and (all_counted or not row.memory_not_counted):
            memory = forecast_memory(row.run)
            of_kind = {
                "allocated": memory.allocated,
                "reserved": memory.reserved,
                "device": memory.reserved + memory.context,
            }
            found.append(Figure(row, "memory", row.gib, of_kind[row.memory_kind] / GIB))
        if row.tokens is not None and (all_counted or not row.not_counted):
            found.append(Figure(row, "speed", row.tokens, forecast_speed(row.run).tokens_per_second_per_gpu))
    return found


def errors(figures: list[Figure]) -> tuple[float, float, float]:
    """(median, 90th percentile, bias)."""
    return spread([one.error for one in figures])


def spread(found: list[float]) -> tuple[float, float, float]:
    """The same of errors."""
    sizes = sorted(abs(error) for error in found)
    worst = sizes[min(len(sizes) - 1, math.ceil(0.9 * len(sizes)) - 1)]
    return statistics.median(sizes), worst, statistics.median(found)


def print_errors(name: str, figures: list[Figure]) -> None:
    cells = [name.ljust(34)]
    for what in ("memory", "speed"):
        some = [one for one in figures if one.what == what]
        if not some:
            cells.append(" " * 44)
            continue
        median, ninety, bias = errors(some)
        cells.append(f"{what} {len(some):4}: {median:5.0%} median {ninety:5.0%} 90% {bias:+5.0%} bias")
    print("  ".join(cells))


def main() -> None:
    parser = argparse.ArgumentParser(description="The forecast's error on published results.")
    parser.add_argument("--held-out", action="store_true", help="only the sources that are kept aside")
    parser.add_argument("--source", help="every row of one source")
    arguments = parser.parse_args()
    rows = read_published(held_out=arguments.held_out)
    figures = compare(rows)
    if arguments.source:
        for one in sorted(
            (each for each in figures if each.row.source == arguments.source), key=lambda e: -abs(e.error)
        ):
            print(f"{one.error:+5.0%} {one.what} {one.published:9.1f} → {one.forecast:9.1f}  {one.row.label}")
        return
    print_errors("all", figures)
    for kind in ("full", "LoRA", "QLoRA"):
        print_errors(kind, [one for one in figures if one.row.kind == kind])
    for name in sources():
        some = [one for one in figures if one.row.source == name]
        if some:
            print_errors(name, some)
    unsaid = {one for row in rows for one in row.unsaid}
    for what in sorted(unsaid):
        print(f"cannot say: {what} in {sum(what in row.unsaid for row in rows)} rows")


if __name__ == "__main__":
    main()
