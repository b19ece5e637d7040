"""Compares the forecast with published and measured results: a table, JSON and a scatter plot.

python benchmarks/plan_accuracy.py [OUTPUT_FOLDER]        (default: benchmarks/plan)
"""

import argparse
import csv
import json
import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal.catalogue.gpus import LINKS, find_gpu, recognize
from shoal.catalogue.shapes import NAMED, ModelShape
from shoal.config.mesh import Mesh
from shoal.plan.machine import usual_network
from shoal.plan.memory.forecast import forecast_memory
from shoal.plan.run.run import FROZEN, Adapter, Run, Trained
from shoal.plan.speed.forecast import forecast_speed
from shoal.plan.systems.modelled import DEEPSPEED, HUGGING_FACE, LITGPT, OURS, SYSTEMS, TORCHTITAN_2024, TORCHTITAN_2025
from shoal.plan.systems.traits import SystemTraits
from shoal.plan.terms import GIB, group

HERE = Path(__file__).parent
FILES = ("llama.csv", "mpt.csv", "llama_held_out.csv", "mpt_held_out.csv")
# The same code in another precision: autocast has nothing to cast with bf16 weights, but does with LitGPT's fp32 ones.
TRAITS: dict[str, SystemTraits] = {
    **SYSTEMS,
    "huggingface-bf16": replace(HUGGING_FACE, wide_residual_stream=False, casts_per_use=False, upcasts_shards=True),
    # Measured before the residual stream was in fp32; and earlier, before the optimizer step was one fused kernel.
    "shoal-narrow": replace(OURS, wide_residual_stream=False, separate_head_unit=False),
    "shoal-first": replace(OURS, wide_residual_stream=False, separate_head_unit=False, fused_step=False),
    # Of 2024, and with its asynchronous tensor parallelism, as the 405B rows of its tables are.
    "torchtitan": TORCHTITAN_2024,
    "torchtitan-async": replace(TORCHTITAN_2024, overlaps_tensor=True),
    "torchtitan-2025": TORCHTITAN_2025,
    # Before transformers 5, and DeepSpeed 0.17.2.
    "deepspeed": replace(DEEPSPEED, logit_bytes=14.0, late_bucket=False, tracks_hooks=False, checks_gradients=False),
    "litgpt-autocast": replace(LITGPT, wide_residual_stream=True, casts_per_use=True),
}
SHAPES = {"llama3-405b": "llama3.1-405b", "llama-8.03b": "llama3-8b", "llama-1.24b": "llama3.2-1b"}
RECOMPUTE: dict[str, str | int] = {
    "selective-op": "selective",
    "selective-layer": 2,
    "full": "full",
    "none": "none",
    "cheap": "cheap",
}
# Devices per node, if not eight.
DEVICES = {"kempnerforge": 4}


@dataclass(frozen=True)
class Row:
    """A published or measured result, and its run."""

    file: str
    label: str
    run: Run
    tokens: float | None  # per second and GPU
    gib: float | None
    reserved: bool
    faked: bool = False  # a single rank with fake collectives, which take no time

    @property
    def held_out(self) -> bool:
        return "held_out" in self.file

    def forecast_tokens(self) -> float:
        speed = forecast_speed(self.run)
        if self.faked:
            computed = [part for part in speed.step.parts if not part.name.startswith("communication")]
            speed = replace(speed, step=group("step", *computed))
        return speed.tokens_per_second_per_gpu

    def forecast_gib(self) -> float:
        memory = forecast_memory(self.run)
        return (memory.reserved if self.reserved else memory.allocated) / GIB


def read_rows(folder: Path = HERE / "data") -> list[Row]:
    """Every row of the data."""
    rows = []
    for name in FILES:
        with (folder / name).open() as file:
            for line in csv.DictReader(file):
                rows.append(_mpt(name, line) if name.startswith("mpt") else _llama(name, line))
    return rows


def _mpt(file: str, line: dict[str, str]) -> Row:
    gpu, count, length = line["gpu"].replace("_", "-"), int(line["gpus"]), int(line["seq"])
    run = _run(
        # Position tables grow with the length; these models have none (ALiBi).
        NAMED[line["model"]],
        gpu,
        length=length,
        mesh=Mesh(dp_shard=count),
        strategy="fsdp",
        micro_batch=int(line["micro_batch"]),
        grad_accum_steps=int(line["accum"]),
        precision="fp8" if "fp8" in line["precision"] else "bf16-mixed",
        recompute=RECOMPUTE[line["act_ckpt"]],
        reshard=line["sharding"] != "SHARD_GRAD_OP",
        compiled=False,
        loss="plain",
        traits=TRAITS["composer"],
    )
    label = (
        f"llm-foundry {line['model']}, {count} × {gpu}, {line['micro_batch']} × {length} × {line['accum']}, "
        f"recompute {line['act_ckpt']}, {line['precision']}"
    )
    return Row(file, label, run, float(line["tok_s_gpu"]), None, reserved=False)


def _llama(file: str, line: dict[str, str]) -> Row:
    name = line["model"].split()[0]
    shape, words = NAMED[SHAPES.get(name, name)], line["model"]
    gpu = "h100-96gb" if line["gpu"] == "h100-96gb-500w" else line["gpu"]
    degrees = {axis: int(number) for axis, number in re.findall(r"(fsdp|tp|pp|cp)(\d+)", line["parallel"])}
    mesh = Mesh(
        dp_shard=degrees.get("fsdp", 1), tp=degrees.get("tp", 1), pp=degrees.get("pp", 1), cp=degrees.get("cp", 1)
    )
    batch, grad_accum_steps = int(line["micro_batch"]), int(line["accum"])
    if line["pipeline_micro_batches"]:
        grad_accum_steps = int(line["pipeline_micro_batches"])
        batch //= grad_accum_steps
    adapter = _adapter(words, line["system"])
    precision = {"bf16": "bf16-mixed", "bf16-true base": "bf16-true"}.get(line["precision"], line["precision"])
    loss = next((kind for kind in ("chunked", "fused") if f"{kind}-ce" in words), "plain")
    traits = TRAITS[line["system"]]
    run = _run(
        shape,
        gpu,
        length=int(line["seq"]),
        devices=DEVICES.get(line["system"], 8),
        mesh=mesh,
        strategy="fsdp" if degrees else "single",
        micro_batch=batch,
        grad_accum_steps=grad_accum_steps,
        precision=precision,
        reduce_bytes=2 if precision == "bf16-true" else 4,
        optimizer=line["optimizer"],
        recompute=RECOMPUTE[line["act_ckpt"]],
        compiled=line["compile"] == "yes",
        schedule="interleaved" if "interleaved" in line["parallel"] else "1f1b",
        loss=loss,
        varied_lengths="longest sequence" in line["source"],
        adapter=adapter,
        trained=FROZEN if adapter is not None else Trained(),
        traits=replace(traits, chunks="recomputed") if "faked" in line["source"] else traits,
    )
    label = (
        f"{line['source']} {words}, {line['gpus']} × {line['gpu']}, {line['parallel']}, {line['micro_batch']} × "
        f"{line['seq']}, recompute {line['act_ckpt']}, {line['precision']}, compile {line['compile']}"
    )
    if line["source"].startswith("measured"):
        label += f", {line['system']}"
    tokens, gib = (float(line[key]) if line[key] else None for key in ("tok_s_gpu", "peak_gib"))
    faked = "faked" in line["source"] + line["parallel"]
    return Row(file, label, run, tokens, gib, reserved=line["peak_kind"] == "reserved", faked=faked)


def _adapter(words: str, system: str) -> Adapter | None:
    found = re.search(r"lora r(\d+)", words)
    if found is None:
        return None
    return Adapter(
        int(found[1]),
        ("q_proj", "v_proj"),
        "nf4" if "nf4" in words else None,
        double_quantized="nf4-dq" in words,
        dropout=system == "litgpt",  # its default
    )


def _run(shape: ModelShape, name: str, *, devices: int = 8, **settings: Any) -> Run:
    gpu = recognize(name) or find_gpu(name)
    network = LINKS[usual_network(gpu)]
    return Run(shape=shape, gpu=gpu, link=LINKS[gpu.link], network=network, devices=devices, **settings)


@dataclass(frozen=True)
class Compared:
    """One figure of a row with its forecast."""

    row: Row
    what: str  # memory, speed
    published: float
    forecast: float

    @property
    def error(self) -> float:
        return self.forecast / self.published - 1


def compare(rows: list[Row]) -> list[Compared]:
    """Every figure of every row."""
    found = []
    for row in rows:
        if row.gib is not None:
            found.append(Compared(row, "memory", row.gib, row.forecast_gib()))
        if row.tokens is not None:
            found.append(Compared(row, "speed", row.tokens, row.forecast_tokens()))
    return found


def summarize(compared: list[Compared]) -> dict[str, Any]:
    """Median and worst error."""
    errors = sorted(abs(one.error) for one in compared)
    worst = max(compared, key=lambda one: abs(one.error))
    return {
        "figures": len(errors),
        "median": round(statistics.median(errors), 4),
        "ninety_per_cent_within": round(errors[min(len(errors) - 1, int(0.9 * len(errors)))], 4),
        "worst": round(errors[-1], 4),
        "worst_row": worst.row.label,
        "bias": round(statistics.median(one.error for one in compared), 4),
    }


def groups(compared: list[Compared]) -> Iterator[tuple[str, list[Compared]]]:
    """Memory and speed, each for the given and the held-out rows."""
    for what in ("memory", "speed"):
        for held_out in (False, True):
            name = f"{what}, {'held out' if held_out else 'given'}"
            yield name, [one for one in compared if one.what == what and one.row.held_out is held_out]


def markdown(compared: list[Compared], summary: dict[str, Any]) -> str:
    lines = [
        "# Forecast compared with results",
        "",
        "Made by `benchmarks/plan_accuracy.py`; the data is in `../data`.",
        "",
    ]
    lines += [
        "| rows | figures | median | 90% within | worst | bias |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, one in summary.items():
        lines.append(
            f"| {name} | {one['figures']} | {one['median']:.1%} | {one['ninety_per_cent_within']:.1%} | "
            f"{one['worst']:.1%} | {one['bias']:+.1%} |"
        )
    for name, some in groups(compared):
        unit = "GiB" if name.startswith("memory") else "tokens/s per GPU"
        lines += [
            "",
            f"## {name.capitalize()}, {unit}",
            "",
            "| run | result | forecast | error |",
            "| --- | --- | --- | --- |",
        ]
        for one in sorted(some, key=lambda each: -abs(each.error)):
            digits = 1 if unit == "GiB" else 0
            lines.append(
                f"| {one.row.label} | {one.published:,.{digits}f} | {one.forecast:,.{digits}f} | {one.error:+.1%} |"
            )
    return "\n".join(lines) + "\n"


def plot(compared: list[Compared], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 5), layout="constrained")
    for axis, what, unit, bound in zip(
        axes, ("memory", "speed"), ("GiB", "tokens/s per GPU"), (0.15, 0.25), strict=True
    ):
        for held_out, colour in ((False, "#3b6ea5"), (True, "#e08e45")):
            some = [one for one in compared if one.what == what and one.row.held_out is held_out]
            label = "held out" if held_out else "given"
            axis.scatter([c.published for c in some], [c.forecast for c in some], s=14, color=colour, label=label)
        figures = [one.published for one in compared if one.what == what]
        ends = [min(figures) * 0.8, max(figures) * 1.25]
        axis.plot(ends, ends, color="black", linewidth=0.8)
        axis.fill_between(
            ends, [end * (1 - bound) for end in ends], [end * (1 + bound) for end in ends], color="black", alpha=0.07
        )
        axis.set(xscale="log", yscale="log", xlabel=f"result, {unit}", ylabel=f"forecast, {unit}")
        axis.set_title(f"{what}; grey: within {bound:.0%}")
        axis.legend(frameon=False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the forecast with published results.")
    parser.add_argument("output", type=Path, nargs="?", default=HERE / "plan", help="output folder")
    output = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    compared = compare(read_rows())
    summary = {name: summarize(some) for name, some in groups(compared)}
    for what in ("memory", "speed"):
        summary[f"{what}, all"] = summarize([one for one in compared if one.what == what])
    rows = [
        {
            "run": one.row.label,
            "held_out": one.row.held_out,
            "what": one.what,
            "result": one.published,
            "forecast": round(one.forecast, 3),
            "error": round(one.error, 4),
        }
        for one in compared
    ]
    (output / "accuracy.json").write_text(json.dumps({"summary": summary, "rows": rows}, indent=1) + "\n")
    (output / "accuracy.md").write_text(markdown(compared, summary))
    plot(compared, output / "accuracy.png")
    for name, one in summary.items():
        errors = f"median {one['median']:.1%}, worst {one['worst']:.1%}"
        print(f"{name:20} {one['figures']:4} figures: {errors}  {one['worst_row']}")


if __name__ == "__main__":
    main()
