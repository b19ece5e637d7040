"""Host time per block and micro-batch of FSDP2's hooks, activation checkpointing and torch.compile, and of AdamW.

python benchmarks/gpu/fsdp_host.py OUTPUT_FOLDER [--tiny]

One process is rank 0 of eight with collectives that return at once. Sequences are so short (64 tokens) that the device
always waits for its host: the time of both passes over the number of blocks is host time. `--tiny`: a try on a CPU.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

FAMILIES = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}
VOCAB, TOKENS, STEPS, WARMUP = 512, 64, 12, 4


def clock(device: str) -> float:
    """The time when the device has finished."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def build(
    family: str, layers: int, hidden: int, mesh: Any, *, sharded: bool, checkpointed: bool, compiled: bool
) -> Any:
    """A model of transformers whose blocks are checkpointed, compiled and sharded, in this order."""
    config_class, model_class = FAMILIES[family]
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": hidden // 8}
    config = config_class(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        use_cache=False,
        attn_implementation="sdpa",
        **sizes,
    )
    model = model_class(config).to(mesh.device_type)
    blocks = model.model.layers
    for index in range(layers):
        if checkpointed:
            blocks[index] = checkpoint_wrapper(blocks[index], preserve_rng_state=False)
        if compiled:
            blocks[index].compile()
    if not sharded:
        return model.to(torch.bfloat16)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for unit in (*blocks, model):
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    return model


def passes(model: Any, device: str) -> list[float]:
    """Seconds of forward and backward pass, step by step."""
    ids = torch.randint(0, VOCAB, (1, TOKENS), device=device)
    found = []
    for step in range(STEPS):
        begin = clock(device)
        model(input_ids=ids).logits.float().mean().backward()
        found.append(clock(device) - begin)
        if step < STEPS - 1:
            model.zero_grad()
    return sorted(found[WARMUP:])


def updates(model: Any, device: str, **options: Any) -> dict[str, float]:
    """Milliseconds that the host takes to clip and to update DTensors, and that both take until the device is done."""
    held = list(model.parameters())
    optimizer, found = torch.optim.AdamW(held, lr=1e-4, **options), []
    for _ in range(6):
        begin = clock(device)
        norm: Any = torch.nn.utils.get_total_norm([one.grad for one in held], foreach=True)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        torch.nn.utils.clip_grads_with_norm_(held, 1.0, norm, foreach=True)
        clipped = time.perf_counter()
        optimizer.step()
        found.append((clipped - begin, time.perf_counter() - clipped, clock(device) - begin))
    clip, step, both = sorted(found[2:], key=lambda one: one[2])[1]
    return {"clip_ms": 1e3 * clip, "step_ms": 1e3 * step, "all_ms": 1e3 * both}


def main() -> None:
    folder, tiny = Path(sys.argv[1]), "--tiny" in sys.argv
    folder.mkdir(parents=True, exist_ok=True)
    device, layers, hidden = ("cpu", 4, 64) if tiny else ("cuda", 24, 1024)
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    mesh = init_device_mesh(device, (8,), mesh_dim_names=("dp",))
    name = "cpu" if tiny else torch.cuda.get_device_name()
    found: dict[str, Any] = {"device": name, "torch": torch.__version__, "layers": layers, "hidden": hidden, "rows": []}
    choices = (False,) if tiny else (False, True)
    for family, compiled in ((one, two) for one in FAMILIES for two in choices):
        for sharded, checkpointed in ((one, two) for one in (False, True) for two in (False, True)):
            if family == "qwen3" and not sharded:
                continue
            torch._dynamo.reset()
            kind = {"compiled": compiled, "sharded": sharded, "checkpointed": checkpointed}
            model = build(family, layers, hidden, mesh, **kind)
            times = passes(model, device)
            row: dict[str, Any] = {"family": family, **kind, "ms_per_block": 1e3 * times[len(times) // 2] / layers}
            row["least_ms_per_block"] = 1e3 * times[0] / layers
            if sharded and not compiled and not checkpointed:
                row["parameters"] = len(list(model.parameters()))
                row["foreach"] = updates(model, device, foreach=True)
                row["fused"] = updates(model, device, fused=True)
            print(json.dumps(row), flush=True)
            found["rows"].append(row)
            (folder / "host.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
