"""Host time of DeepSpeed's hooks around parameters and modules, and of its steps.

    python benchmarks/gpu/deepspeed_host.py FILE [--ranks 8] [--tiny]

One process is rank 0 of as many as are asked for, with collectives that return at once. Sequences are so short (64
tokens) that the device always waits for its host: what a pass takes longer than without DeepSpeed is its host time.
Each configuration is a line of FILE. `--tiny`: a try on a CPU.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

FAMILIES = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM)}
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
VOCAB, TOKENS, ACCUMULATED, STEPS, WARMUP = 512, 64, 3, 6, 2


def build(family: str, layers: int, hidden: int, *, adapted: bool, checkpointed: bool) -> Any:
    config_class, model_class = FAMILIES[family]
    config = config_class(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        use_cache=False,
        attn_implementation="sdpa",
    )
    model = model_class(config).to(torch.bfloat16)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if adapted:
        model = get_peft_model(model, LoraConfig(r=8, target_modules=TARGETS, task_type="CAUSAL_LM"))
        model.to(torch.bfloat16)
        model.enable_input_require_grads()
    return model.train()


class Plain:
    """The same calls without DeepSpeed, which has clipping and AdamW for weights in bf16."""

    def __init__(self, model: Any) -> None:
        self.model, self.micro_batches = model, 0
        self.trained = [one for one in model.parameters() if one.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-5, fused=True)

    def __call__(self, **inputs: Any) -> Any:
        return self.model(**inputs)

    def backward(self, loss: torch.Tensor) -> None:
        (loss / ACCUMULATED).backward()

    def step(self) -> None:
        self.micro_batches += 1
        if self.micro_batches % ACCUMULATED == 0:
            torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()


def engine(model: Any, stage: int) -> Any:
    if stage == 0:
        return Plain(model)
    trained = [one for one in model.parameters() if one.requires_grad]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": ACCUMULATED,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
    }
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def timed(case: dict[str, Any], layers: int, hidden: int, device: str) -> dict[str, Any]:
    """Milliseconds of the three calls in the median: of micro-batches that end in a step, and of the others."""

    def clock() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    model = build(case["family"], layers, hidden, adapted=case["adapted"], checkpointed=case["checkpointed"])
    tensors = sum(one.requires_grad for one in model.parameters())
    modules = sum(any(True for _ in one.parameters(recurse=False)) for one in model.modules())
    run = engine(model.to(device), case["stage"])
    ids = torch.randint(0, VOCAB, (1, TOKENS), device=device)
    found: dict[bool, list[list[float]]] = {False: [], True: []}
    for index in range(STEPS * ACCUMULATED):
        times = [clock()]
        loss = run(input_ids=ids, labels=ids).loss
        times.append(clock())
        run.backward(loss)
        times.append(clock())
        run.step()
        times.append(clock())
        if index >= WARMUP * ACCUMULATED:
            between = [1e3 * (after - before) for before, after in pairwise(times)]
            found[(index + 1) % ACCUMULATED == 0].append(between)
    medians = {}
    for last, name in ((False, "others_ms"), (True, "last_ms")):
        calls = zip(*found[last], strict=True)
        named = zip(("forward", "backward", "step"), calls, strict=True)
        medians[name] = {call: round(statistics.median(values), 3) for call, values in named}
    return {**case, "layers": layers, "trained_tensors": tensors, "modules": modules, **medians}


def cases() -> Iterator[dict[str, Any]]:
    for family, adapted in (("llama", False), ("qwen2", False), ("llama", True)):
        for checkpointed in (False, True):
            for stage in range(4):
                yield {"family": family, "adapted": adapted, "checkpointed": checkpointed, "stage": stage}


def main() -> None:
    parser = argparse.ArgumentParser(description="Host time of DeepSpeed's hooks.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    os.environ.update(LOCAL_RANK="0", RANK="0", WORLD_SIZE=str(args.ranks))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=args.ranks)
    deepspeed.init_distributed(dist_init_required=False)
    layers, hidden = (2, 64) if args.tiny else (8, 512)
    versions = {"deepspeed": deepspeed.__version__, "torch": torch.__version__, "ranks": args.ranks}
    for case in cases():
        try:
            found = timed(case, layers, hidden, device)
        except Exception as failure:
            print(f"{case}: {type(failure).__name__}: {str(failure)[:300]}", flush=True)
            continue
        with args.file.open("a") as file:
            file.write(json.dumps({**versions, **found}) + "\n")
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
