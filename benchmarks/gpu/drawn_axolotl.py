"""Runs of axolotl that a random generator chose: a config file through its validation, its data and its trainer.

    python benchmarks/gpu/drawn_axolotl.py FILE [--count 24] [--seconds 540] [--tiny]

Full training, LoRA and QLoRA take turns, with axolotl's defaults: `bf16: auto`, kernels for adapters, reentrant
checkpoints, a worker that loads data. Attention is PyTorch's, as flash-attn is not there; packed rows have two
documents, so that axolotl calls its kernel for several, of which the first has nearly all tokens. Only the reader of
weights is replaced: transformers' loader is given random ones, and quantizes them itself. A CPU has neither axolotl's
Triton kernel for the MLP nor its kernels for 4 bits, nor Liger's, without which `--tiny` runs.
"""

import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedTokenizerFast, TrainerCallback

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

from drawn_runs import LARGE, SMALL, TARGETS, fits
from peers.clock import Clock
from peers.models import build, resolve_shape
from peers.task import Task
from trainer_runs import OPTIMIZERS, measured_row, row, run_drawn

from shoal.catalogue.shapes import NAMED
from shoal.models.families import transformers_config
from shoal.plan.terms import GIB

SOURCE, SEED, SYSTEM = "axolotl-h200-drawn", 2711, "axolotl@2026-11"
# PyTorch's attention: cuDNN's kernel; and for packed rows flash attention, with keys repeated for every query head
# (axolotl/monkeypatch/attention/sdpa_varlen.py).
WHOLE = {"flash2": False, "variable_lengths": False}
PACKED = {"repeats_keys": True}
LAST_DOCUMENT = 32  # tokens of a packed row's second document, at most
# Imported by axolotl's modules, but not called in these runs, but for numba's decorator around the sampler.
UNUSED = ("wandb", "evaluate", "posthog", "fire", "fastcore", "fastcore.parallel", "requests", "numba")
LIGER = {
    "plugins": ["axolotl.integrations.liger.LigerPlugin"],
    **dict.fromkeys(("liger_rope", "liger_rms_norm", "liger_glu_activation", "liger_fused_linear_cross_entropy"), True),
}
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "AXOLOTL_DO_NOT_TRACK": "1", "AXOLOTL_LOG_LEVEL": "WARNING"}
# As its command has it (set_pytorch_cuda_alloc_conf in axolotl/utils).
ENVIRONMENT["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def draw(count: int) -> Iterator[dict[str, Any]]:
    """`count` runs, of which a quarter have so few tokens that the device waits for the host."""
    choice = random.Random(SEED).choice
    drawn = 0
    while drawn < count:
        kind = ("full", "LoRA", "QLoRA")[drawn % 3]
        tokens = choice((256, 512, 1024) if drawn % 4 == 3 else (4096, 8192, 8192, 16384))
        sequence = choice((256, 512, 1024, 2048, 4096, 8192))
        micro_batch = max(1, tokens // sequence)
        model, settings = choice(SMALL[6:] if kind == "full" else LARGE), {}
        packed, liger, recompute = choice((False, True)), choice((False, False, True)), choice(("full", "full", "none"))
        # With a sliding window, axolotl computes packed rows with a mask, which no trait says.
        packed = packed and NAMED[model].sliding_window is None
        settings["optimizer"] = choice(("adamw", "adamw8bit"))
        if kind != "full":
            settings["adapter"] = {"rank": choice((8, 16, 64)), "targets": choice((TARGETS[0], *TARGETS))}
            settings["adapter"] |= {"dropout": True} if choice((False, True)) else {}
        if kind == "QLoRA":
            settings["adapter"] |= {"quantize": "nf4", "double_quantized": True}
        case = row(model, min(micro_batch, tokens), min(sequence, tokens), "bf16-true", recompute=recompute, **settings)
        case |= {"source": SOURCE, "system": SYSTEM, "accum": choice((1, 1, 2)), "traits": PACKED if packed else WHOLE}
        if liger and kind != "full":
            case |= {"compiled": True, "loss": "fused"}  # Liger's kernels
        if fits(case):
            drawn += 1
            yield case


def measure(case: dict[str, Any], steps: int, shape: Any) -> dict[str, Any]:
    """In a process of its own: axolotl replaces methods of transformers, which the next run would have."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", "datasets", "trl"])
    # Not a pool of `multiprocessing`, whose processes cannot have the one that loads data.
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(measure_here, case, steps, shape).result()


def measure_here(case: dict[str, Any], steps: int, shape: Any) -> dict[str, Any]:
    stand_in()
    from axolotl.cli.config import load_cfg
    from axolotl.common.datasets import TrainDatasetMeta
    from axolotl.loaders import ModelLoader
    from axolotl.train import execute_training, setup_model_and_trainer

    with tempfile.TemporaryDirectory() as folder:
        task = Task("axolotl", shape, case["sequence"], case["micro_batch"], steps, "", time.time(), folder=folder)
        clock = Clock(task)
        write_model(task)
        path = Path(folder, "config.yml")
        path.write_text(json.dumps(config_of(case, task, cuda=clock.cuda)))  # which is YAML too

        def load(loader: Any, *_: Any) -> Any:
            state = build(task, loader.cfg.torch_dtype).state_dict()
            found = MODEL_FOR_CAUSAL_LM_MAPPING[type(loader.model_config)]
            return found.from_pretrained(None, config=loader.model_config, state_dict=state, **loader.model_kwargs)

        ModelLoader._load_model_from_pretrained = load
        config = load_cfg(str(path))
        data = TrainDatasetMeta(documents(case, task), total_num_steps=steps)
        trainer = setup_model_and_trainer(config, data)[0]
        nothing, peaks = torch.zeros(()), []

        class StepEnd(TrainerCallback):
            def on_step_end(self, *_: Any, **__: Any) -> None:
                clock.step_done(nothing)
                # Here, because axolotl starts them anew whenever it logs.
                peaks.append((torch.cuda.max_memory_allocated() / GIB, torch.cuda.max_memory_reserved() / GIB))

        trainer.add_callback(StepEnd())
        clock.begin()
        execute_training(config, trainer, None)
        allocated, reserved = map(max, zip(*peaks, strict=True))
        found = {**clock.result(), "allocated_gib": allocated, "reserved_gib": reserved}
    return measured_row(case, found)


def config_of(case: dict[str, Any], task: Task, *, cuda: bool) -> dict[str, Any]:
    """What a user writes."""
    found: dict[str, Any] = {
        "base_model": f"{task.folder}/model",
        "datasets": [{"path": task.folder}],  # one has to be named
        "output_dir": f"{task.folder}/output",
        "sequence_len": task.length,
        "sample_packing": case["traits"] == PACKED,
        # In the order of the data, in which rows are full: without numba, it takes long to look for another.
        "sample_packing_sequentially": True,
        "curriculum_sampling": True,
        "attn_implementation": "sdpa",
        "bf16": "auto" if cuda else False,
        "micro_batch_size": task.micro_batch,
        "gradient_accumulation_steps": case["accum"],
        "gradient_checkpointing": case["recompute"] == "full",
        "optimizer": OPTIMIZERS[case.get("optimizer", "adamw")],
        "learning_rate": 1e-4,
        "max_steps": task.steps,
        "save_strategy": "no",
    }
    if case["compiled"] and cuda:
        found |= LIGER
    if adapter := case.get("adapter"):
        found |= {"adapter": "lora", "lora_r": adapter["rank"], "lora_alpha": 2 * adapter["rank"]}
        found |= {"lora_target_modules": adapter["targets"], "lora_dropout": 0.05 if adapter.get("dropout") else 0.0}
        if "quantize" in adapter:
            found |= {"adapter": "qlora", "load_in_4bit": True}
        if not cuda:
            attention = "quantize" not in adapter
            found |= {"lora_mlp_kernel": False, "lora_qkv_kernel": attention, "lora_o_kernel": attention}
    return found


def write_model(task: Task) -> None:
    """A model's folder without weights."""
    transformers_config(resolve_shape(task.shape)).save_pretrained(f"{task.folder}/model")
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    tokenizer.save_pretrained(f"{task.folder}/model")


def documents(case: dict[str, Any], task: Task) -> Dataset:
    """Random tokens as axolotl leaves what it has read and cut: whole rows, or two documents for each."""
    from axolotl.utils.trainer import add_position_ids

    packed = case["traits"] == PACKED
    last = min(LAST_DOCUMENT, task.length // 2)
    rows = task.steps * task.micro_batch * case["accum"]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(2, resolve_shape(task.shape).vocab, (rows, task.length), generator=generator)
    cut = [task.length - last, last] if packed else [task.length]
    found = [one.tolist() for line in tokens for one in line.split(cut)]
    data = {"input_ids": found, "attention_mask": [[1] * len(one) for one in found], "labels": found}
    return Dataset.from_dict(add_position_ids(data) if packed else data)


def stand_in() -> None:
    """Empty modules in place of those that only have to be there, where they are not."""
    attributes = {
        "numba": {"njit": lambda function: function},
        "fastcore.parallel": {"parallel": None},
        "axolotl.contribs.lgpl": {"fix_untrained_tokens": None},
    }
    missing = [one for one in UNUSED if find_spec(one.partition(".")[0]) is None]
    for name in (*missing, "axolotl.contribs", "axolotl.contribs.lgpl"):
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__dict__.update({"__spec__": ModuleSpec(name, None)} | attributes.get(name, {}))


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)
    run_drawn("Runs of axolotl that a random generator chose.", draw, 24, measure)
