"""Context parallelism on one GPU: what a rank computes, with collectives that return at once.

    python benchmarks/gpu/context.py OUTPUT.json [--layers N]

Two questions. What a rank of our own context parallelism takes and needs, beside the forecast (`shoal bench rank`); and
what PyTorch's ring attention takes for its pieces, beside one causal attention with as many scores, which is all that
the forecast has of its compute but the merges.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

# Llama 3 8B's blocks, of which a few are enough: time per block is what is compared.
TOKENS, HEADS, WIDTH = 8192, 32, 128
DEGREES = (1, 2, 4, 8)
WARMUP, STEPS = 3, 8


def our_rank(cp: int, method: str, layers: int) -> dict[str, Any]:
    """A rank of `cp`, each with as many tokens, by `shoal bench rank`."""
    settings = [
        *(
            f"model.shape={{family: llama, hidden: 4096, layers: {layers}, heads: 32, kv_heads: 8, ffn: 14336, "
            f"vocab: 128256, positions: {TOKENS * 8}}}",
        ),
        *("model.tokenizer=bytes", "data.source=text", "data.path=src/shoal/**/*.py", f"data.max_length={TOKENS * cp}"),
        *(
            "train.steps=100",
            "train.micro_batch=1",
            f"train.global_batch={2 if cp == 1 else 1}",
            "train.recompute=full",
        ),
        *("train.precision=bf16-mixed", "parallel.strategy=fsdp", f"parallel.cp={cp}", f"parallel.cp_method={method}"),
    ]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "context.yaml")
        file.write_text("name: context\n")
        command = [sys.executable, "-m", "shoal", "bench", "rank", str(file), *settings]
        command += ["--world", str(max(cp, 2)), "--steps", str(STEPS), "--warmup", str(WARMUP), "--json"]
        ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode != 0:
        return {"error": ended.stderr[-600:]}
    found: dict[str, Any] = json.loads(ended.stdout)
    return {key: found[key] for key in ("forecast", "measured", "difference")}


def ring(cp: int) -> dict[str, float]:
    """Milliseconds of PyTorch's ring attention of the last rank, forward and both passes, and of plain attention."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=cp - 1, world_size=cp, store=FakeStore())
    mesh = init_device_mesh("cuda", (cp,))

    def tensors(length: int) -> list[torch.Tensor]:
        return [
            torch.randn(1, HEADS, length, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for _ in range(3)
        ]

    def timed(attend: Any, inputs: list[torch.Tensor], gradient: torch.Tensor) -> tuple[float, float]:
        found: list[tuple[float, float]] = []
        for step in range(WARMUP + STEPS):
            begin, between, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
            begin.record()
            out = attend(*inputs)
            between.record()
            torch.autograd.grad(out, inputs, gradient)
            end.record()
            end.synchronize()
            if step >= WARMUP:
                found.append((begin.elapsed_time(between), begin.elapsed_time(end)))
        return sorted(one[0] for one in found)[STEPS // 2], sorted(one[1] for one in found)[STEPS // 2]

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    found: dict[str, float] = {}
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        name = backend.name.split("_")[0].lower()
        with sdpa_kernel(backend):
            # As many scores as a rank of `cp` has: its queries with half of all keys.
            inputs = tensors(int(TOKENS * cp**0.5))
            both = timed(attend, inputs, torch.randn_like(inputs[0]))
            found[f"{name} plain forward"], found[f"{name} plain"] = both
            inputs = tensors(TOKENS)
            try:
                rows = torch.zeros(1, TOKENS * cp, device="cuda")
                with context_parallel(mesh, buffers=[rows], buffer_seq_dims=[1]):
                    both = timed(attend, inputs, torch.randn_like(inputs[0]))
                found[f"{name} ring forward"], found[f"{name} ring"] = both
            except Exception as error:  # a kernel without ring attention
                found[f"{name} failed: {type(error).__name__} {str(error)[:200]}"] = 0.0
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Context parallelism on one GPU.")
    parser.add_argument("output", type=Path)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--ring", type=int, help="only the ring of this many ranks, in this process")
    given = parser.parse_args()
    if given.ring:
        print(json.dumps(ring(given.ring)))
        return
    found: dict[str, Any] = {"ring": {}, "ours": {}}
    for cp in DEGREES[1:]:
        command = [sys.executable, __file__, str(given.output), "--ring", str(cp)]
        ended = subprocess.run(command, capture_output=True, text=True)
        lines = ended.stdout.strip().splitlines()
        found["ring"][cp] = json.loads(lines[-1]) if ended.returncode == 0 else ended.stderr[-800:]
        print(cp, found["ring"][cp], flush=True)
    given.output.write_text(json.dumps(found, indent=1) + "\n")
    for cp in DEGREES:
        for method in ("gather", "ulysses") if cp > 1 else ("gather",):
            one = our_rank(cp, method, given.layers)
            found["ours"][f"cp {cp} {method}"] = one
            print(cp, method, one.get("difference", one), flush=True)
            given.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
