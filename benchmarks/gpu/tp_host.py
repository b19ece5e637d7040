"""Host time per block and micro-batch of uncompiled tensor parallelism with DTensors, and of AdamW over DTensors.

python benchmarks/gpu/tp_host.py OUTPUT_FOLDER [--tiny]

One process is rank 0 of eight with collectives that return at once. Sequences are so short that the device always waits
for its host. Layouts: `plain` (no parallelism), `local` (as torchtitan's Llama: layers return local tensors, the
residual stream is sharded along the sequence), `replicated` (the same with the whole sequence on every rank),
`distributed` (as torchtitan's Qwen3: queries and keys stay DTensors through their norms and rotation). `--tiny`: a try
on a CPU.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

TOKENS, STEPS, WARMUP, HEADS, KEY_HEADS, TP = 64, 10, 3, 16, 8, 8
STEPPED = {"single": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


class Attention(nn.Module):
    """Attention with rotary embeddings, and norms of queries and keys if `normed`."""

    def __init__(self, hidden: int, *, normed: bool) -> None:
        super().__init__()
        self.size = hidden // HEADS
        self.wq = nn.Linear(hidden, hidden, bias=False)
        self.wk = nn.Linear(hidden, KEY_HEADS * self.size, bias=False)
        self.wv = nn.Linear(hidden, KEY_HEADS * self.size, bias=False)
        self.wo = nn.Linear(hidden, hidden, bias=False)
        self.q_norm = nn.RMSNorm(self.size, eps=1e-6) if normed else None
        self.k_norm = nn.RMSNorm(self.size, eps=1e-6) if normed else None

    def forward(self, x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q = self.wq(x).view(batch, length, -1, self.size)
        k = self.wk(x).view(batch, length, -1, self.size)
        v = self.wv(x).view(batch, length, -1, self.size)
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, rope), rotate(k, rope)
        k, v = repeat(k), repeat(v)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if isinstance(q, DTensor):
            mesh, layout = q.device_mesh, q.placements
            out = nn.functional.scaled_dot_product_attention(q.to_local(), k.to_local(), v.to_local(), is_causal=True)
            out = DTensor.from_local(out, mesh, layout, run_check=False)
        else:
            out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out = out.transpose(1, 2).contiguous().view(batch, length, -1)
        return self.wo(out)


def rotate(x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Rotary embeddings."""
    size = x.shape[-1]
    cos, sin = rope[..., :size], rope[..., size:]
    first, second = x[..., : size // 2], x[..., size // 2 :]
    turned = torch.cat((-second, first), dim=-1)
    return (x * cos + turned * sin).type_as(x)


def repeat(x: torch.Tensor) -> torch.Tensor:
    """Keys or values for every head of the queries."""
    batch, length, heads, size = x.shape
    times = HEADS // KEY_HEADS
    return x.unsqueeze(3).expand(batch, length, heads, times, size).reshape(batch, length, heads * times, size)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(hidden, 3 * hidden, bias=False)
        self.w2 = nn.Linear(3 * hidden, hidden, bias=False)
        self.w3 = nn.Linear(hidden, 3 * hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """A decoder layer."""

    def __init__(self, hidden: int, *, normed: bool) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(hidden, eps=1e-6), nn.RMSNorm(hidden, eps=1e-6)
        self.attention, self.feed_forward = Attention(hidden, normed=normed), FeedForward(hidden)

    def forward(self, x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), rope)
        return x + self.feed_forward(self.ffn_norm(x))


def plan(layout: str) -> dict[str, Any]:
    """torchtitan's plans for Llama and Qwen3 (models/*/infra/parallelize.py), and one without sequence parallelism."""
    if layout == "replicated":
        return {
            **{f"attention.w{name}": ColwiseParallel() for name in "qkv"},
            "attention.wo": RowwiseParallel(),
            "feed_forward.w1": ColwiseParallel(),
            "feed_forward.w3": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(),
        }
    kept = {"use_local_output": False} if layout == "distributed" else {}
    rope = Replicate() if layout == "distributed" else None
    found = {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=(Shard(1), rope), desired_input_layouts=(Replicate(), rope)),
        **{f"attention.w{name}": ColwiseParallel(**kept) for name in "qkv"},
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "ffn_norm": SequenceParallel(),
        "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w3": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
    }
    if layout == "distributed":
        found["attention.q_norm"] = found["attention.k_norm"] = SequenceParallel(sequence_dim=2)
    return found


def clock(device: str) -> float:
    """The time when the device has finished."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def build(layout: str, layers: int, hidden: int, mesh: Any, *, checkpointed: bool) -> nn.ModuleList:
    """Blocks in a layout."""
    blocks = nn.ModuleList(Block(hidden, normed=layout == "distributed") for _ in range(layers))
    blocks = blocks.to(device=mesh.device_type, dtype=torch.bfloat16)
    for index, block in enumerate(blocks):
        if layout != "plain":
            parallelize_module(block, mesh, plan(layout))
        if checkpointed:
            blocks[index] = checkpoint_wrapper(block, preserve_rng_state=False)
    return blocks


def passes(blocks: nn.ModuleList, layout: str, hidden: int, device: str) -> list[float]:
    """Seconds of both passes, sorted."""
    length = TOKENS if layout in ("plain", "replicated") else TOKENS // TP  # of the residual stream
    rope = torch.rand(1, TOKENS, 1, 2 * hidden // HEADS, device=device, dtype=torch.bfloat16)
    found = []
    for _ in range(STEPS):
        x = torch.rand(1, length, hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
        begin = clock(device)
        for block in blocks:
            x = block(x, rope)
        x.float().mean().backward()
        found.append(clock(device) - begin)
    return sorted(found[WARMUP:])


def updates(blocks: nn.ModuleList, device: str, **options: Any) -> float:
    """Milliseconds per tensor of an AdamW step."""
    held = [one for one in blocks.parameters() if one.grad is not None and isinstance(one, DTensor)]
    optimizer, found = torch.optim.AdamW(held, lr=1e-4, **options), []
    for _ in range(5):
        begin = clock(device)
        optimizer.step()
        found.append(clock(device) - begin)
    return 1e3 * sorted(found[2:])[1] / len(held)


def main() -> None:
    folder, tiny = Path(sys.argv[1]), "--tiny" in sys.argv
    folder.mkdir(parents=True, exist_ok=True)
    device, layers, hidden = ("cpu", 3, 128) if tiny else ("cuda", 16, 1024)
    dist.init_process_group("fake", rank=0, world_size=TP, store=FakeStore())
    mesh = init_device_mesh(device, (TP,), mesh_dim_names=("tp",))
    name = "cpu" if tiny else torch.cuda.get_device_name()
    rows: list[dict[str, Any]] = []
    found = {"device": name, "torch": torch.__version__, "layers": layers, "hidden": hidden, "rows": rows}
    for layout in ("plain", "replicated", "local", "distributed"):
        for checkpointed in (False, True):
            blocks = build(layout, layers, hidden, mesh, checkpointed=checkpointed)
            times = passes(blocks, layout, hidden, device)
            row: dict[str, Any] = {"layout": layout, "checkpointed": checkpointed}
            row["ms_per_block"] = 1e3 * times[len(times) // 2] / layers
            row["least_ms_per_block"] = 1e3 * times[0] / layers
            if layout != "plain" and not checkpointed:
                for kind, options in STEPPED.items():
                    row[f"adamw_{kind}_ms_per_tensor"] = updates(blocks, device, **options)
            rows.append(row)
            print(json.dumps(row), flush=True)
            (folder / "tp_host.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
