"""Memory of logits and loss in a GPT that is compiled with its loss, as nanoGPT's is; the host time of BERT's blocks.

python benchmarks/gpu/compiled_loss.py FOLDER [--tiny]

Two batch sizes, so that their difference is what tokens take: with logits that are returned and held until the next
forward pass returns, with the loss alone, with the sum of the logits in its place, and not compiled. BERT's blocks run
on 16 tokens, so that the device waits for the host; two and six of them, so that the rest cancels. Writes
`compiled_loss.json`.
"""

import json
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

OUT, TINY = Path(sys.argv[1]), "--tiny" in sys.argv
DEVICE = "cpu" if TINY else "cuda"
WIDTH, HEADS, LAYERS, VOCAB, LENGTH = (64, 4, 2, 512, 64) if TINY else (768, 12, 4, 50304, 1024)
CASES: list[dict[str, Any]] = [
    {"returns": True, "holds": True, "compiled": True, "accum": 4},
    {"returns": False, "holds": False, "compiled": True},
    {"returns": False, "holds": False, "compiled": True, "sums": True},
    {"returns": True, "holds": True, "compiled": False},
]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_attn, self.c_out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.c_fc, self.c_proj = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.gelu = nn.GELU(approximate="tanh")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        joined = self.c_attn(self.ln_1(x)).split(width, dim=2)
        q, k, v = (one.view(batch, length, HEADS, width // HEADS).transpose(1, 2) for one in joined)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_out(y.transpose(1, 2).contiguous().view(batch, length, width))
        return x + self.c_proj(self.gelu(self.c_fc(self.ln_2(x))))


class Gpt(nn.Module):
    """`returns`: the logits beside the loss. `sums`: the loss is the sum of the logits."""

    def __init__(self, *, returns: bool, sums: bool) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks, self.ln_f = nn.ModuleList(Block() for _ in range(LAYERS)), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.wte.weight
        self.returns, self.sums = returns, sums

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.ln_f(x))
        if self.sums:
            return None, logits.sum()
        loss = F.cross_entropy(logits.view(-1, VOCAB), tokens.view(-1))
        return (logits if self.returns else None), loss


def measure(batch: int, case: dict[str, Any], steps: int = 6) -> dict[str, Any]:
    """Peak memory and the shortest step."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Gpt(returns=case["returns"], sums=case.get("sums", False)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), fused=not TINY)
    run = torch.compile(model, backend="aot_eager" if TINY else "inductor") if case["compiled"] else model
    tokens = torch.randint(VOCAB, (batch, LENGTH), device=DEVICE)
    if not TINY:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    marks = []
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(case.get("accum", 1)):
            with torch.autocast(DEVICE, dtype=torch.bfloat16):
                logits, loss = run(tokens)
            loss.backward()
            if not case["holds"]:
                logits = None
        optimizer.step()
        if not TINY:
            torch.cuda.synchronize()
        marks.append(time.perf_counter())
    del logits
    found = {"batch": batch, "accum": 1, "sums": False, **case}
    found["step_ms"] = 1e3 * min(after - before for before, after in pairwise(marks))
    if not TINY:
        found["allocated_gib"] = torch.cuda.max_memory_allocated() / 2**30
        found["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
    return found


def bert_host() -> list[dict[str, Any]]:
    """Milliseconds of the host per block, forward and backward."""
    from transformers import BertConfig, BertForMaskedLM

    found = []
    for attention in ("sdpa", "eager"):
        for dtype, autocast in ((torch.bfloat16, False), (torch.float32, True)):
            times = []
            for blocks in (2, 6):
                config = BertConfig(num_hidden_layers=blocks, vocab_size=1024, attn_implementation=attention)
                model = BertForMaskedLM(config).to(DEVICE, dtype).train()
                tokens = torch.randint(1024, (1, 16), device=DEVICE)
                times.append(min(_host_seconds(model, tokens, autocast) for _ in range(3 if TINY else 60)))
            weights = "fp32" if autocast else "bf16"
            found.append(
                {
                    "attention": attention,
                    "weights": weights,
                    "autocast": autocast,
                    "block_ms": 1e3 * (times[1] - times[0]) / 4,
                }
            )
    return found


def _host_seconds(model: nn.Module, tokens: torch.Tensor, autocast: bool) -> float:
    model.zero_grad()
    if not TINY:
        torch.cuda.synchronize()
    start = time.perf_counter()
    with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=autocast):
        loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return time.perf_counter() - start


def main() -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"torch": torch.__version__, "host": bert_host(), "memory": []}
    for case in CASES:
        for batch in (1, 2) if TINY else (16, 32):
            results["memory"].append(measure(batch, case))
            (OUT / "compiled_loss.json").write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
