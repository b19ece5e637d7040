"""The plain compiled loop: transformers' model and the loss under one `torch.compile`, autocast and fused AdamW."""

import numpy as np
import torch
from torch import Tensor, nn

from peers.clock import Clock
from peers.models import build, decay_groups, device
from peers.sequences import read_batch
from peers.task import BETAS, CLIP, EPSILON, LEARNING_RATE, Task


def run(task: Task, clock: Clock) -> None:
    """Options: `dropout` (its probability), `graphs` (CUDA graphs, by the mode reduce-overhead)."""
    graphs = bool(task.options.get("graphs"))
    model = build(task, torch.float32)

    def loss_of(inputs: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(inputs.device.type, torch.bfloat16):
            logits = model(input_ids=inputs, use_cache=False).logits
            return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    if clock.cuda:
        compiled = torch.compile(loss_of, mode="reduce-overhead" if graphs else None)
    else:
        compiled = torch.compile(loss_of, backend="aot_eager")
    parameters = list(model.parameters())
    groups = decay_groups(parameters)
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, fused=clock.cuda)
    sequences = np.load(task.sequences_file)
    clock.begin()
    for step in range(task.steps):
        batch = read_batch(sequences, step, task.micro_batch)
        if clock.cuda:
            batch = tuple(part.pin_memory().to(device(), non_blocking=True) for part in batch)
        loss = compiled(*batch)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        # A copy: the next replay of a CUDA graph overwrites its outputs.
        clock.step_done(loss.detach().clone())
