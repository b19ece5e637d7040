"""A GAN that learns points on a circle, in a training loop of its own: two networks that are updated together.

python examples/loops/gan.py
python examples/loops/gan.py hardware.devices=2 parallel.strategy=ddp

A run has one model and one optimizer. Both networks are parts of the model, each with a parameter group of its own, and
there is one loss, that of the critic. Its gradient is reversed on the way to the generator, which so learns to make it
larger: each network is updated by its own side of the game, in one backward pass and under any strategy.
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import shoal

NOISE = 8


class Circle(Dataset[tuple[Tensor, Tensor]]):
    """A point on a circle, and the noise for a generated one: what a dataset draws is the same on any device."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        angle = torch.rand(()) * 2 * torch.pi
        return torch.stack([angle.cos(), angle.sin()]), torch.randn(NOISE)


class Reverse(torch.autograd.Function):
    """The identity, with the opposite gradient."""

    @staticmethod
    def forward(context: Any, values: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return -gradient


class GAN(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(NOISE, width), nn.GELU(), nn.Linear(width, 2))
        self.critic = nn.Sequential(nn.Linear(2, width), nn.GELU(), nn.Linear(width, 1))

    def forward(self, real: Tensor, noise: Tensor) -> Tensor:
        """The critic's scores of real points, and of generated ones."""
        made = Reverse.apply(self.generator(noise))
        return self.critic(torch.cat([real, made]))


def main(overrides: Sequence[str] = ()) -> None:
    run = shoal.init(name="gan", train={"steps": 60}, overrides=overrides)
    model = GAN()
    optimizer = torch.optim.Adam(
        [
            {"params": model.generator.parameters(), "lr": 1e-3},
            {"params": model.critic.parameters(), "lr": 4e-3},
        ],
        betas=(0.5, 0.99),
    )
    loader = DataLoader(Circle(), batch_size=32)

    model, optimizer, loader = run.prepare(model, optimizer, loader)
    for real, noise in run.steps(loader):
        on_real, on_made = model(real, noise).chunk(2)
        run.backward(F.softplus(-on_real).mean() + F.softplus(on_made).mean())
        run.step(optimizer)


if __name__ == "__main__":
    main(sys.argv[1:])
