"""Runs of Megatron-LM's `pretrain_gpt.py` on one GPU, drawn at random.

    python benchmarks/gpu/drawn_megatron.py FILE --site FOLDER [--count 16] [--seconds 540]

The command itself runs, with Transformer Engine, made-up data (`--mock-data`) and its own measures: the time per
iteration and the memory that it logs. FOLDER has `pretrain_gpt.py` and `megatron/` of a release (core_v0.16.1), and on
the path are Transformer Engine and what both import. Apex's matmul that adds to the gradient is Transformer Engine's.
"""

import argparse
import contextlib
import importlib
import multiprocessing
import os
import random
import re
import runpy
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

from drawn_runs import fits
from trainer_runs import row, run_cases

from shoal.catalogue.shapes import find_shape

SOURCE, SEED = "megatron-h200-drawn", 1611
# Of those that are drawn elsewhere, the ones whose blocks Megatron has.
MODELS = ("gpt2", "smollm2-135m", "tinyllama-1.1b", "qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b", "qwen3-0.6b")
MODELS += ("qwen3-1.7b", "qwen3-4b", "llama3.2-1b", "llama3.2-3b")
# Iterations between two lines of its log, for which the host waits for the device.
WINDOW, WINDOWS = 4, 4
# What Megatron imports of Apex where weight gradients are added up by matmuls (`gradient_accumulation_fusion`).
APEX = """
import torch
from transformer_engine.pytorch.cpp_extensions import general_gemm

def wgrad_gemm_accum_fp32(inputs, gradient, total):
    general_gemm(inputs, gradient, out_dtype=torch.float32, layout="NT", grad=True, out=total, accumulate=True)
"""
ONE_RANK = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
ONE_RANK |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29512"}
FINAL = re.compile(r"max allocated: ([\d.]+) .*max reserved: ([\d.]+)")
ITERATION = re.compile(r"iteration +(\d+)/ *\d+ .*elapsed time per iteration \(ms\): ([\d.]+)")


def draw(count: int) -> Iterator[dict[str, Any]]:
    choice = random.Random(SEED).choice
    drawn = 0
    while drawn < count:
        sequence = choice((512, 1024, 2048, 4096, 8192))
        micro_batch = max(1, choice((1024, 4096, 8192, 16384)) // sequence)
        settings: dict[str, Any] = {"recompute": choice(("none", "none", "full"))}
        precision = choice(("bf16-mixed", "bf16-mixed", "fp8"))
        case = {
            **row(choice(MODELS), micro_batch, sequence, precision, **settings),
            "source": SOURCE,
            "system": "megatron@2026-03",
            "strategy": choice(("ddp", "zero1")),
            "accum": choice((1, 1, 4)),
            "compiled": True,
        }
        if fits(case):
            drawn += 1
            yield case


def arguments(case: dict[str, Any], steps: int) -> list[str]:
    """As its examples have them: dropout off, and every other option that is not of the model as it is."""
    shape = find_shape(case["model"])
    found = {
        "num-layers": shape.layers,
        "hidden-size": shape.hidden,
        "ffn-hidden-size": shape.ffn,
        "num-attention-heads": shape.heads,
        "kv-channels": shape.head_size,
        "seq-length": case["sequence"],
        "max-position-embeddings": shape.positions,
        "norm-epsilon": shape.norm_eps,
        "vocab-size": shape.vocab - 1,  # the tokenizer adds the end of a document
        "tokenizer-type": "NullTokenizer",
        "micro-batch-size": case["micro_batch"],
        "global-batch-size": case["micro_batch"] * case["accum"],
        "train-iters": steps,
        "lr": 1e-4,
        "attention-dropout": 0,
        "hidden-dropout": 0,
        "log-interval": WINDOW,
        "log-memory-interval": WINDOW,
        "eval-interval": 10**6,
        "eval-iters": 0,
    }
    flags = ["mock-data", "bf16", "legacy-tokenizer"]
    if shape.family == "gpt2":
        found["position-embedding-type"] = "learned_absolute"
    else:
        found |= {"position-embedding-type": "rope", "normalization": "RMSNorm", "rotary-base": int(shape.rope_theta)}
        flags += ["swiglu", "disable-bias-linear"]
    if shape.kv_heads != shape.heads:
        found["num-query-groups"] = shape.kv_heads
        flags.append("group-query-attention")
    others = {
        "untie-embeddings-and-output-weights": not shape.tied,
        "add-qkv-bias": shape.family == "qwen2",
        "qk-layernorm": shape.family == "qwen3",
        "use-distributed-optimizer": case["strategy"] == "zero1",
    }
    flags += [flag for flag, given in others.items() if given]
    if case["recompute"] == "full":
        found |= {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1}
    if case["precision"] == "fp8":
        found["fp8-format"] = "hybrid"
    return [f"--{flag}" for flag in flags] + [text for key, value in found.items() for text in (f"--{key}", str(value))]


def processes(site: Path, folder: Path) -> Iterator[Callable[[list[str]], str]]:
    """What runs the command with arguments and returns its log, each in a process of its own.

    It has imported Megatron while the one before it ran, because that takes as long as a run.
    """
    (folder / "fused_weight_gradient_mlp_cuda.py").write_text(APEX)
    context = multiprocessing.get_context("spawn")

    def start() -> ProcessPoolExecutor:
        process = ProcessPoolExecutor(1, context, load, (site, folder))
        process.submit(int)  # which starts it
        return process

    ready = start()
    while True:
        current, ready = ready, start()
        with current as process:
            yield lambda settings, process=process: process.submit(run, settings, folder).result()


def load(site: Path, folder: Path) -> None:
    # Workers of its data loader that are spawned, as this process is, take longer to start than a run.
    multiprocessing.set_start_method("fork", force=True)
    os.environ.update(ONE_RANK)
    sys.path[:0] = [str(folder), str(site)]
    importlib.import_module("pretrain_gpt")


def run(settings: list[str], folder: Path) -> str:
    sys.argv[:] = ["pretrain_gpt.py", *settings, "--data-cache-path", str(folder / "data")]
    with (folder / "log.txt").open("w+") as file:
        os.dup2(file.fileno(), 1)
        with contextlib.suppress(SystemExit):  # as it ends after the last iteration
            runpy.run_module("pretrain_gpt", run_name="__main__")
        sys.stdout.flush()
        file.seek(0)
        return file.read()


def measured(case: dict[str, Any], log: str) -> dict[str, Any]:
    """The case with the memory after the last iteration, and the speed without the first windows."""
    milliseconds = [float(found[2]) for found in ITERATION.finditer(log) if int(found[1]) > WINDOW]
    allocated, reserved = (float(one) / 1024 for one in FINAL.findall(log)[-1])
    tokens = case["micro_batch"] * case["accum"] * case["sequence"]
    kept = {
        "memory": [round(reserved, 3), "GiB", "reserved"],
        "allocated_gib": round(allocated, 3),
        "tokens_per_second_per_gpu": round(tokens / statistics.median(milliseconds) * 1000, 1),
    }
    return {**case, **kept, "unknown": ""}


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs of Megatron-LM, drawn at random.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--site", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--count", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=540)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        ready = processes(args.site.resolve(), Path(name))

        def measure(case: dict[str, Any], *_: Any) -> dict[str, Any]:
            return measured(case, next(ready)(arguments(case, WINDOW * WINDOWS)))

        run_cases(draw(args.count), args.file, args.seconds, tiny=False, measure=measure)
        ready.close()


if __name__ == "__main__":
    main()
