"""A GAN that learns points on a circle, in a training loop of its own: two networks that are updated together.

python examples/loops/gan.py
python examples/loops/gan.py hardware.devices=2 parallel.strategy=ddp

A run has one model and one optimizer. Both networks are parts of the model, each with a parameter group of its own, and
both losses come from one forward pass. That of the generator goes through a critic whose weights are detached, so that
each network learns from its own loss only.
"""

import sys
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call
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


class GAN(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(NOISE, width), nn.GELU(), nn.Linear(width, 2))
        self.critic = nn.Sequential(nn.Linear(2, width), nn.GELU(), nn.Linear(width, 1))

    def forward(self, real: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """The losses of the critic and of the generator."""
        made = self.generator(noise)
        on_real, on_made = self.critic(real), self.critic(made.detach())
        detached = {name: weight.detach() for name, weight in self.critic.named_parameters()}
        deceived = functional_call(self.critic, detached, (made,))
        return F.softplus(-on_real).mean() + F.softplus(on_made).mean(), F.softplus(-deceived).mean()


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
        critic, generator = model(real, noise)
        run.backward(critic + generator)
        run.step(optimizer)


if __name__ == "__main__":
    main(sys.argv[1:])
