"""Steps of a GPT-2 on one GPU: what the host takes to launch them, and what their kernels take, by kind.

python benchmarks/gpu/small_gpt.py FOLDER [--tiny]

With one sequence, so that the device waits for its host, and with 32: eager, compiled as one graph, and block by block.
Also matmuls of such models alone, for half a second each. Writes `small_gpt.json`.
"""

import json
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

TINY = "--tiny" in sys.argv
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
HIDDEN, HEADS, LAYERS, VOCAB, LENGTH = (64, 2, 2, 512, 64) if TINY else (768, 12, 12, 50304, 1024)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = (one.view(b, t, HEADS, c // HEADS).transpose(1, 2) for one in self.qkv(self.n1(x)).split(c, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).contiguous().view(b, t, c))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(LENGTH, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits, F.cross_entropy(logits.view(-1, VOCAB), labels.view(-1))


def wait() -> None:
    if CUDA:
        torch.cuda.synchronize()


def kind(name: str) -> str:
    low = name.lower()
    if any(one in low for one in ("flash", "fmha", "sdpa", "attention")):
        return "attention"
    if any(one in low for one in ("gemm", "nvjet", "xmma", "cutlass", "cublas")):
        return "matmuls"
    if "memcpy" in low or "memset" in low:
        return "copies"
    if "multi_tensor" in low or "adam" in low:
        return "optimizer"
    return "elementwise"


def run(how: str, sequences: int, steps: int) -> dict:
    torch.manual_seed(0)
    if hasattr(torch, "_dynamo"):
        torch._dynamo.reset()
    model = Model().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=CUDA)
    called = model
    backend = "aot_eager" if TINY else "inductor"
    if how == "graph":
        called = torch.compile(model, dynamic=False, backend=backend)
    elif how == "blocks":
        for index, block in enumerate(model.blocks):
            model.blocks[index] = torch.compile(block, dynamic=False, backend=backend)
    ids = torch.randint(0, VOCAB, (sequences, LENGTH), device=DEVICE)

    def passes() -> None:
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            _, loss = called(ids, ids)
        loss.backward()

    def step() -> None:
        passes()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    began = time.perf_counter()
    for _ in range(2 if TINY else 6):
        step()
    wait()
    compiled = time.perf_counter() - began
    whole, launched, of_passes = [], [], []
    for _ in range(steps):
        wait()
        began = time.perf_counter()
        passes()
        of_passes.append(time.perf_counter() - began)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        launched.append(time.perf_counter() - began)
        wait()
        whole.append(time.perf_counter() - began)
    wait()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    wait()
    streamed = (time.perf_counter() - began) / steps
    found = {
        "how": how,
        "sequences": sequences,
        "compile_s": round(compiled, 1),
        "step_ms": round(1e3 * streamed, 3),
        "synchronized_step_ms": round(1e3 * statistics.median(whole), 3),
        "host_of_passes_ms": round(1e3 * statistics.median(of_passes), 3),
        "host_of_step_ms": round(1e3 * statistics.median(launched), 3),
    }
    if CUDA:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(3):
                step()
            wait()
        kinds: dict[str, float] = {}
        names = []
        for one in profile.key_averages():
            each = one.self_device_time_total / 3e3
            if each <= 0:
                continue
            kinds[kind(one.key)] = kinds.get(kind(one.key), 0.0) + each
            names.append((round(each, 4), one.count // 3, one.key[:120]))
        found["kinds_ms"] = {key: round(value, 3) for key, value in kinds.items()}
        found["kernels_per_step"] = sum(count for _, count, _ in names)
        found["kernels"] = sorted(names, reverse=True)[:40]
    return found


def linear() -> dict:
    """Seconds of the host for one nn.Linear of 8,192 tokens and 2,048 channels in bf16."""
    layer = nn.Linear(2048, 2048, bias=False, device=DEVICE, dtype=torch.bfloat16)
    inputs = torch.randn(8 if TINY else 8192, 2048, device=DEVICE, dtype=torch.bfloat16)
    found = {}
    for name, context in (("forward", torch.enable_grad()), ("forward_no_grad", torch.no_grad())):
        times = []
        with context:
            for _ in range(20):
                wait()
                began = time.perf_counter()
                for _ in range(20):
                    layer(inputs)
                times.append((time.perf_counter() - began) / 20)
                wait()
        found[name + "_us"] = round(1e6 * statistics.median(times), 2)
    return found


def matmuls() -> list[dict]:
    """TFLOP/s of the shapes of small models, alone and one after the other for half a second."""
    found = []
    shapes = [(32768, 768, 2304), (32768, 768, 3072), (32768, 3072, 768), (768, 32768, 3072), (32768, 768, 50304)]
    shapes += [(32768, 1280, 3840), (32768, 1280, 5120), (32768, 5120, 1280), (1280, 32768, 5120), (32768, 4096, 14336)]
    for rows, inner, columns in shapes:
        if TINY:
            rows, inner, columns = 64, 64, 64
        a = torch.randn(rows, inner, device=DEVICE, dtype=torch.bfloat16)
        b = torch.randn(inner, columns, device=DEVICE, dtype=torch.bfloat16)
        for _ in range(3):
            a @ b
        wait()
        began, count = time.perf_counter(), 0
        while time.perf_counter() - began < (0.02 if TINY else 0.5):
            for _ in range(5):
                a @ b
            count += 5
            wait()
        seconds = (time.perf_counter() - began) / count
        found.append({"shape": [rows, inner, columns], "tflops": round(2e-12 * rows * inner * columns / seconds, 1)})
    return found


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")
    found: dict = {"torch": torch.__version__, "device": torch.cuda.get_device_name() if CUDA else "cpu"}
    path = folder / "small_gpt.json"
    found["linear"] = linear()
    found["matmuls"] = matmuls()
    found["runs"] = []
    many = 2 if TINY else 32
    for how, sequences, steps in (
        ("eager", 1, 20),
        ("graph", 1, 20),
        ("blocks", 1, 20),
        ("eager", many, 10),
        ("graph", many, 10),
    ):
        try:
            found["runs"].append(run(how, sequences, 3 if TINY else steps))
        except Exception as error:  # what else was measured is still written
            found["runs"].append({"how": how, "sequences": sequences, "error": repr(error)[:400]})
        path.write_text(json.dumps(found, indent=1))
        print(json.dumps(found["runs"][-1])[:300], flush=True)


main()
