"""What adapters cost on one GPU: thin matmuls, PyTorch's elementwise kernels, NF4 dequantization, and whole blocks.

    python benchmarks/gpu/adapter_kernels.py FOLDER [--tiny] [--only PATTERN]

Matmuls of a rank in bf16, fp16 and fp32; bandwidth of elementwise kernels by size; bitsandbytes' dequantization by
size; seconds of a Llama block with PEFT's adapters, forward and backward, with and without autocast, quantized, with
dropout, as half of the difference of models of three blocks and of one: on the device (long sequences) and on the host
(64 tokens). Writes FOLDER/adapters.json, with PATTERN only FOLDER/blocks.json of these cases. Three minutes on an
H200. `--tiny`: on a CPU, to see that it runs.
"""

import json
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import bitsandbytes
import torch
from bitsandbytes import functional
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, LlamaConfig

TINY = "--tiny" in sys.argv
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EVERY = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES: dict[str, dict[str, Any]] = {
    "none": {"targets": []},
    "all": {"targets": EVERY},
    "all, r 64": {"targets": EVERY, "rank": 64},
    "q v": {"targets": ["q_proj", "v_proj"]},
    "all, dropout": {"targets": EVERY, "dropout": 0.05},
    "all, narrow": {"targets": EVERY, "narrow": True},
    "all, narrow, dropout": {"targets": EVERY, "narrow": True, "dropout": 0.05},
    "all, nf4, upcast": {"targets": EVERY, "nf4": True, "upcast": True},
    "all, nf4": {"targets": EVERY, "nf4": True},
    "all, nf4, narrow": {"targets": EVERY, "nf4": True, "narrow": True},
    "all, dora": {"targets": EVERY, "dora": True},
    "all, dora, dropout": {"targets": EVERY, "dora": True, "dropout": 0.05},
    "all, dora, nf4": {"targets": EVERY, "dora": True, "nf4": True},
}
SIZES = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336}
TINY_SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128}
BATCHES = ((1, 16),) if TINY else ((1, 64), (1, 1024), (4, 2048))
HOST_TOKENS = 64  # so few that a step takes as long as its host


def timed(call: Callable[[], object], budget: float = 0.02) -> float:
    """Seconds of one call on the device: the median of five rounds."""
    for _ in range(2):
        call()
    if not CUDA:
        began = time.perf_counter()
        call()
        return time.perf_counter() - began
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def milliseconds(times: int) -> float:
        start.record()
        for _ in range(times):
            call()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) / times

    times = max(3, min(200, int(budget / 5 / max(1e-6, milliseconds(1) / 1e3))))
    return sorted(milliseconds(times) for _ in range(5))[2] / 1e3


def on_host(call: Callable[[], object]) -> float:
    """Seconds of one call, with its host: the fastest, since other processes share it."""
    found = []
    for _ in range(25):
        _wait()
        began = time.perf_counter()
        call()
        _wait()
        found.append(time.perf_counter() - began)
    return min(found[5:])


def _wait() -> None:
    if CUDA:
        torch.cuda.synchronize()


def matmuls() -> list[dict[str, Any]]:
    torch.backends.cuda.matmul.allow_tf32 = False
    found: list[dict[str, Any]] = []
    tokens, widths, ranks = (2048, 16384), (2048, 4096, 14336), (8, 16, 32, 64, 128, 256)
    if TINY:
        tokens, widths, ranks = (64,), (128,), (8,)
    for dtype in (BF16, FP16, FP32):
        shapes = [(rows, width, rank) for rows in tokens for width in widths for rank in ranks]
        found += [adapter_matmuls(dtype, *shape) for shape in shapes]
        side = 64 if TINY else 4096
        for inner in (16,) if TINY else (16, 32, 64, 128, 256, 512, 1024, 2048, 4096):
            x, y = (torch.randn(*sizes, device=DEVICE, dtype=dtype) for sizes in ((side, inner), (inner, side)))
            seconds = timed(lambda x=x, y=y: x @ y, 0.04)
            found.append({"dtype": str(dtype)[6:], "square": side, "inner": inner, "us": round(1e6 * seconds, 2)})
    return found


def adapter_matmuls(dtype: torch.dtype, rows: int, width: int, rank: int) -> dict[str, Any]:
    """Microseconds of the six matmuls of an adapter between two layers of one width."""
    x, thin = (torch.randn(rows, size, device=DEVICE, dtype=dtype) for size in (width, rank))
    a = torch.randn(rank, width, device=DEVICE, dtype=dtype)
    b = torch.randn(width, rank, device=DEVICE, dtype=dtype)
    calls: dict[str, Callable[[], object]] = {
        "A x": lambda: x @ a.t(),
        "B (A x)": lambda: thin @ b.t(),
        "grad A": lambda: thin.t() @ x,
        "grad B": lambda: x.t() @ thin,
        "grad x": lambda: thin @ a,
        "grad A x": lambda: x @ b,
    }
    found = {"dtype": str(dtype)[6:], "tokens": rows, "width": width, "rank": rank}
    return {**found, **{name: round(1e6 * timed(call), 2) for name, call in calls.items()}}


def elementwise() -> list[dict[str, Any]]:
    """TB/s of elementwise kernels."""
    found = []
    for size in [1 << 10] if TINY else [1 << 20, 1 << 22, 1 << 24, 1 << 26, 1 << 28]:
        x, wide = torch.randn(size, device=DEVICE, dtype=BF16), torch.randn(size, device=DEVICE)
        y = torch.randn_like(x)
        calls: dict[str, tuple[Callable[[], object], int]] = {
            "cast up": (x.float, 6),
            "cast down": (wide.bfloat16, 6),
            "scale": (lambda x=x: x * 2.0, 4),
            "add": (lambda x=x, y=y: x + y, 6),
            "add mixed": (lambda x=x, wide=wide: x + wide, 10),
            "copy": (x.clone, 4),
            "silu": (lambda x=x: torch.nn.functional.silu(x), 4),
            "dropout": (lambda x=x: torch.native_dropout(x, 0.05, True), 5),
            "dropout fp32": (lambda wide=wide: torch.native_dropout(wide, 0.05, True), 9),
        }
        rates = {name: round(size * moved / timed(call) / 1e12, 3) for name, (call, moved) in calls.items()}
        found.append({"elements": size, **rates})
    return found


def dequantization() -> list[dict[str, Any]]:
    found = []
    shapes = [(64, 64)] if TINY else [(1024, 4096), (4096, 4096), (14336, 4096), (8192, 8192), (28672, 8192)]
    for shape in shapes:
        for dtype in (BF16, FP16):
            for nested in (False, True):
                weight = torch.randn(shape, device=DEVICE, dtype=dtype)
                packed, state = functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=nested)
                seconds = timed(lambda p=packed, s=state: functional.dequantize_4bit(p, s))
                one = {"shape": shape, "dtype": str(dtype)[6:], "double": nested}
                found.append({**one, "us": round(1e6 * seconds, 2)})
    return found


def build(layers: int, case: dict[str, Any]) -> Any:
    """A Llama with PEFT's adapters, or frozen."""
    sizes = TINY_SIZES if TINY else SIZES
    config = LlamaConfig(num_hidden_layers=layers, vocab_size=512, max_position_embeddings=4096, **sizes)
    torch.manual_seed(0)
    with DEVICE:
        model: Any = AutoModelForCausalLM.from_config(config, dtype=BF16, attn_implementation="sdpa").train()
    if case.get("nf4"):
        for block in model.model.layers:
            for part in (block.self_attn, block.mlp):
                quantize(part)
        model.is_loaded_in_4bit = True
    if case.get("upcast"):
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    model.requires_grad_(requires_grad=False)
    if case["targets"]:
        lora = LoraConfig(
            r=case.get("rank", 16),
            target_modules=case["targets"],
            lora_dropout=case.get("dropout", 0.0),
            use_dora=case.get("dora", False),
            task_type="CAUSAL_LM",
        )
        model = get_peft_model(model, lora, autocast_adapter_dtype=not case.get("narrow"))
        for name, parameter in model.named_parameters():
            if case.get("narrow") and "lora_" in name:
                parameter.data = parameter.data.bfloat16()
    model.enable_input_require_grads()
    return model


def quantize(part: torch.nn.Module) -> None:
    for name, layer in list(part.named_children()):
        if isinstance(layer, torch.nn.Linear):
            settings = {"bias": False, "quant_type": "nf4", "compute_dtype": BF16, "compress_statistics": True}
            four = bitsandbytes.nn.Linear4bit(layer.in_features, layer.out_features, **settings)
            four.load_state_dict({"weight": layer.weight.data.cpu()})
            setattr(part, name, four.to(DEVICE))


def block_seconds(layers: int, case: dict[str, Any], batch: tuple[int, int], *, autocast: bool) -> tuple[float, float]:
    """Seconds of the forward pass, and of both; of few tokens only both."""
    model = build(layers, case)
    ids = torch.randint(512, batch, device=DEVICE)

    def forward() -> torch.Tensor:
        with torch.autocast(DEVICE.type, BF16) if autocast else nullcontext():
            return model(input_ids=ids, use_cache=False).logits.float().mean()

    def both() -> None:
        forward().backward()

    if batch[0] * batch[1] == HOST_TOKENS or not CUDA:
        return 0.0, on_host(both)
    return timed(forward, 0.1), timed(both, 0.2)


def block(name: str, *, autocast: bool) -> dict[str, Any]:
    """Milliseconds of one block."""
    found: dict[str, Any] = {"case": name, "autocast": autocast}
    for batch in BATCHES:
        one, three = (block_seconds(layers, CASES[name], batch, autocast=autocast) for layers in (1, 3))
        ahead, both = (round(1e3 * (more - less) / 2, 3) for less, more in zip(one, three, strict=True))
        found[f"{batch[0]}x{batch[1]}"] = {"forward ms": ahead, "both ms": both}
    print(json.dumps(found), flush=True)
    return found


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    only = sys.argv[sys.argv.index("--only") + 1] if "--only" in sys.argv else ""
    cases = [name for name in CASES if only in name]
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if CUDA else "cpu",
        "blocks": [block(name, autocast=autocast) for name in cases for autocast in (False, True)],
    }
    if not only:
        found |= {"matmuls": matmuls(), "elementwise TB/s": elementwise(), "dequantization": dequantization()}
    (folder / ("blocks.json" if only else "adapters.json")).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
