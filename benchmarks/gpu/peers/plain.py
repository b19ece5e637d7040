"""The simplest loop there is, in fp32: the reference that the others' losses are held to."""

import numpy as np
import torch
from torch import nn

from peers.clock import Clock
from peers.models import build, decay_groups, device
from peers.rows import read_batch
from peers.task import BETAS, CLIP, EPSILON, RATE, Task


def run(task: Task, clock: Clock) -> None:
    torch.set_float32_matmul_precision("highest")  # no TF32
    model = build(task, torch.float32)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(decay_groups(parameters), lr=RATE, betas=BETAS, eps=EPSILON)
    rows = np.load(task.rows_file)
    clock.begin()
    for step in range(task.steps):
        inputs, labels = (part.to(device()) for part in read_batch(rows, step, task.rows))
        logits = model(input_ids=inputs, use_cache=False).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        clock.step_done(loss)
