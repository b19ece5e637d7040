"""Measure the effect of single optimizations on this GPU: steps of the real model and optimizer, in one process.

    python benchmarks/gpu/ideas.py OUTPUT.jsonl [NAME…] [--profile]

For development; `speed.py` is for comparisons. Steps are called directly, nothing is logged between them, and each line
is the fastest of three repetitions of eight steps. --profile adds the kernels of two steps to each line.
"""

import gc
import json
import os
import sysconfig
import tempfile
import time
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from shoal.config.load import load_config
from shoal.config.run import RunDirectory
from shoal.data.loader import batches
from shoal.launch.join import joined
from shoal.observe.progress import Reporter
from shoal.parallel.device import inspect_device
from shoal.train.inputs import read_inputs
from shoal.train.preflight import preflight
from shoal.train.setup import Start, set_up

LARGE = ["model.shape=llama3-8b", "train.precision=bf16-true"]
LOW_MEMORY = [*LARGE, "train.optimizer.name=adamw8bit"]
# name: (micro-batch, overrides)
IDEAS: dict[str, tuple[int, list[str]]] = {
    "default 4": (4, []),
    "default 8": (8, []),
    "recompute cheap 4": (4, ["train.recompute=cheap"]),
    "recompute cheap 8": (8, ["train.recompute=cheap"]),
    "fp8 4": (4, ["train.precision=fp8"]),
    "fp8 8": (8, ["train.precision=fp8"]),
    "8b cheap": (2, [*LARGE, "train.recompute=cheap"]),
    "8b 8-bit AdamW, every 2": (2, [*LOW_MEMORY, "train.recompute={every: 2}"]),
    "8b 8-bit AdamW, selective": (2, [*LOW_MEMORY, "train.recompute=selective"]),
    "8b 8-bit AdamW, full": (2, [*LOW_MEMORY, "train.recompute=full"]),
}
TINY = "{family: llama, hidden: 64, layers: 2, heads: 4, kv_heads: 2, ffn: 128, vocab: 512, positions: 4096}"


def measure(name: str, folder: Path, *, steps: int = 8, repeats: int = 3, profiled: bool = False) -> dict[str, Any]:
    micro_batch, more = IDEAS[name]
    on_cuda = torch.cuda.is_available()
    config = load_config(None, [*_job(name, micro_batch, on_cuda), *(more if on_cuda else more[1:])])
    with joined(config) as ranks:
        inputs = read_inputs(config, Reporter(enabled=False))
        run = RunDirectory(folder / config.name)
        run.create(config, overwrite=True)
        job = set_up(preflight(config, inputs, 1, inspect_device(ranks.device)), run, ranks, Start())
        stream = batches(
            inputs.sets.training,
            inputs.sets.order,
            first_step=0,
            global_batch=micro_batch,
            micro_batch=micro_batch,
            rank=0,
            ranks=1,
            pad=inputs.tokenizer.pad,
            length=job.model.sequence_length,
            multiple=job.model.sequence_multiple,
            workers=2,
            pin=on_cuda,
        )
        for _ in range(4):
            job.step(next(stream), 1e-4)
        if on_cuda:
            torch.cuda.reset_peak_memory_stats()
        best = min(_seconds_per_step(job, stream, steps) for _ in range(repeats))
        line = {
            "title": name,
            "micro_batch": micro_batch,
            "milliseconds": round(1e3 * best, 2),
            "tokens_per_second": round(micro_batch * config.data.max_length / best),
            "allocated_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if on_cuda else None,
            "reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 2) if on_cuda else None,
        }
        if profiled:
            line["kernels"] = _kernels(job, stream)
        stream.close()
    del job
    gc.collect()
    if on_cuda:
        torch.cuda.empty_cache()
    return line


def _job(name: str, micro_batch: int, on_cuda: bool) -> list[str]:
    library = sysconfig.get_paths()["stdlib"]
    return [
        f"name={name.replace(' ', '-').replace(',', '')}",
        f"model.shape={'llama3.2-1b' if on_cuda else TINY}",
        "model.tokenizer=bytes",
        "data.source=text",
        f"data.path={library}/a*.py",
        f"data.max_length={4096 if on_cuda else 256}",
        "data.validation=0",
        "train.steps=1000",
        "train.lr=1e-4",
        "log.to=[]",
        f"train.global_batch={micro_batch}",
        f"train.micro_batch={micro_batch}",
    ]


def _seconds_per_step(job: Any, stream: Any, steps: int) -> float:
    began = time.perf_counter()
    for _ in range(steps):
        job.step(next(stream), 1e-4)
    _synchronize()
    return (time.perf_counter() - began) / steps


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _kernels(job: Any, stream: Any, steps: int = 2, most: int = 40) -> dict[str, float]:
    """Milliseconds per step of each kernel, the longest first."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        for _ in range(steps):
            job.step(next(stream), 1e-4)
        _synchronize()
    total: dict[str, float] = {}
    for event in seen.events():
        if str(event.device_type).endswith("CUDA"):
            total[event.name] = total.get(event.name, 0.0) + event.time_range.elapsed_us() / 1e3 / steps
    longest = sorted(total.items(), key=lambda item: -item[1])[:most]
    return {name[:100]: round(milliseconds, 3) for name, milliseconds in longest}


def main() -> None:
    parser = ArgumentParser(description="Measure single optimizations on this GPU.")
    parser.add_argument("output", type=Path)
    parser.add_argument("names", nargs="*", default=list(IDEAS), metavar="NAME", help=f"one of {', '.join(IDEAS)}")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, args.output.open("a") as output:
        os.environ.setdefault("SHOAL_CACHE", f"{folder}/cache")
        for name in args.names:
            line = json.dumps(measure(name, Path(folder), profiled=args.profile))
            print(line, flush=True)
            output.write(line + "\n")


if __name__ == "__main__":
    main()
