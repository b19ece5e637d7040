"""A training loop for one device, as many are written. `after.py` is the same on any number of devices.

On several devices it would need: a process group and a rank; DistributedDataParallel around the model; a
DistributedSampler, and set_epoch in every epoch (forgotten, each epoch has the same order); a batch size per device,
and with it another learning rate; no_sync for all but the last micro-batch; an all-reduce of the loss that is printed;
a gradient norm over shards; a checkpoint that one rank writes, whole or not at all, with the state of optimizer,
schedule, sampler and random generators; and a way to stop when the scheduler's signal comes.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    torch.manual_seed(0)
    points = torch.rand(512, 8)
    data = TensorDataset(points, points.square().sum(1, keepdim=True))
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=32)
    loader = DataLoader(data, batch_size=64, shuffle=True)

    for epoch in range(4):
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        print(epoch, float(loss))
    torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
