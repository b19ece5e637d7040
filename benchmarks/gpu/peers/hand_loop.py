"""A good hand-written PyTorch loop for one GPU: no framework, each block compiled, logits not materialized."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from peers.clock import Clock
from peers.models import add_adapter, build, decay_groups, device
from peers.sequences import read_batch
from peers.task import BETAS, CLIP, EPSILON, LEARNING_RATE, Task


def run(task: Task, clock: Clock) -> None:
    """Options: `adapter` (lora), `float8`."""
    if task.options.get("adapter"):
        adapter(task, clock)
    elif task.options.get("float8"):
        float8(task, clock)
    else:
        mixed(task, clock)


def mixed(task: Task, clock: Clock) -> None:
    """fp32 weights under autocast."""
    model = build(task, torch.float32)
    compile_blocks(model, clock)
    parameters = list(model.parameters())
    optimizer = make_optimizer(parameters, clock)

    train(task, clock, Loss(model, autocast=True), clipped_step(parameters, optimizer))


def clipped_step(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    def update() -> None:
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return update


def float8(task: Task, clock: Clock) -> None:
    """bf16 weights, cast from fp32 master weights once per step; float8 matmuls in blocks, with tensorwise scales."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model = build(task, torch.bfloat16)
    masters = [nn.Parameter(one.detach().float()) for one in build(task, torch.float32).parameters()]
    for block in model.model.layers:
        convert_to_float8_training(block, config=Float8LinearConfig(emulate=not clock.cuda))
    compile_blocks(model, clock)
    parameters = list(model.parameters())
    optimizer = make_optimizer(masters, clock)
    for master in masters:
        master.grad = torch.empty_like(master)

    def update() -> None:
        torch._foreach_copy_([one.grad for one in masters], [one.grad for one in parameters])
        nn.utils.clip_grad_norm_(masters, CLIP)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(parameters, masters)
        for parameter in parameters:
            parameter.grad = None

    train(task, clock, Loss(model, autocast=False), update)


def adapter(task: Task, clock: Clock) -> None:
    """Frozen bf16 weights, and peft's fp32 adapters under autocast."""
    adapted = add_adapter(build(task, torch.bfloat16))
    model = adapted.get_base_model()
    compile_blocks(model, clock)
    parameters = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    optimizer = make_optimizer(parameters, clock)

    train(task, clock, Loss(model, autocast=True), clipped_step(parameters, optimizer))


class Loss:
    """The mean loss of a batch: transformers' blocks called one by one, then the head fused with the loss.

    The model's own forward would check on the host, from the positions, whether sequences are packed.
    """

    def __init__(self, model: Any, autocast: bool) -> None:
        self.decoder = model.model
        self.head = model.lm_head.weight
        self.fused = LigerFusedLinearCrossEntropyLoss(accum_dtype=torch.float32)
        self.autocast = autocast

    def __call__(self, inputs: Tensor, labels: Tensor) -> Tensor:
        # Around one forward pass only: autocast caches its casts of the weights until it exits.
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=self.autocast):
            return self.forward(inputs, labels)

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        decoder = self.decoder
        positions = torch.arange(inputs.shape[1], device=inputs.device)[None]
        hidden = decoder.embed_tokens(inputs).to(torch.bfloat16)
        rotary = decoder.rotary_emb(hidden, position_ids=positions)
        for block in decoder.layers:
            hidden = block(hidden, attention_mask=None, position_ids=positions, position_embeddings=rotary)
        hidden = decoder.norm(hidden).to(torch.bfloat16)
        # Cast once here: the loss works in chunks, and autocast would cast the whole head again for each.
        return self.fused(self.head.to(torch.bfloat16), hidden.flatten(0, 1), labels.flatten())


def train(task: Task, clock: Clock, loss_of: Callable[[Tensor, Tensor], Tensor], update: Callable[[], None]) -> None:
    sequences = np.load(task.sequences_file)
    clock.begin()
    with cudnn_attention(clock):
        for step in range(task.steps):
            batch = read_batch(sequences, step, task.micro_batch)
            if clock.cuda:
                batch = tuple(part.pin_memory().to(device(), non_blocking=True) for part in batch)
            loss = loss_of(*batch)
            loss.backward()
            update()
            clock.step_done(loss)


def compile_blocks(model: Any, clock: Clock) -> None:
    for block in model.model.layers:
        block.compile(backend="inductor" if clock.cuda else "aot_eager")


def make_optimizer(parameters: list[nn.Parameter], clock: Clock) -> torch.optim.Optimizer:
    return torch.optim.AdamW(decay_groups(parameters), lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, fused=clock.cuda)


@contextmanager
def cudnn_attention(clock: Clock) -> Iterator[None]:
    """Prefer cuDNN attention, which on Hopper is faster than PyTorch's default, FlashAttention-2."""
    if not clock.cuda:
        yield
        return
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(order, set_priority=True):
        yield
