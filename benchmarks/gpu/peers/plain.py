"""A plain fp32 loop: the reference for the losses of the other cases."""

import numpy as np
import torch
from torch import nn

from peers.clock import Clock
from peers.models import build, decay_groups, device
from peers.sequences import read_batch
from peers.task import BETAS, CLIP, EPSILON, LEARNING_RATE, Task


def run(task: Task, clock: Clock) -> None:
    torch.set_float32_matmul_precision("highest")  # no TF32
    model = build(task, torch.float32)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(decay_groups(parameters), lr=LEARNING_RATE, betas=BETAS, eps=EPSILON)
    sequences = np.load(task.sequences_file)
    clock.begin()
    for step in range(task.steps):
        inputs, labels = (part.to(device()) for part in read_batch(sequences, step, task.micro_batch))
        logits = model(input_ids=inputs, use_cache=False).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        clock.step_done(loss)
