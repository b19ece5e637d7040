"""Runs of TRL's SFTTrainer that a random generator chose: `drawn_runs.py` with its defaults.

    python benchmarks/gpu/drawn_sft.py FILE [--count 24] [--seconds 540] [--tiny]

Weights are in bf16 under adapters, else in fp32; blocks are checkpointed and the loss is computed in parts, as TRL does
unless it is told otherwise. Full training, LoRA and QLoRA take turns. Its loss is a Triton kernel, which a CPU does not
have: `--tiny` shows that everything before it runs.
"""

import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

from drawn_runs import LARGE, SMALL, TARGETS, fits
from peers.clock import Clock
from peers.hf_trainer import StepEnd
from peers.models import build, quantize, resolve_shape
from peers.task import Task
from trainer_runs import measured_row, row, run_drawn

SOURCE, SEED = "sft-h200-drawn", 1811


def draw(count: int) -> Iterator[dict[str, Any]]:
    choice = random.Random(SEED).choice
    drawn = 0
    while drawn < count:
        kind = ("full", "LoRA", "QLoRA")[drawn % 3]
        sequence = choice((512, 1024, 2048, 4096))
        micro_batch = max(1, choice((2048, 4096, 8192, 16384)) // sequence)
        model, settings = choice(SMALL[6:] if kind == "full" else LARGE), {}
        if kind != "full":
            settings["adapter"] = {"rank": choice((8, 16, 64)), "targets": choice(TARGETS)}
        if kind == "QLoRA":
            settings["adapter"] |= {"quantize": "nf4", "double_quantized": True}
        recompute = choice(("full", "full", "none"))
        precision = "bf16-mixed" if kind == "full" else "bf16-true"
        case = row(model, micro_batch, sequence, precision, recompute=recompute, **settings)
        case |= {"source": SOURCE, "accum": choice((1, 1, 2)), "loss": "chunked"}
        case["system"] = "trl" if kind == "full" else "trl-bf16"
        if fits(case):
            drawn += 1
            yield case


class MeasuredTrainer(SFTTrainer):
    """SFTTrainer, which also keeps the loss of the last step on the device."""

    def training_step(self, *arguments: Any, **named: Any) -> torch.Tensor:
        self.last_loss = super().training_step(*arguments, **named)
        return self.last_loss


def measure(case: dict[str, Any], steps: int, shape: Any) -> dict[str, Any]:
    adapter, length, batch, accum = case.get("adapter"), case["sequence"], case["micro_batch"], case["accum"]
    settings = None
    with tempfile.TemporaryDirectory() as folder:
        task = Task("sft", shape, length, batch, steps, "", time.time(), folder=folder)
        model = build(task, torch.float32 if adapter is None else torch.bfloat16)
        if adapter is not None:
            if "quantize" in adapter:
                quantize(model)
            rank, targets = adapter["rank"], adapter["targets"]
            settings = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets, task_type="CAUSAL_LM")
        clock = Clock(task)
        callback = StepEnd(clock)
        arguments = SFTConfig(
            output_dir=folder,
            max_steps=steps,
            max_length=length,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accum,
            gradient_checkpointing=case["recompute"] == "full",
            bf16=True,
            use_cpu=not clock.cuda,
            logging_steps=10**6,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(2, resolve_shape(shape).vocab, (steps * batch * accum, length), generator=generator)
        trainer = MeasuredTrainer(
            model=model,
            args=arguments,
            train_dataset=Dataset.from_dict({"input_ids": tokens.tolist()}),
            processing_class=empty_tokenizer(),
            peft_config=settings,
            callbacks=[callback],
        )
        callback.trainer = trainer
        clock.begin()
        trainer.train()
        found = clock.result()
    return measured_row(case, found)


def empty_tokenizer() -> PreTrainedTokenizerFast:
    """SFTTrainer asks for one; the sequences are tokens already."""
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


if __name__ == "__main__":
    run_drawn("Runs of TRL's SFTTrainer that a random generator chose.", draw, 24, measure)
