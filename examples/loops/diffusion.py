"""A small diffusion UNet on generated images, in a training loop of its own.

python examples/loops/diffusion.py
python examples/loops/diffusion.py hardware.devices=2 parallel.strategy=fsdp
"""

import sys
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import shoal

TIMES = 100


class Discs(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """An image of a disc, the time to which it is noised, and the noise. All are drawn here, not in the loop: what a
    dataset draws is the same for a sample whatever the number of devices."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        x, y, radius = torch.rand(3).mul(torch.tensor([8.0, 8.0, 3.0])).add(torch.tensor([4.0, 4.0, 2.0]))
        rows, columns = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
        image = ((rows - y) ** 2 + (columns - x) ** 2 < radius**2).float()[None] * 2 - 1
        return image, torch.randint(0, TIMES, ()), torch.randn(1, 16, 16)


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, time: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(inputs, outputs, 3, padding=1), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.norm, self.time = nn.GroupNorm(4, outputs), nn.Linear(time, outputs)
        self.skip = nn.Conv2d(inputs, outputs, 1)

    def forward(self, image: Tensor, time: Tensor) -> Tensor:
        hidden = self.first(image) + self.time(time)[:, :, None, None]
        return self.skip(image) + self.second(F.silu(self.norm(hidden)))


class UNet(nn.Module):
    """Predicts the noise in an image."""

    def __init__(self, width: int = 16, time: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TIMES, time)
        self.down, self.deeper = Residual(1, width, time), Residual(width, 2 * width, time)
        self.middle = Residual(2 * width, 2 * width, time)
        self.up, self.last = Residual(4 * width, width, time), Residual(2 * width, width, time)
        self.head = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, image: Tensor, time: Tensor) -> Tensor:
        time = F.silu(self.embedding(time))
        high = self.down(image, time)
        low = self.deeper(F.avg_pool2d(high, 2), time)
        lowest = F.interpolate(self.middle(F.avg_pool2d(low, 2), time), scale_factor=2.0)
        up = F.interpolate(self.up(torch.cat([lowest, low], 1), time), scale_factor=2.0)
        return self.head(self.last(torch.cat([up, high], 1), time))


def noised(image: Tensor, time: Tensor, noise: Tensor) -> Tensor:
    """The image after `time` steps of diffusion, with the cosine schedule."""
    kept = torch.cos((time.float() + 1) / TIMES * torch.pi / 2).square()[:, None, None, None]
    return kept.sqrt() * image + (1 - kept).sqrt() * noise


def main(overrides: Sequence[str] = ()) -> None:
    run = shoal.init(name="diffusion", train={"steps": 40}, overrides=overrides)
    model = UNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = DataLoader(Discs(), batch_size=16, shuffle=True)

    model, optimizer, loader = run.prepare(model, optimizer, loader)
    for image, time, noise in run.steps(loader):
        run.backward(F.mse_loss(model(noised(image, time, noise), time), noise))
        run.step(optimizer)


if __name__ == "__main__":
    main(sys.argv[1:])
