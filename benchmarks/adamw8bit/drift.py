"""Deviation of AdamW with 8-bit moments from AdamW: `python benchmarks/adamw8bit/drift.py > drift.json`, no GPU.

A small transformer is trained on bytes of Python's standard library with AdamW. Optimizers with 8-bit moments get the
same gradients, so that only their updates differ. `update_error` is the norm of the difference of their update from
AdamW's, relative to the norm of AdamW's update. `weight_error` is the same for the final weights, relative to the norm
of what AdamW changed. Then each optimizer trains on its own, and its validation loss is measured. bitsandbytes and
torchao are included if they are installed.
"""

import json
import math
import sysconfig
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.optim.adamw import AdamW
from shoal.optim.eight_bit import is_quantized

WIDTH, HEADS, LAYERS, LENGTH, BATCH, STEPS, WARMUP, LEARNING_RATE, DECAY = 128, 4, 3, 128, 8, 300, 20, 3e-3, 0.1
VALIDATION = 20_000  # bytes at the end of the text
SEEDS = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        parts = self.attention(self.before_attention(inputs)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2)
        inputs = inputs + self.out(found)
        return inputs + self.down(F.gelu(self.up(self.before_mlp(inputs))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)
        for parameter in self.parameters():
            if parameter.dim() >= 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.norm(self.blocks(self.tokens(tokens[:, :-1]) + self.positions.weight)))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def read_text() -> Tensor:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-d]*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()


def batches(text: Tensor) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        starts = torch.randint(0, len(text) - VALIDATION - LENGTH - 1, (BATCH,), generator=generator)
        yield torch.stack([text[start : start + LENGTH + 1] for start in starts])


def groups_of(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    matrices = [one for one in parameters if one.dim() >= 2]
    vectors = [one for one in parameters if one.dim() < 2]
    return [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]


def ours(groups: list[dict[str, Any]], **options: Any) -> Optimizer:
    assert all(is_quantized(tuple(one.shape)) for one in groups[0]["params"])
    groups[0]["eight_bits"] = True
    return AdamW(groups, **options)


def of_bitsandbytes(groups: list[dict[str, Any]], **options: Any) -> Optimizer:
    import bitsandbytes

    return bitsandbytes.optim.AdamW8bit(groups, **options)


def of_torchao(groups: list[dict[str, Any]], **options: Any) -> Optimizer:
    from torchao.optim import AdamW8bit

    return AdamW8bit(groups, **options)


def take_step(optimizer: Optimizer, step: int) -> float:
    lr = LEARNING_RATE * min(1.0, (step + 1) / WARMUP) * (0.1 + 0.45 * (1 + math.cos(math.pi * step / STEPS)))
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr
    if isinstance(optimizer, AdamW):
        optimizer.step(torch.tensor(True))
    else:
        optimizer.step()
    return lr


def norm(tensors: list[Tensor]) -> float:
    return math.sqrt(sum(float(tensor.square().sum()) for tensor in tensors))


def follow(text: Tensor, make: Callable[..., Optimizer], betas: tuple[float, float]) -> dict[str, float]:
    """Compare the optimizer of `make` with AdamW, on AdamW's gradients."""
    torch.manual_seed(0)
    model = Model()
    weights = list(model.parameters())
    followers = [nn.Parameter(one.detach().clone()) for one in weights]
    start = [one.detach().clone() for one in weights]
    exact = torch.optim.AdamW(groups_of(weights), lr=LEARNING_RATE, betas=betas)
    rounded = make(groups_of(followers), lr=LEARNING_RATE, betas=betas)
    big = [index for index, one in enumerate(weights) if one.dim() >= 2]
    errors, largest = [], 0.0
    for step, tokens in enumerate(batches(text)):
        exact.zero_grad()
        model(tokens).backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        for one, other in zip(weights, followers, strict=True):
            other.grad = one.grad.clone()
        before_step = [[one.detach().clone() for one in some] for some in (weights, followers)]
        lr = take_step(exact, step)
        take_step(rounded, step)
        moves = [
            [some[index].detach() - before[index] * (1 - lr * DECAY) for index in big]
            for some, before in zip((weights, followers), before_step, strict=True)
        ]
        errors.append(norm([one - other for one, other in zip(*moves, strict=True)]) / norm(moves[0]))
        largest = max(largest, *(float(one.abs().max()) / lr for one in moves[1]))
    difference = norm([weights[index].detach() - followers[index].detach() for index in big])
    return {
        "update_error": round(sum(errors) / STEPS, 4),
        "weight_error": round(difference / norm([weights[index].detach() - start[index] for index in big]), 4),
        "largest_update_per_lr": round(largest, 1),
    }


def train_seeds(text: Tensor, make: Callable[..., Optimizer], betas: tuple[float, float]) -> dict[str, Any]:
    """Validation losses of several seeds, which differ by more than optimizers do."""
    losses = [train(text, make, betas, seed) for seed in range(SEEDS)]
    return {"validation_loss": round(sum(losses) / SEEDS, 4), "validation_loss_per_seed": losses}


def train(text: Tensor, make: Callable[..., Optimizer], betas: tuple[float, float], seed: int) -> float:
    """The validation loss after training with the optimizer alone."""
    torch.manual_seed(seed)
    model = Model()
    optimizer = make(groups_of(list(model.parameters())), lr=LEARNING_RATE, betas=betas)
    for step, tokens in enumerate(batches(text)):
        optimizer.zero_grad()
        model(tokens).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        take_step(optimizer, step)
    with torch.no_grad():
        validation = text[-VALIDATION:].unfold(0, LENGTH + 1, LENGTH)
        return round(float(model(validation)), 4)


def main() -> None:
    torch.set_num_threads(1)
    text = read_text()
    makers: dict[str, Callable[..., Optimizer]] = {"shoal": ours}
    makers |= {"bitsandbytes": of_bitsandbytes} if find_spec("bitsandbytes") else {}
    makers |= {"torchao": of_torchao} if find_spec("torchao") else {}
    report: dict[str, Any] = {"torch": torch.__version__, "steps": STEPS}
    for betas in ((0.9, 0.95), (0.9, 0.999)):
        report[f"betas {betas}"] = {"AdamW": train_seeds(text, torch.optim.AdamW, betas)} | {
            name: follow(text, make, betas) | train_seeds(text, make, betas) for name, make in makers.items()
        }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
