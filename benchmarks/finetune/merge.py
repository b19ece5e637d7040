"""What merging an adapter costs, and how a wrong merge differs from it: the thresholds of `shoal merge` come from here.

`python benchmarks/finetune/merge.py` in the root of the repository, after `shoal download smollm2-135m`, trains five
adapters for ten steps and writes benchmarks/finetune/merge.json. Every adapter is merged into bf16, fp16 and fp32, as
`shoal merge` does it and with deliberate mistakes, and each model is compared with the run on 64 random tokens.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.checkpoint.choose import choose_checkpoint
from shoal.checkpoint.layout import SliceReader
from shoal.convert.peft import adapter_run
from shoal.convert.shards import DTYPES
from shoal.models.adapters import scale_of, without_adapters
from shoal.models.base import find_base, prepare_adapted
from shoal.parallel.precision import read_precision
from shoal.use.load import load_run
from shoal.use.merge import Merger, base_weights, compare_logits, compute_logits, merge_run, random_tokens

ROOT = Path(__file__).parents[2]
RESULT = Path(__file__).with_name("merge.json")
TOKENS = 3  # draws of random tokens, for a right merge
COMMON = (
    *("adapter.rank=16", "adapter.alpha=32", "data.path=LICENSE", "data.source=text", "data.max_length=64"),
    *("data.validation=0", "train.steps=10", "train.global_batch=2", "train.micro_batch=2", "train.schedule=constant"),
    *("train.precision=32-true", "hardware.devices=1", "log.to=[]"),
)
ADAPTERS = {
    "lora": ("adapter.kind=lora", "train.lr=7e-4"),
    "strong": ("adapter.kind=lora", "train.lr=3e-3"),
    "qv": (
        "adapter.kind=lora",
        "adapter.rank=8",
        "adapter.alpha=16",
        "adapter.targets=[q_proj,v_proj]",
        "train.lr=2e-4",
    ),
    "dora": ("adapter.kind=lora", "adapter.rank=8", "adapter.alpha=16", "adapter.dora=true", "train.lr=7e-4"),
    "qlora": ("adapter.kind=qlora", "train.lr=7e-4"),
}
# What a merge does wrong → the factor of what the adapter adds to a layer.
MERGES: dict[str, Callable[[str], float]] = {
    "right": lambda layer: 1.0,
    "scaled by 1.05": lambda layer: 1.05,
    "scaled by 1.5": lambda layer: 1.5,
    "one layer missed": lambda layer: 0.0 if layer.endswith("layers.15.self_attn.v_proj") else 1.0,
    "one block missed": lambda layer: 0.0 if ".layers.15." in layer else 1.0,
    "half of the blocks missed": lambda layer: 0.0 if int(layer.split(".")[2]) % 2 else 1.0,
    "nothing merged": lambda layer: 0.0,
}


def main(model: str, runs: Path | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        found: dict[str, Any] = {
            "machine": {
                "cores": os.cpu_count(),
                "python": platform.python_version(),
                **{name: version(name) for name in ("torch", "transformers")},
            },
            "model": Path(model).name,
            "settings": {"common": COMMON, "adapters": ADAPTERS},
            "adapters": {},
        }
        for name in ADAPTERS:
            run = train(name, model, Path(folder, "runs")) if runs is None else runs / name
            found["adapters"][name] = measure(run, Path(folder))
            RESULT.write_text(json.dumps(found, indent=1) + "\n")


def train(name: str, model: str, runs: Path) -> Path:
    settings = (f"model.from={model}", *COMMON, *ADAPTERS[name], f"name={name}")
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as empty:
        empty.write("{}\n")
        empty.flush()
        command = [sys.executable, "-m", "shoal", "train", empty.name, *settings, "--runs", str(runs)]
        subprocess.run(command, cwd=ROOT, check=True)
    return runs / name


@torch.no_grad()
def measure(run: Path, folder: Path) -> dict[str, Any]:
    """Dtype → merge → what `shoal merge` compares. The right merge is compared on other tokens too."""
    found: dict[str, Any] = {}
    weights, added = merged_layers(run)
    for name, dtype in DTYPES.items():
        output = folder / f"{run.name}-{name}"
        merge_run(run, output, dtype=name, compare=False, device="cpu")
        loaded = load_run(run, device="cpu", dtype=dtype)
        tokens = [random_tokens(loaded, seed) for seed in range(TOKENS)]
        expected = [compute_logits(loaded, one, dtype) for one in tokens]
        with without_adapters(loaded.model):
            base = [compute_logits(loaded, one, dtype) for one in tokens]
        loaded = load_run(output, device="cpu", dtype=dtype)
        rows = found[name] = {}
        for merge, factor in MERGES.items():
            if merge != "right":  # that is what is in the files
                for layer, weight in weights.items():
                    merged = weight + factor(layer) * added[layer]
                    loaded.model.get_submodule(layer).weight.copy_(merged)
            compared = [
                asdict(compare_logits(compute_logits(loaded, tokens[one], dtype), expected[one], base[one]))
                for one in range(TOKENS if merge == "right" else 1)
            ]
            rows[merge] = [{key: float(f"{value:.4g}") for key, value in one.items()} for one in compared]
            print(run.name, name, merge, rows[merge], flush=True)
        del loaded
    return found


def merged_layers(run: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Layer → weight of the base, and what a right merge adds to it; in fp32."""
    directory, config = adapter_run(run)
    base = find_base(directory, config)
    prepared = prepare_adapted(directory, config, base, adapted=False)
    reader = SliceReader(choose_checkpoint(run, None).path)
    stored = base_weights(prepared, base, torch.device("cpu"))
    merger = Merger(prepared.model, stored, reader, scale_of(config.adapter), "fp32")
    if config.adapter.kind == "qlora":
        adapters = prepare_adapted(directory, config, base).adapters
        merger.quantized = frozenset(() if adapters is None else adapters.quantized)
        merger.rounding = config.adapter.quantize, read_precision(config.train.precision, "fp32").compute
    weights = {layer: merger.base_weight(f"{layer}.weight").float() for layer in sorted(merger.layers)}
    return weights, {layer: merger.read(f"{layer}.weight") - weight for layer, weight in weights.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="models/smollm2-135m")
    parser.add_argument("--runs", type=Path, help="a folder with the trained adapters, in place of training them")
    given = parser.parse_args()
    main(given.model, given.runs)
