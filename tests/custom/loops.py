"""Small custom loops: models that are not language models, in scripts of a few lines."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import shoal
from tests.harness import run_ranks

SAMPLES, BATCH = 40, 8


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.dropout(self.down(F.gelu(self.up(self.norm(hidden)))))


class Network(nn.Module):
    """Blocks in a list, a convolution before them and a head after them."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.stem = nn.Conv1d(2, 4, 3, padding=1)
        self.blocks = nn.ModuleList(Block(24) for _ in range(2))
        self.head = nn.Linear(24, 3)
        for block in self.blocks:
            block.dropout.p = dropout

    def forward(self, image: Tensor) -> Tensor:
        hidden = F.relu(self.stem(image)).flatten(1)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Signals of three kinds, augmented with noise at every reading."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        kind = index % 3
        wave = torch.sin(torch.arange(6) * (kind + 1.0) + index)
        return torch.stack([wave, wave.flip(0)]) + 0.1 * torch.randn(2, 6), torch.tensor(kind)


def settings(**changes: Any) -> dict[str, Any]:
    """Keywords of `shoal.init`; `changes` have __ for the dot."""
    config: dict[str, Any] = {
        "name": "run",
        "train": {"steps": 3, "precision": "32-true", "deterministic": True},
        "checkpoint": {"every": 2, "keep": 9},
        "log": {"every": 1, "to": []},
    }
    for key, value in changes.items():
        block, _, name = key.rpartition("__")
        if block:
            config.setdefault(block, {})[name] = value
        else:
            config[name] = value
    return config


def make(dropout: float = 0.0, lr: float = 1e-2) -> tuple[nn.Module, Any, Any, Any]:
    model = Network(dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, foreach=True)  # the default on a GPU
    loader = DataLoader(Noisy(), batch_size=BATCH, shuffle=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    return model, optimizer, loader, schedule


def train(
    runs: Path,
    *,
    resume: Any = False,
    dropout: float = 0.0,
    weigh: bool = False,
    each: Callable[..., None] | None = None,
    **changes: Any,
) -> None:
    """A whole script, in this process."""
    with shoal.init(run_dir=str(runs), resume=resume, **settings(**changes)) as run:
        model, optimizer, loader, schedule = run.prepare(*make(dropout))
        for images, labels in run.steps(loader):
            losses = F.cross_entropy(model(images), labels, reduction="none")
            counted = (labels > 0).float() if weigh else torch.ones_like(losses)
            loss = (losses * counted).sum() / counted.sum().clamp(min=1)
            run.backward(loss, weight=counted.sum()) if weigh else run.backward(loss)
            run.step(optimizer, schedule)
            if each is not None:
                each(run, model)


def train_on(world_size: int, runs: Path, **given: Any) -> Path:
    run_ranks(world_size, lambda: train(runs, **given))
    return runs / "run"
