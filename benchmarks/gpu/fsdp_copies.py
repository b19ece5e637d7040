"""Device time that FSDP adds to a block beside its collectives: copies out of what it all-gathers and into what it
reduce-scatters, on the stream that computes.

python benchmarks/gpu/fsdp_copies.py OUTPUT_FOLDER [--tiny]

`copies`: the kernels of FSDP2 alone, by the shapes of a block and the ranks. `blocks`: both passes over blocks of a
Llama, long enough that the device does not wait for its host: unsharded in bf16, under FSDP2 with fp32 shards and a
reduction in fp32 or bf16, under FSDP2 with frozen bf16 weights, and under FSDP1. One process is rank 0 of eight with
collectives that return at once. `--tiny`: a try on a CPU.
"""

import functools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

Shape = tuple[int, int, int, int]  # hidden, intermediate, heads, heads of keys
SHAPES: dict[str, Shape] = {"7b": (4096, 11008, 32, 32), "8b": (4096, 14336, 32, 8), "70b": (8192, 28672, 64, 8)}
TINY: Shape = (128, 256, 4, 4)


def clock(device: str) -> float:
    """The time when the device has finished."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds(function: Callable[[], object], device: str, times: int = 10) -> float:
    """The median of several calls."""
    for _ in range(3):
        function()
    found = []
    for _ in range(times):
        begin = clock(device)
        function()
        found.append(clock(device) - begin)
    return sorted(found)[len(found) // 2]


def repeated(function: Callable[[], object], device: str, times: int = 10) -> float:
    """Seconds of one of several calls in a row, so that launches do not show."""
    return seconds(lambda: [function() for _ in range(times)], device, 5) / times


def matrices(sizes: Shape) -> list[tuple[int, int]]:
    """The parameters of a block."""
    hidden, ffn, heads, keys = sizes
    small = (hidden // heads * keys, hidden)
    wide, norm = (ffn, hidden), (hidden, 1)
    return [(hidden, hidden), small, small, (hidden, hidden), wide, wide, (hidden, ffn), norm, norm]


def copies(shape: str, ranks: int, device: str, *, tiny: bool) -> dict[str, Any]:
    """Milliseconds and GB/s of the copies of one block."""
    held = matrices(TINY if tiny else SHAPES[shape])
    sizes = [rows * columns for rows, columns in held]
    total = sum(sizes)
    gathered = torch.empty(total, dtype=torch.bfloat16, device=device)
    outputs = [torch.empty(size, dtype=torch.bfloat16, device=device) for size in sizes]
    split = [size // ranks for size in sizes]
    views = [one.view(ranks, -1) for one in outputs]
    out = repeated(
        lambda: torch.ops.fsdp.split_with_sizes_copy(gathered.view(ranks, -1), split, dim=1, out=views), device
    )
    grads = [torch.empty(rows, columns, dtype=torch.bfloat16, device=device) for rows, columns in held]
    row: dict[str, Any] = {"shape": shape, "ranks": ranks, "parameters": total, "copy_out_ms": 1e3 * out}
    row["copy_out_gb_per_second"] = 4e-9 * total / out
    for name, dtype, moved in (("fp32", torch.float32, 6), ("bf16", torch.bfloat16, 4)):
        target = torch.empty(ranks, total // ranks, dtype=dtype, device=device)
        into = repeated(
            lambda target=target: torch.ops.fsdp.chunk_cat(grads, dim=0, num_chunks=ranks, out=target), device
        )
        row[f"copy_in_{name}_ms"] = 1e3 * into
        row[f"copy_in_{name}_gb_per_second"] = moved * 1e-9 * total / into
    part = total // ranks
    shard, low = torch.empty(part, device=device), torch.empty(part, dtype=torch.bfloat16, device=device)
    row["cast_of_a_shard_ms"] = 1e3 * repeated(lambda: low.copy_(shard), device)
    plain = torch.empty(total, dtype=torch.bfloat16, device=device)
    row["plain_copy_gb_per_second"] = 4e-9 * total / repeated(lambda: plain.copy_(gathered), device)
    return row


class Blocks(torch.nn.Module):
    """Blocks of a Llama."""

    def __init__(self, sizes: Shape, layers: int, device: str) -> None:
        super().__init__()
        hidden, ffn, heads, keys = sizes
        self.config = LlamaConfig(
            hidden_size=hidden,
            intermediate_size=ffn,
            num_attention_heads=heads,
            num_key_value_heads=keys,
            num_hidden_layers=layers,
            vocab_size=512,
            attn_implementation="sdpa",
            use_cache=False,
        )
        self.layers = torch.nn.ModuleList(LlamaDecoderLayer(self.config, index) for index in range(layers))
        self.rotary = LlamaRotaryEmbedding(self.config)
        self.to(device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[1], device=x.device)[None]
        rotary = self.rotary(x, positions)
        for layer in self.layers:
            found = layer(x, position_embeddings=rotary, attention_mask=None, position_ids=positions)
            x = found[0] if isinstance(found, tuple) else found
        return x


def blocks(
    kind: str, shape: str, layers: int, tokens: int, ranks: int, mesh: Any, *, tiny: bool, compiled: bool
) -> dict[str, Any]:
    """Milliseconds of both passes over a block."""
    device, sizes = mesh.device_type, TINY if tiny else SHAPES[shape]
    with torch.device(device):
        model: Any = Blocks(sizes, layers, device)
    if compiled:
        for layer in model.layers:
            layer.compile()
    if kind in ("unsharded", "frozen", "frozen-fsdp2"):
        model.to(torch.bfloat16)
    if kind.startswith("frozen"):
        model.requires_grad_(False)
    if kind in ("fsdp2", "fsdp2-bf16-reduction", "frozen-fsdp2"):
        reduced = torch.float32 if kind == "fsdp2" else torch.bfloat16
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduced)
        for unit in (*model.layers, model):
            fully_shard(unit, mesh=mesh, mp_policy=policy)
    if kind == "fsdp1":
        low = torch.bfloat16
        model = FullyShardedDataParallel(
            model,
            process_group=mesh.get_group(),
            device_id=torch.cuda.current_device() if device == "cuda" else None,
            auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer}),
            mixed_precision=MixedPrecision(param_dtype=low, reduce_dtype=torch.float32, buffer_dtype=low),
            use_orig_params=True,
        )
    x = torch.rand(1, tokens, sizes[0], device=device, dtype=torch.bfloat16, requires_grad=True)

    def both() -> None:
        model(x).float().mean().backward()
        model.zero_grad(set_to_none=True)

    took = seconds(both, device, 6)
    count = sum(one.numel() for one in model.parameters()) / layers
    found = {"kind": kind, "shape": shape, "tokens": tokens, "ranks": ranks, "layers": layers, "compiled": compiled}
    return {**found, "parameters_per_block": count, "ms_per_block": 1e3 * took / layers}


def main() -> None:
    folder, tiny = Path(sys.argv[1]), "--tiny" in sys.argv
    folder.mkdir(parents=True, exist_ok=True)
    device = "cpu" if tiny else "cuda"
    ranks = 8
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    mesh = init_device_mesh(device, (ranks,), mesh_dim_names=("dp",))
    name = "cpu" if tiny else torch.cuda.get_device_name()
    found: dict[str, Any] = {"device": name, "torch": torch.__version__, "copies": [], "blocks": []}

    def save(part: str, row: dict[str, Any]) -> None:
        print(json.dumps(row), flush=True)
        found[part].append(row)
        (folder / "fsdp_copies.json").write_text(json.dumps(found, indent=1))

    for shape in ("7b",) if tiny else SHAPES:
        for of in (2, 8, 64):
            save("copies", copies(shape, of, device, tiny=tiny))
    kinds = ("unsharded", "fsdp2", "fsdp2-bf16-reduction", "fsdp1", "frozen", "frozen-fsdp2")
    cases = [("7b", 2, 64)] if tiny else [("8b", 8, 4096), ("8b", 8, 16384), ("70b", 4, 4096)]
    for shape, layers, tokens in cases:
        for compiled in (False,) if tiny else (False, True):
            for kind in kinds:
                if (compiled and (kind == "fsdp1" or tokens > 4096)) or (tiny and kind == "fsdp1"):
                    continue
                torch._dynamo.reset()
                save("blocks", blocks(kind, shape, layers, tokens, ranks, mesh, tiny=tiny, compiled=compiled))
                if device == "cuda":
                    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
