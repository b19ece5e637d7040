"""Runs of Unsloth that a random generator chose, as its notebooks train: `FastLanguageModel` under its SFTTrainer.

    python benchmarks/gpu/drawn_unsloth.py FILE [--count 24] [--seconds 540]

LoRA and QLoRA take turns. Each run has a process of its own, because Unsloth keeps buffers of the largest run. Rows are
asked for as the command is: `--like unsloth` of the month, keys of a config, and the trait of its attention where
neither xFormers nor flash-attn is installed.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

SOURCE, SEED, SYSTEM = "unsloth-h200-drawn", 1911, "unsloth@2026-11"
MODELS = ("llama3.2-1b", "llama3.2-3b", "qwen2.5-1.5b", "qwen3-1.7b", "qwen3-4b", "mistral-7b", "llama3.1-8b")
OPTIMIZERS = {"adamw8bit": "adamw_8bit", "adamw": "adamw_torch_fused"}
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "UNSLOTH_DISABLE_STATISTICS": "1", "UNSLOTH_AUTO_INSTALL": "0"}


def draw(count: int) -> Iterator[dict[str, Any]]:
    from drawn_runs import TARGETS, fits
    from trainer_runs import row

    choice = random.Random(SEED).choice
    drawn = 0
    while drawn < count:
        sequence = choice((512, 1024, 2048, 4096, 8192))
        micro_batch = max(1, choice((1024, 2048, 4096, 8192, 16384)) // sequence)
        adapter: dict[str, Any] = {"rank": choice((8, 16, 64)), "targets": choice((TARGETS[0], *TARGETS))}
        if drawn % 2:
            adapter |= {"quantize": "nf4", "double_quantized": True}
        recompute = choice(("offload", "offload", "none"))
        optimizer = choice(("adamw8bit", "adamw"))
        case = row(choice(MODELS), micro_batch, sequence, "bf16-true", recompute=recompute, adapter=adapter)
        case |= {"source": SOURCE, "system": SYSTEM, "optimizer": optimizer, "accum": choice((1, 1, 2, 4))}
        case |= {"compiled": True, "loss": "fused", "traits": {"pads_attention": True}}
        if fits(case):
            drawn += 1
            yield case


def measure(case: dict[str, Any], steps: int) -> dict[str, Any]:
    """One run, in a process that has imported nothing of transformers before Unsloth."""
    import unsloth  # isort: skip
    import torch
    from datasets import Dataset
    from peers.clock import Clock
    from peers.models import resolve_shape
    from peers.task import Task
    from trainer_runs import measured_row
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    adapter, length, batch, accum = case["adapter"], case["sequence"], case["micro_batch"], case["accum"]
    offload = "unsloth" if case["recompute"] == "offload" else False
    weights = saved(case["model"], length)
    model, tokenizer = unsloth.FastLanguageModel.from_pretrained(
        model_name=str(weights),
        max_seq_length=length,
        dtype=torch.bfloat16,
        load_in_4bit="quantize" in adapter,
        use_gradient_checkpointing=offload,
        local_files_only=True,
    )
    model = unsloth.FastLanguageModel.get_peft_model(
        model,
        r=adapter["rank"],
        target_modules=adapter["targets"],
        lora_alpha=adapter["rank"],
        lora_dropout=0,
        bias="none",
        use_gradient_checkpointing=offload,
    )
    with tempfile.TemporaryDirectory() as folder:
        clock = Clock(Task("unsloth", case["model"], length, batch, steps, "", time.time(), folder=folder))
        nothing = torch.zeros(())

        class StepEnd(TrainerCallback):
            def on_step_end(self, *_: Any, **__: Any) -> None:
                clock.step_done(nothing)

        settings = {} if offload else {"gradient_checkpointing": False}
        arguments = SFTConfig(
            output_dir=folder,
            max_steps=steps,
            max_length=length,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accum,
            optim=OPTIMIZERS[case["optimizer"]],
            bf16=True,
            logging_steps=10**6,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            packing=False,
            **settings,
        )
        generator = torch.Generator().manual_seed(0)
        shape = (steps * batch * accum, length)
        tokens = torch.randint(300, resolve_shape(case["model"]).vocab, shape, generator=generator)
        trainer = SFTTrainer(
            model=model,
            args=arguments,
            train_dataset=Dataset.from_dict({"input_ids": tokens.tolist()}),
            processing_class=tokenizer,
            callbacks=[StepEnd()],
        )
        clock.begin()
        trainer.train()
        found = clock.result()
    return measured_row(case, found)


def saved(name: str, length: int) -> Path:
    """A folder of random weights in bf16, with a tokenizer of bytes, in memory; one at a time."""
    import torch
    from peers.models import build
    from peers.task import Task
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    root = Path("/dev/shm") / "drawn-unsloth"
    folder = root / name
    if folder.exists():
        return folder
    shutil.rmtree(root, ignore_errors=True)
    model = build(Task("unsloth", name, length, 1, 1, "", time.time()), torch.bfloat16)
    model.config.bos_token_id, model.config.eos_token_id, model.config.pad_token_id = 256, 257, 258
    model.generation_config.bos_token_id, model.generation_config.eos_token_id = 256, 257
    begun = root / "begun"
    model.save_pretrained(begun)
    del model
    torch.cuda.empty_cache()
    letters = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    words = Tokenizer(models.BPE(vocab=letters, merges=[]))
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(begun)
    return begun.rename(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs of Unsloth that a random generator chose.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--count", type=int, default=24)
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--case", help="one case as JSON, in this process")
    args = parser.parse_args()
    if args.case is not None:
        from trainer_runs import STEPS, WARMUP

        os.environ.update(ENVIRONMENT)
        found = measure(json.loads(args.case), WARMUP + STEPS)
        with args.file.open("a") as file:
            file.write(json.dumps(found) + "\n")
        return
    from trainer_runs import name

    began = time.monotonic()
    measured = {name(json.loads(line)) for line in args.file.read_text().splitlines()} if args.file.exists() else set()
    for case in draw(args.count):
        left = args.seconds - (time.monotonic() - began)
        if name(case) in measured or left < 30:
            continue
        started = time.monotonic()
        command = [sys.executable, __file__, str(args.file), "--case", json.dumps(case)]
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=min(150, left))
            said = "" if ended.returncode == 0 else (ended.stderr or ended.stdout)[-1500:]
        except subprocess.TimeoutExpired:
            said = "took too long"
        print(f"{name(case)}: {time.monotonic() - started:.0f} s {said}", flush=True)


if __name__ == "__main__":
    main()
