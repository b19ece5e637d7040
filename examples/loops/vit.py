"""A small vision transformer (transformers' ViT) that tells generated shapes apart, in a training loop of its own.

python examples/loops/vit.py
python examples/loops/vit.py hardware.devices=2 parallel.strategy=fsdp train.recompute=full
"""

import sys
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import ViTConfig, ViTForImageClassification

import shoal


class Shapes(Dataset[tuple[Tensor, Tensor]]):
    """Squares, crosses and stripes at random places, with noise: the same for a seed on any number of devices."""

    def __len__(self) -> int:
        return 192

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        kind, image = index % 3, torch.zeros(1, 16, 16)
        row, column = torch.randint(0, 8, (2,)).tolist()
        if kind == 0:
            image[:, row : row + 8, column : column + 8] = 1
        elif kind == 1:
            image[:, row + 3 : row + 5], image[:, :, column + 3 : column + 5] = 1, 1
        else:
            image[:, row % 4 :: 4] = 1
        return image + 0.1 * torch.randn_like(image), torch.tensor(kind)


def main(overrides: Sequence[str] = ()) -> None:
    run = shoal.init(name="vit", train={"steps": 60}, overrides=overrides)
    model = ViTForImageClassification(
        ViTConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            image_size=16,
            patch_size=4,
            num_channels=1,
            num_labels=3,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
    loader = DataLoader(Shapes(), batch_size=16, shuffle=True)

    model, optimizer, loader, schedule = run.prepare(model, optimizer, loader, schedule)
    for images, kinds in run.steps(loader):
        run.backward(model(pixel_values=images, labels=kinds).loss)
        run.step(optimizer, schedule)


if __name__ == "__main__":
    main(sys.argv[1:])
