"""Runs of LitGPT that a random generator chose: `litgpt finetune_full`, `finetune_lora` and `pretrain`.

    python benchmarks/gpu/drawn_litgpt.py FILE [--count 16] [--seconds 540] [--tiny]

Each run is a call of the function behind the command (`setup` of `litgpt.finetune.full`, `litgpt.finetune.lora` or
`litgpt.pretrain`) with its defaults: dropout of adapters, a line and a record in its log for every micro-batch, and two
batches of validation before the first step, which count towards the memory as they do for its users. Replaced are the
data, which are random tokens in batches as its Alpaca makes them, and `load_checkpoint`: weights stay as LitGPT has
initialized them on the device. A run ends with an exception after its last step, before anything is saved. Full
training, LoRA and QLoRA take turns; the last two runs are pretraining, whose model is compiled. bitsandbytes has no
kernels for LitGPT's quantized layers on a CPU: with `--tiny` QLoRA fails.
"""

import importlib
import json
import multiprocessing
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from litgpt.args import EvalArgs, TrainArgs
from litgpt.config import Config
from litgpt.data import DataModule
from litgpt.data.base import get_sft_collate_fn
from litgpt.utils import save_config
from tokenizers import Tokenizer, models
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

from drawn_runs import LARGE, SMALL, TARGETS, fits
from peers.clock import Clock
from peers.task import Task
from trainer_runs import measured_row, row, run_drawn

SOURCE, SEED, SYSTEM = "litgpt-h200-drawn", 2011, "litgpt@2026-11"
# The models as LitGPT names them, where it has another name than ours; it does not have GPT-2. Mistral is the version
# without a sliding window, which LitGPT would mask position by position.
NAMES = {
    "smollm2-135m": "SmolLM2-135M",
    "tinyllama-1.1b": "tiny-llama-1.1b",
    "mistral-7b": "Mistral-7B-v0.2",
    "llama2-7b": "Llama-2-7b-hf",
    "llama2-13b": "Llama-2-13b-hf",
    "llama3.1-8b": "Llama-3.1-8B",
    "llama3.2-1b": "Llama-3.2-1B",
    "llama3.2-3b": "Llama-3.2-3B",
    **{f"qwen2.5-{size}b": f"Qwen2.5-{size}B" for size in ("0.5", "1.5", "3", "7", "14")},
    **{f"qwen3-{size}b": f"Qwen3-{size}B" for size in ("0.6", "1.7", "4", "8")},
}
# Models that are compiled in about a minute, once for validation and once for training.
COMPILED = ("pythia-160m", "pythia-410m", "smollm2-135m", "llama3.2-1b")
# LitGPT's switches for the layers that adapters are of.
SWITCHES = {
    "q_proj": "lora_query",
    "k_proj": "lora_key",
    "v_proj": "lora_value",
    "o_proj": "lora_projection",
    "up_proj": "lora_mlp",
}
QUANTIZED = {False: "bnb.nf4", True: "bnb.nf4-dq"}
# What `--tiny` makes of every model, whose family stays.
SIZES = {
    "n_layer": 2,
    "n_embd": 64,
    "n_head": 4,
    "n_query_groups": 2,
    "head_size": 16,
    "intermediate_size": 128,
    "vocab_size": 256,
    "padded_vocab_size": 256,
}


class Measured(Exception):
    """The last step is over."""


def draw(count: int) -> Iterator[dict[str, Any]]:
    choice = random.Random(SEED).choice
    drawn = 0
    while drawn < count:
        kind = "pretrain" if drawn >= count - 2 else ("full", "LoRA", "QLoRA")[drawn % 3]
        sequence = choice((256, 512, 1024) if drawn % 4 == 3 else (512, 1024, 2048, 4096))
        tokens = choice((256, 512, 1024) if drawn % 4 == 3 else (4096, 8192, 16384))
        micro_batch, accum = max(1, tokens // sequence), choice((1, 1, 2))
        rank, targets, doubled = choice((8, 16, 64)), choice((TARGETS[2], *TARGETS)), choice((True, False))
        models = {"full": SMALL[1:], "pretrain": COMPILED}.get(kind, LARGE)
        precision = "bf16-mixed" if kind == "pretrain" else "bf16-true"
        case = row(choice(models), micro_batch, sequence, precision)
        case |= {"source": SOURCE, "system": SYSTEM, "accum": accum, "compiled": kind == "pretrain"}
        if kind != "pretrain":
            case["clips"] = False
        if kind in ("LoRA", "QLoRA"):
            case["adapter"] = {"rank": rank, "targets": targets, "dropout": True}
        if kind == "QLoRA":
            case["adapter"] |= {"quantize": "nf4", "double_quantized": doubled}
            case["paged_optimizer"] = True
        if fits(case):
            drawn += 1
            yield case


class RandomTokens(Dataset):
    """Sequences as LitGPT's `SFTDataset` has them, or as its data for pretraining: with one token more."""

    def __init__(self, count: int, length: int, vocabulary: int, *, pretraining: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        self.pretraining = pretraining
        self.tokens = torch.randint(vocabulary, (count, length + pretraining), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Tensor | dict[str, Any]:
        tokens = self.tokens[index]
        counts = {"raw": len(tokens), "raw_plus_prompt_template": len(tokens)}
        return tokens if self.pretraining else {"input_ids": tokens, "labels": tokens, "token_counts": counts}


class RandomData(DataModule):
    """Loaders as those of LitGPT's Alpaca and TinyLlama, for a number of micro-batches."""

    def __init__(self, batches: int, length: int, vocabulary: int, *, pretraining: bool) -> None:
        super().__init__()
        self.batches, self.length, self.vocabulary, self.pretraining = batches, length, vocabulary, pretraining

    def connect(self, tokenizer: Any = None, batch_size: int = 1, max_seq_length: Any = None, **_: Any) -> None:
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader:
        return self.loader(self.batches)

    def val_dataloader(self) -> DataLoader:
        return self.loader(2)

    def loader(self, batches: int) -> DataLoader:
        data = RandomTokens(batches * self.batch_size, self.length, self.vocabulary, pretraining=self.pretraining)
        if self.pretraining:
            return DataLoader(data, self.batch_size, pin_memory=True, num_workers=8, drop_last=True)
        return DataLoader(data, self.batch_size, num_workers=4, collate_fn=get_sft_collate_fn(self.length))


def measure(case: dict[str, Any], steps: int, shape: Any) -> dict[str, Any]:
    """In a process of its own, which may have others that load data: what LitGPT and the compiler keep goes with it."""
    context = multiprocessing.get_context("forkserver")
    # Nothing that has CUDA begin, as bitsandbytes does.
    context.set_forkserver_preload(["litgpt.finetune.lora", "litgpt.finetune.full", "litgpt.pretrain"])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(measure_here, case, steps, not isinstance(shape, str)).result()


def measure_here(case: dict[str, Any], steps: int, tiny: bool) -> dict[str, Any]:
    # Workers of loaders are forked, as under the command; a process of a fork server would have it start them.
    multiprocessing.set_start_method("fork", force=True)
    adapter, length, batch, accum = case.get("adapter"), case["sequence"], case["micro_batch"], case["accum"]
    config = Config.from_name(NAMES.get(case["model"], case["model"]), **(SIZES if tiny else {}))
    data = RandomData((steps + 1) * accum, length, config.vocab_size, pretraining=case["compiled"])
    settings: dict[str, Any] = {"precision": case["precision"], "devices": 1, "data": data}
    train = {"global_batch_size": batch * accum, "micro_batch_size": batch, "max_seq_length": length}
    if case["compiled"]:
        command = importlib.import_module("litgpt.pretrain")
        of_command = {"max_tokens": 10**12, "max_norm": 1.0, "lr_warmup_steps": 2000, "tie_embeddings": False}
        settings |= {"model_name": config.name, "model_config": config, "eval": EvalArgs(interval=1000)}
    else:
        command = importlib.import_module(f"litgpt.finetune.{'full' if adapter is None else 'lora'}")
        of_command = {"lr_warmup_steps": 100, "epochs": 5}
        settings["eval"] = EvalArgs(interval=100, max_new_tokens=100)
    if adapter is not None:
        settings |= {switch: name in adapter["targets"] for name, switch in SWITCHES.items()}
        settings["lora_r"] = adapter["rank"]
    if adapter is not None and "quantize" in adapter:
        settings["quantize"] = QUANTIZED[adapter["double_quantized"]]
    with tempfile.TemporaryDirectory() as folder:
        clock = Clock(Task("litgpt", case["model"], length, batch, steps, "", time.time(), folder=folder))
        watch(clock, command, steps)
        torch.set_float32_matmul_precision("high")  # as the command does
        if not case["compiled"]:
            settings["checkpoint_dir"] = checkpoint(Path(folder) / "model", config)
        try:
            with redirect_stdout(StringIO()):
                command.setup(
                    out_dir=Path(folder) / "out", train=TrainArgs(log_interval=1, **train, **of_command), **settings
                )
        except Measured:
            return measured_row(case, clock.result())
        raise AssertionError("The run ended before its last step.")


def watch(clock: Clock, command: Any, steps: int) -> None:
    """Has the clock begin with the command's `fit`, be told of every update, and end the run."""
    fit, nothing, done = command.fit, torch.zeros(()), iter(range(1, steps + 1))

    def measured_fit(*arguments: Any, **named: Any) -> Any:
        clock.begin()
        return fit(*arguments, **named)

    def step_done(*_: Any) -> None:
        clock.step_done(nothing)
        if next(done) == steps:
            raise Measured

    command.fit = measured_fit
    command.load_checkpoint = lambda *_, **__: None
    register_optimizer_step_post_hook(step_done)


def checkpoint(folder: Path, config: Config) -> Path:
    """A checkpoint folder with everything but weights: LitGPT looks for their file before it starts."""
    folder.mkdir()
    save_config(config, folder)
    (folder / "lit_model.pth").touch()
    words = Tokenizer(models.WordLevel({"<eos>": 0}, unk_token="<eos>"))
    words.save(str(folder / "tokenizer.json"))
    special = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    return folder


if __name__ == "__main__":
    run_drawn("Runs of LitGPT that a random generator chose.", draw, 16, measure)
