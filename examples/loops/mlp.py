"""A plain MLP that learns the sign of a product, in a training loop of its own.

python examples/loops/mlp.py                                       # one device
python examples/loops/mlp.py hardware.devices=2 parallel.strategy=fsdp
"""

import sys
from collections.abc import Sequence

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoal


def main(overrides: Sequence[str] = ()) -> None:
    run = shoal.init(name="mlp", train={"epochs": 4}, checkpoint={"every": 32}, overrides=overrides)
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    points = torch.rand(1024, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1
    labels = (points.prod(1, keepdim=True) > 0).float()
    loader = DataLoader(TensorDataset(points, labels), batch_size=64, shuffle=True)

    model, optimizer, loader = run.prepare(model, optimizer, loader)
    for inputs, targets in run.steps(loader):
        run.backward(nn.functional.binary_cross_entropy_with_logits(model(inputs), targets))
        run.step(optimizer)

    with torch.no_grad():
        right = (model(points.to(run.device)) > 0).eq(labels.to(run.device) > 0).float().mean()
    if run.first:
        print(f"accuracy {float(right):.3f}")


if __name__ == "__main__":
    main(sys.argv[1:])
