"""A GAN that learns points on a circle, in a training loop of its own: two networks, whose optimizers take turns.

python examples/loops/gan.py
python examples/loops/gan.py hardware.devices=2 parallel.strategy=fsdp

The critic takes two steps for each one of the generator. `run.step(optimizer)` updates the parameters of that optimizer
alone: what the generator's backward pass leaves in the critic's gradients is discarded.
"""

import sys
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import shoal

NOISE, WIDTH = 8, 64
CRITIC_STEPS = 2


class Circle(Dataset[tuple[Tensor, Tensor]]):
    """A point on a circle, and the noise for a generated one: what a dataset draws is the same on any device."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        angle = torch.rand(()) * 2 * torch.pi
        return torch.stack([angle.cos(), angle.sin()]), torch.randn(NOISE)


def main(overrides: Sequence[str] = ()) -> None:
    run = shoal.init(name="gan", train={"steps": 60}, overrides=overrides)
    generator = nn.Sequential(nn.Linear(NOISE, WIDTH), nn.GELU(), nn.Linear(WIDTH, 2))
    critic = nn.Sequential(nn.Linear(2, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1))
    critics = torch.optim.Adam(critic.parameters(), lr=4e-3, betas=(0.5, 0.99))
    generators = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.99))
    loader = DataLoader(Circle(), batch_size=32)

    _, _, loader = run.prepare(
        {"generator": generator, "critic": critic}, {"critic": critics, "generator": generators}, loader
    )
    for real, noise in run.steps(loader):
        if run.step_number % (CRITIC_STEPS + 1) < CRITIC_STEPS:
            with torch.no_grad():
                made = generator(noise)
            run.backward(F.softplus(-critic(real)).mean() + F.softplus(critic(made)).mean())
            run.step(critics)
        else:
            run.backward(F.softplus(-critic(generator(noise))).mean())
            run.step(generators)


if __name__ == "__main__":
    main(sys.argv[1:])
