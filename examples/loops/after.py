"""`before.py` on any number of devices, with mixed precision, checkpoints and exact resume: five lines have changed.

    python examples/loops/after.py hardware.devices=8 parallel.strategy=fsdp

How each classic mistake is impossible here:

- no `set_epoch`: the order of samples is a function of seed and position. There is no sampler to forget.
- unscaled learning rate: batch_size is the global batch, on any number of devices. With train.lr_scaling=linear and
  train.base_batch the learning rate follows another batch size.
- loss not averaged: the loss of a step is the mean over the global batch, whatever the split, and so is what is logged.
- gradients synchronized in every micro-batch, or never: run.steps knows which is the last.
- clipping by the norm of a shard: run.step clips by the norm of all gradients.
- all ranks saving: checkpoints are written by the run, and run.save_weights writes on rank 0.
"""

import sys
from collections.abc import Sequence

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoal


def main(overrides: Sequence[str] = ()) -> None:
    run = shoal.init(name="after", train={"epochs": 4}, overrides=overrides)
    torch.manual_seed(0)
    points = torch.rand(512, 8)
    data = TensorDataset(points, points.square().sum(1, keepdim=True))
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=32)
    loader = DataLoader(data, batch_size=64, shuffle=True)

    model, optimizer, loader, schedule = run.prepare(model, optimizer, loader, schedule)
    for inputs, targets in run.steps(loader):
        loss = nn.functional.mse_loss(model(inputs), targets)
        run.backward(loss)
        run.step(optimizer, schedule)
    run.save_weights(run.folder / "model.safetensors")


if __name__ == "__main__":
    main(sys.argv[1:])
