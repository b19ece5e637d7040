"""Runs of LLaMA-Factory that a random generator chose, by its `run_exp` with what users write in their YAML.

    python benchmarks/gpu/drawn_llama_factory.py FILE [--count 24] [--seconds 540] [--tiny]

Full training, LoRA and QLoRA take turns; every fourth run has so few tokens that the device waits for the host. Models
and tokens come from folders, as they do for users: of a model there is a config, a tokenizer and a file of weights
without contents, whose tensors are drawn at random on the device where transformers would read them. LLaMA-Factory then
loads, quantizes and prepares the model, collates and trains. Nothing is saved after the last step. Each run has a
process of its own, because LLaMA-Factory and Liger change the classes of transformers. A CPU has neither Liger's
kernels nor `pure_bf16`: with `--tiny`, such runs fail.
"""

import importlib.machinery
import json
import math
import multiprocessing
import os
import random
import sys
import tempfile
import time
import types
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import transformers.core_model_loading
from datasets import Dataset, DatasetDict
from transformers import AutoModelForCausalLM, TrainerCallback

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

from drawn_runs import LARGE, SMALL, TARGETS, fits
from drawn_sft import empty_tokenizer
from peers.clock import Clock
from peers.models import resolve_shape
from peers.task import Task
from trainer_runs import LINEAR, OPTIMIZERS, measured_row, row, run_drawn

from shoal.models.families import transformers_config

# LLaMA-Factory 0.9.5 with TRL 0.24, for versions of transformers up to 5.6: it runs with 5.17, unlike with 5.23.
SOURCE, SEED, SYSTEM = "llama-factory-h200-drawn", 2711, "llama-factory@2026-11"
ENVIRONMENT = {"DISABLE_VERSION_CHECK": "1", "LLAMAFACTORY_VERBOSITY": "WARN", "HF_HUB_OFFLINE": "1"}
ENVIRONMENT |= {"TOKENIZERS_PARALLELISM": "false", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
# What a process can have imported before it is forked: PEFT imports bitsandbytes, which asks the device what it can do.
EARLY = ["datasets", "accelerate", "transformers.models.auto.modeling_auto", "transformers.generation.utils"]


def draw(count: int) -> Iterator[dict[str, Any]]:
    choice = random.Random(SEED).choice
    drawn = 0
    while drawn < count:
        kind, few = ("full", "LoRA", "QLoRA")[drawn % 3], drawn % 4 == 3
        tokens = choice((256, 512, 1024) if few else (4096, 8192, 16384))
        sequence = min(tokens, choice((256, 512, 1024, 2048, 4096, 8192)))
        settings: dict[str, Any] = {"recompute": choice(("full", "full", "none"))}
        # Of full training: `bf16`, which has weights in fp32 under autocast, or `pure_bf16`.
        precision, model = choice(("bf16-mixed", "bf16-mixed", "bf16-true")), choice(SMALL[6:])
        optimizer, liger = choice(("adamw", "adamw", "adamw8bit", "adafactor")), choice((False, False, False, True))
        if kind == "full":
            settings["optimizer"] = optimizer
        else:
            precision, model = "bf16-true", choice(LARGE)
            settings["adapter"] = {"rank": choice((8, 16, 64)), "targets": choice((LINEAR, *TARGETS))}
        if kind == "QLoRA":
            settings["adapter"] |= {"quantize": "nf4", "double_quantized": True}
        case = row(model, tokens // sequence, sequence, precision, **settings)
        case |= {"source": SOURCE, "system": SYSTEM, "accum": choice((1, 1, 2))}
        if liger:
            case |= {"compiled": True, "loss": "fused"}
        if fits(case):
            drawn += 1
            yield case


def measure(case: dict[str, Any], steps: int, shape: Any) -> dict[str, Any]:
    """In a process of its own, which may have processes too: those that collate."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(EARLY)
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(measure_here, case, steps, shape).result()


class TrainedError(Exception):
    """The last step is done. What follows would write the model."""


class Steps(TrainerCallback):
    def __init__(self, clock: Clock) -> None:
        self.clock, self.nothing = clock, torch.zeros(())

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.clock.begin()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.clock.step_done(self.nothing)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        raise TrainedError


def measure_here(case: dict[str, Any], steps: int, shape: Any) -> dict[str, Any]:
    multiprocessing.set_start_method("fork", force=True)  # of the processes that collate, as it is for users
    # For sounds, which these runs do not have; an import is all that it is needed for.
    sys.modules["torchaudio"] = types.ModuleType("torchaudio")
    sys.modules["torchaudio"].__spec__ = importlib.machinery.ModuleSpec("torchaudio", None)
    from llamafactory.train.tuner import run_exp

    del sys.modules["torchaudio"]
    transformers.core_model_loading._materialize_copy = random_weights
    length, batch = case["sequence"], case["micro_batch"]
    with tempfile.TemporaryDirectory() as folder:
        clock = Clock(Task("llama_factory", shape, length, batch, steps, "", time.time(), folder=folder))
        write_model(Path(folder) / "model", shape)
        write_tokens(Path(folder) / "tokens", steps * batch * case["accum"], length, resolve_shape(shape).vocab)
        try:
            run_exp(arguments(case, steps, Path(folder), cuda=clock.cuda), [Steps(clock)])
        except TrainedError:
            found = clock.result()
    return measured_row(case, found)


def arguments(case: dict[str, Any], steps: int, folder: Path, *, cuda: bool) -> dict[str, Any]:
    """What a YAML of LLaMA-Factory's examples has, and what differs from its defaults."""
    adapter, pure = case.get("adapter"), case.get("adapter") is None and case["precision"] == "bf16-true"
    found: dict[str, Any] = {
        "model_name_or_path": str(folder / "model"),
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "full" if adapter is None else "lora",
        "dataset": "none",  # it asks for a name, and reads the tokens below
        "tokenized_path": str(folder / "tokens"),
        "template": "empty",
        "cutoff_len": case["sequence"],
        "dataloader_num_workers": 4,
        "output_dir": str(folder / "saves"),
        "logging_steps": 10,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "per_device_train_batch_size": case["micro_batch"],
        "gradient_accumulation_steps": case["accum"],
        "learning_rate": 1e-4,
        "lr_scheduler_type": "cosine",
        "max_steps": steps,
        "pure_bf16" if pure else "bf16": True,
        "use_cpu": not cuda,
    }
    if case["recompute"] == "none":
        found["disable_gradient_checkpointing"] = True
    if case["compiled"]:
        found["enable_liger_kernel"] = True
    if "optimizer" in case:
        found["optim"] = OPTIMIZERS[case["optimizer"]]
    if adapter is not None:
        found["lora_rank"] = adapter["rank"]
        found["lora_target"] = "all" if adapter["targets"] == LINEAR else ",".join(adapter["targets"])
        if "quantize" in adapter:
            found |= {"quantization_bit": 4, "quantization_method": "bnb"}
    return found


def random_weights(tensor: Any, device: Any = None, dtype: torch.dtype | None = None) -> torch.Tensor:
    """In place of transformers' `_materialize_copy`, which reads a tensor of a file to the device."""
    found = torch.empty(tensor.get_shape(), device=device, dtype=dtype or torch.bfloat16)
    return found.normal_(std=0.02) if found.dim() > 1 else found.fill_(1.0)


def write_model(folder: Path, shape: Any) -> None:
    """A folder as `save_pretrained` writes it, in bf16; of the weights' file, the disk holds the header alone."""
    config = transformers_config(resolve_shape(shape))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    empty_tokenizer().save_pretrained(folder)
    header, end = {}, 0
    for name, parameter in model.named_parameters():  # tied ones once
        size = 2 * math.prod(parameter.shape)
        header[name] = {"dtype": "BF16", "shape": list(parameter.shape), "data_offsets": [end, end + size]}
        end += size
    written = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    written += b" " * (-len(written) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(written).to_bytes(8, "little") + written)
        file.truncate(8 + len(written) + end)


def write_tokens(folder: Path, count: int, length: int, vocabulary: int) -> None:
    """What LLaMA-Factory saves as tokenized, every sequence full: its prompt is part of the loss too."""
    tokens = torch.randint(2, vocabulary, (count, length), generator=torch.Generator().manual_seed(0)).tolist()
    columns = {"input_ids": tokens, "attention_mask": [[1] * length] * count, "labels": tokens}
    columns |= {kind: [None] * count for kind in ("images", "videos", "audios")}
    DatasetDict({"train": Dataset.from_dict(columns)}).save_to_disk(folder)


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)
    run_drawn("Runs of LLaMA-Factory that a random generator chose.", draw, 24, measure)
