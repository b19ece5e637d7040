"""Memory and speed of runs of Hugging Face's Trainer, as rows that the forecast is compared with.

    python benchmarks/gpu/trainer_runs.py FILE [--only PATTERN ...] [--seconds 540] [--tiny]

A row has the form of `benchmarks/plan/published/rows.jsonl` and is appended to FILE when it is measured; rows that FILE
has are not measured again. Weights are random, sequences too; all other settings are the Trainer's defaults.
"""

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

sys.path.insert(0, str(Path(__file__).parent))

from peers.clock import Clock
from peers.hf_trainer import MeasuredTrainer, StepEnd
from peers.models import build, quantize, resolve_shape
from peers.task import Task
from probe import HostProbe

# Of the libraries: PyTorch 2.11, transformers 5.17, PEFT 0.21, bitsandbytes 0.50.
SOURCE, DATE = "trainer-h200", "26.11"
WARMUP, STEPS = 4, 12
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LORA = {"rank": 16, "targets": LINEAR}
QLORA = {**LORA, "quantize": "nf4", "double_quantized": True, "upcasts": True}
INT8 = {**LORA, "quantize": "int8", "upcasts": True}
QV = {"rank": 8, "targets": ["q_proj", "v_proj"]}
# As the Trainer names them; the first is its default.
OPTIMIZERS = {"adamw": "adamw_torch_fused", "adamw8bit": "adamw_bnb_8bit", "adafactor": "adafactor"}
Measure = Callable[[dict[str, Any], int, Any], dict[str, Any]]  # of a case, a number of steps and a shape: its row
TINY = {
    "family": "llama",
    "hidden": 64,
    "layers": 2,
    "heads": 4,
    "ffn": 128,
    "vocab": 256,
    "positions": 64,
    "tied": True,
}


def cases() -> Iterator[dict[str, Any]]:
    """Weights in bf16 or in fp32, both under the Trainer's autocast (`bf16=True`)."""
    narrow, wide = "bf16-true", "bf16-mixed"
    yield row("qwen3-0.6b", 8, 512, narrow)
    yield row("qwen3-0.6b", 4, 2048, narrow)
    yield row("llama3.2-1b", 1, 512, narrow)
    yield row("llama3.2-1b", 8, 1024, narrow, recompute="full")
    yield row("qwen3-8b", 1, 1024, narrow)
    yield row("qwen3-8b", 1, 4096, narrow)
    yield row("llama3.1-8b", 4, 2048, narrow, recompute="full")
    yield row("llama3.2-1b", 4, 2048, wide)
    yield row("llama3.2-1b", 4, 1024, wide, attention="scores")
    yield row("qwen2.5-0.5b", 8, 1024, wide)
    yield row("gpt2", 16, 1024, wide)
    yield row("pythia-410m", 8, 1024, wide)
    yield row("llama3.2-3b", 2, 2048, wide, recompute="full")
    yield row("llama3.1-8b", 1, 512, narrow, adapter=LORA)
    yield row("llama3.1-8b", 4, 1024, narrow, adapter=LORA)
    yield row("llama3.1-8b", 4, 2048, narrow, adapter=LORA, recompute="full")
    yield row("mistral-7b", 2, 2048, narrow, adapter=QV)
    yield row("qwen3-1.7b", 8, 512, narrow, adapter=LORA)
    yield row("qwen2.5-7b", 2, 1024, narrow, adapter=LORA, recompute="full")
    yield row("llama3.1-8b", 1, 512, narrow, adapter=QLORA, recompute="full")
    yield row("llama3.1-8b", 4, 1024, narrow, adapter=QLORA, recompute="full")
    yield row("llama3.1-8b", 1, 2048, narrow, adapter=QLORA)
    yield row("qwen2.5-7b", 8, 512, narrow, adapter=QLORA, recompute="full")
    yield row("llama3.1-8b", 2, 2048, narrow, adapter=INT8, recompute="full")
    yield row("llama3.1-8b", 1, 512, narrow, adapter=INT8, recompute="full")
    yield row("mistral-7b", 4, 1024, narrow, adapter={**INT8, **QV})


def row(model: str, micro_batch: int, sequence: int, precision: str, **others: Any) -> dict[str, Any]:
    found = {
        "source": SOURCE,
        "date": DATE,
        "system": "huggingface-bf16" if precision == "bf16-true" else "huggingface",
        "model": model,
        "gpu": "h200",
        "gpus": 1,
        "per_node": 1,
        "strategy": "single",
        "mesh": {},
        "sequence": sequence,
        "micro_batch": micro_batch,
        "accum": 1,
        "precision": precision,
        "recompute": others.pop("recompute", "none"),
    }
    return {**found, **others, "compiled": False, "loss": "plain"}


def name(case: dict[str, Any]) -> str:
    adapter = case.get("adapter")
    kind = "full"
    if adapter is not None:
        base = {None: "", "nf4": "q", "int8": "int8-"}[adapter.get("quantize")]
        kind = f"{base}lora-r{adapter['rank']}"
    if adapter is not None and adapter["targets"] != LINEAR:
        kind += f"-{len(adapter['targets'])}"
    others = [case["strategy"]] if case["strategy"] != "single" else []
    others += [str(case[key]) for key in ("attention", "optimizer", "layers", "experts") if key in case]
    if case["recompute"] != "none":
        others.append("recompute")
    if case["compiled"]:
        others.append("compiled")
    if case["accum"] > 1:
        others.append(f"accum{case['accum']}")
    return " ".join([case["model"], f"{case['micro_batch']}x{case['sequence']}", case["precision"], kind, *others])


class RandomTokens(Dataset):
    def __init__(self, count: int, length: int, vocabulary: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(vocabulary, (count, length), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def measure(
    case: dict[str, Any], steps: int, shape: Any, make: Callable[[Task, torch.dtype, str], Any] = build
) -> dict[str, Any]:
    adapter, length = case.get("adapter"), case["sequence"]
    with tempfile.TemporaryDirectory() as folder:
        task = Task("hf_trainer", shape, length, case["micro_batch"], steps, "", time.time(), folder=folder)
        # DeepSpeed has weights in bf16, and makes fp32 masters itself.
        wide = case["precision"] == "bf16-mixed" and case["strategy"] == "single"
        dtype = torch.float32 if wide else torch.bfloat16
        model = make(task, dtype, "eager" if case.get("attention") == "scores" else "sdpa")
        if adapter is not None:
            if "quantize" in adapter:
                quantize(model, adapter["quantize"])
                checkpointing = case["recompute"] == "full"
                model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=checkpointing)
            rank, targets = adapter["rank"], adapter["targets"]
            settings = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets, task_type="CAUSAL_LM")
            model = get_peft_model(model, settings)
        clock = Clock(task)
        callback = StepEnd(clock)
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=case["micro_batch"],
            gradient_accumulation_steps=case["accum"],
            optim=OPTIMIZERS[case.get("optimizer", "adamw")],
            bf16=True,
            gradient_checkpointing=case["recompute"] == "full",
            use_cpu=not clock.cuda,
            logging_steps=10**6,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            deepspeed=deepspeed_config(case["strategy"]),
        )
        data = RandomTokens(steps * case["micro_batch"] * case["accum"], length, resolve_shape(shape).vocab)
        trainer: Trainer = MeasuredTrainer(model=model, args=arguments, train_dataset=data, callbacks=[callback])
        callback.trainer = trainer
        clock.begin()
        trainer.train()
        found = clock.result()
    return measured_row(case, found)


def deepspeed_config(strategy: str) -> dict[str, Any] | None:
    """DeepSpeed's defaults for one of its stages; None without DeepSpeed."""
    if not strategy.startswith("zero"):
        return None
    auto = {"train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"}
    return {
        **dict.fromkeys(auto, "auto"),
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": int(strategy[4:])},
    }


def measured_row(case: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """The case with its memory and its speed, of what a `Clock` has found."""
    seconds = statistics.median(found["step_seconds"][WARMUP:])
    kept = {
        "memory": [round(found["reserved_gib"] or 0.0, 3), "GiB", "reserved"],
        "allocated_gib": round(found["allocated_gib"] or 0.0, 3),
        "tokens_per_second_per_gpu": round(case["micro_batch"] * case["accum"] * case["sequence"] / seconds, 1),
    }
    return {**case, **kept, "unknown": ""}


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory and speed of runs of Hugging Face's Trainer.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", nargs="+", default=[""], metavar="PATTERN")
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--tiny", action="store_true", help="a small shape on a CPU: checks that rows run")
    args = parser.parse_args()
    asked = (case for case in cases() if any(pattern in name(case) for pattern in args.only))
    run_cases(asked, args.file, args.seconds, tiny=args.tiny)


def run_cases(
    asked: Iterable[dict[str, Any]], path: Path, limit: float, *, tiny: bool, measure: Measure = measure
) -> None:
    """Measures what the file does not have until the seconds are over; rows also have the speed of the host."""
    probe = None if tiny else HostProbe()
    measured = {name(json.loads(line)) for line in path.read_text().splitlines()} if path.exists() else set()
    began = time.monotonic()
    for case in asked:
        if name(case) in measured:
            continue
        if time.monotonic() - began > limit:
            print("no time left", flush=True)
            break
        started = time.monotonic()
        try:
            if probe is None:
                found = measure({**case, "micro_batch": 2, "sequence": 32}, WARMUP + 2, TINY)
            else:
                before = probe.block_ms()
                found = measure(case, WARMUP + STEPS, case["model"])
                found["host_block_ms"] = round((before + probe.block_ms()) / 2, 3)
        except Exception as failure:
            print(f"{name(case)}: {type(failure).__name__}: {str(failure)[:300]}", flush=True)
            continue
        finally:
            gc.collect()
            torch.cuda.empty_cache()
        with path.open("a") as file:
            file.write(json.dumps(found) + "\n")
        print(f"{name(case)}: {found['memory'][0]} GiB, {found['tokens_per_second_per_gpu']:,.0f} tokens/s", end="")
        host = f", host {found['host_block_ms']} ms" if "host_block_ms" in found else ""
        print(f"{host}; {time.monotonic() - started:.0f} s", flush=True)


def run_drawn(
    description: str, draw: Callable[[int], Iterable[dict[str, Any]]], count: int, measure: Measure = measure
) -> None:
    """The command of a file whose cases are drawn at random."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("file", type=Path)
    parser.add_argument("--count", type=int, default=count)
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--tiny", action="store_true", help="a small shape on a CPU: checks that rows run")
    args = parser.parse_args()
    run_cases(draw(args.count), args.file, args.seconds, tiny=args.tiny, measure=measure)


if __name__ == "__main__":
    main()
