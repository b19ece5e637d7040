"""Host time of one block of transformers' models, by what is around it: `python benchmarks/gpu/block_host.py FOLDER`.

A step of few tokens takes as long as its host needs to launch the kernels. The difference between models of 12 and of 4
blocks is the host time of 8 blocks, forward and backward, and of their share of the optimizer; what is left is that of
everything else. Writes FOLDER/block_host.json. `--tiny`: on a CPU, to see that it runs.
"""

import argparse
import gc
import json
import sys
import time
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parent))

from peers.models import device, quantize

from shoal.catalogue.shapes import shape_from_sizes
from shoal.models.families import transformers_config

TOKENS, WARMUP, STEPS = 64, 4, 26
FEW, MANY = 4, 12
SIZES = {"hidden": 1024, "heads": 16, "ffn": 2816, "vocab": 2048, "positions": 2048, "tied": True}
FAMILIES = ("llama", "qwen2", "qwen3", "gpt2", "neox")
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# Of llama: adapted layers, and what PEFT or bitsandbytes do around them.
ADAPTERS: dict[str, dict[str, Any]] = {
    "q and v": {"targets": ["q_proj", "v_proj"]},
    "all": {"targets": LINEAR},
    "all, dropout": {"targets": LINEAR, "dropout": 0.05},
    "all, narrow": {"targets": LINEAR, "narrow": True},
    "all, dora": {"targets": LINEAR, "dora": True},
    "q and v, nf4": {"targets": ["q_proj", "v_proj"], "nf4": True},
    "all, nf4": {"targets": LINEAR, "nf4": True},
}
# The dtype of the weights, and whether autocast is on, as the Trainer has it with `bf16=True`.
DTYPES = {
    "bf16": (torch.bfloat16, False),
    "bf16, autocast": (torch.bfloat16, True),
    "fp32, autocast": (torch.float32, True),
}


def seconds(family: str, layers: int, dtype: str, adapter: dict[str, Any] | None, *, recompute: bool) -> float:
    """Of a step: the fastest, since other processes share the host."""
    wide, autocast = DTYPES[dtype]
    sizes = {**SIZES, "ffn": 4096} if family in ("gpt2", "neox") else SIZES
    settings = transformers_config(shape_from_sizes(family=family, layers=layers, **sizes))
    torch.manual_seed(0)
    with device():
        model: Any = AutoModelForCausalLM.from_config(settings, dtype=wide, attn_implementation="sdpa").train()
    if adapter is not None:
        if adapter.get("nf4"):
            quantize(model)
            model.is_loaded_in_4bit = True
            model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
        lora = LoraConfig(
            r=16,
            target_modules=adapter["targets"],
            lora_dropout=adapter.get("dropout", 0.0),
            use_dora=adapter.get("dora", False),
            task_type="CAUSAL_LM",
        )
        model = get_peft_model(model, lora, autocast_adapter_dtype=not adapter.get("narrow"))
    if recompute:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable()
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    tokens = torch.randint(2048, (1, TOKENS), device=device())
    found = []
    for _ in range(WARMUP + STEPS):
        _wait()
        began = time.perf_counter()
        with torch.autocast(device().type, torch.bfloat16) if autocast else nullcontext():
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        _wait()
        found.append(time.perf_counter() - began)
    return min(found[WARMUP:])


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description="Host time of one block of transformers' models.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tiny", action="store_true", help="one case on a CPU")
    given = parser.parse_args()
    cases: list[tuple[str, str, str | None, bool]] = [
        *((family, dtype, None, recompute) for family, dtype, recompute in product(FAMILIES, DTYPES, (False, True))),
        *(
            ("llama", dtype, adapter, recompute)
            for adapter, dtype, recompute in product(ADAPTERS, ("bf16", "bf16, autocast"), (False, True))
        ),
    ]
    given.folder.mkdir(parents=True, exist_ok=True)
    measured = []
    for family, dtype, adapter, recompute in cases[:2] if given.tiny else cases:
        lora = None if adapter is None else ADAPTERS[adapter]
        case = {"family": family, "weights": dtype, "adapter": adapter, "recompute": recompute}
        try:
            few, many = (seconds(family, layers, dtype, lora, recompute=recompute) for layers in (FEW, MANY))
        except Exception as failure:
            print(f"{case}: {type(failure).__name__}: {str(failure)[:200]}", flush=True)
            continue
        finally:
            gc.collect()
        block = (many - few) / (MANY - FEW)
        measured.append({**case, "block_ms": round(1e3 * block, 3), "rest_ms": round(1e3 * (few - FEW * block), 2)})
        print(json.dumps(measured[-1]), flush=True)
        found = {"torch": torch.__version__, "device": str(device()), "cases": measured}
        (given.folder / "block_host.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
