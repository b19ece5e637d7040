"""Activation checkpointing: activations that are not saved are recomputed in the backward pass."""

import logging
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shoal.config.schema import RecomputeConfig
from shoal.parallel.offload import OffloadedInputs
from shoal.parallel.patch import patch

# Expensive to recompute and cheap to save: the outputs of attention kernels and of collectives.
SAVED = {
    getattr(namespace, name).default
    for namespace, names in (
        (
            torch.ops.aten,
            (
                "_scaled_dot_product_flash_attention",
                "_scaled_dot_product_efficient_attention",
                "_scaled_dot_product_cudnn_attention",
                "_scaled_dot_product_flash_attention_for_cpu",
                "_scaled_dot_product_fused_attention_overrideable",
                "_flash_attention_forward",  # the kernels of `models.attention_kernels`
                "_efficient_attention_forward",
            ),
        ),
        (
            torch.ops._c10d_functional,
            ("reduce_scatter_tensor", "all_gather_into_tensor", "all_to_all_single"),
        ),
    )
    for name in names
    if hasattr(namespace, name)
}
SAVED.add(torch.ops.higher_order.flex_attention)
# Matmul operators, and the position of the first matrix among their arguments.
MATMULS = {torch.ops.aten.mm.default: 0, torch.ops.aten.addmm.default: 1, torch.ops.aten._scaled_mm.default: 0}


def recompute_blocks(blocks: list[nn.Module], how: str | RecomputeConfig, *, adapter_rank: int | None = None) -> None:
    """Apply activation checkpointing to the blocks that `train.recompute` selects."""
    if how in ("none", "cheap"):  # `cheap` is a choice of the compiler
        return
    # Compiled, torch warns of operators in place below a policy: a matter of models, whose losses tests compare.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    if how == "offload":
        inputs = OffloadedInputs()
        for index, block in enumerate(blocks):
            patch(block, _Offloaded, offloaded_inputs=inputs, is_first=index == 0)
        return
    if isinstance(how, RecomputeConfig):
        blocks = blocks[:: how.every]
    for block in blocks:
        if how == "selective":
            patch(block, _SelectivelyCheckpointed, adapter_rank=adapter_rank)
        else:
            patch(block, _Checkpointed)


class _Checkpointed:
    """A block that saves its inputs only.

    The checkpoint is inside the module's call and FSDP's hooks are outside, so that weights are already gathered when
    the backward pass recomputes the block.
    """

    def forward(self, *inputs: Any, **named: Any) -> Any:
        inner = super().forward  # type: ignore[misc]
        if torch.compiler.is_compiling():
            return checkpoint(inner, *inputs, use_reentrant=False, context_fn=_recompute_everything, **named)
        return checkpoint(inner, *inputs, use_reentrant=False, **named)


class _Offloaded(_Checkpointed):
    """A block that saves its input only, in host memory.

    The copy starts before the call, so that it runs while the block does, and outside of the compiled graph. The hooks
    see what the checkpoint saves and, compiled, what the graph does: the input is among it.
    """

    offloaded_inputs: OffloadedInputs
    is_first: bool

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        call = super().__call__  # type: ignore[misc]
        if not (torch.is_grad_enabled() and inputs and isinstance(inputs[0], Tensor) and inputs[0].is_contiguous()):
            return call(*inputs, **named)
        with self.offloaded_inputs.saving(inputs[0], first=self.is_first):
            return call(*inputs, **named)


class _SelectivelyCheckpointed:
    """A block that also saves what is expensive to recompute."""

    adapter_rank: int | None

    def forward(self, *inputs: Any, **named: Any) -> Any:
        inner, contexts = super().forward, partial(_selective_contexts, self.adapter_rank)  # type: ignore[misc]
        return checkpoint(inner, *inputs, use_reentrant=False, context_fn=contexts, **named)


def _recompute_everything() -> Any:
    """As torch 2.13 does without a policy. Before, the partitioner was not told to recompute what is inside an
    autograd.Function, such as a float8 matmul: it was saved, and with it nearly all of a block."""

    def policy(*_: Any, **__: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]


def _selective_contexts(adapter_rank: int | None) -> Any:
    """Save the outputs of attention and of matmuls, but only every second one of the matmuls that widen their input.

    A saved byte avoids as many FLOPs as the matmul's input is wide, which is about the same for all matmuls of a block;
    the widening ones have the largest outputs. It is far less for the second factor of an adapter, whose output is not
    saved. The count restarts for each call of a block.
    """
    widening = {False: 0, True: 0}  # the recomputation runs the same operators in the same order

    def policy(context: Any, operation: Any, *arguments: Any, **_: Any) -> CheckpointPolicy:
        if operation in SAVED:
            return CheckpointPolicy.MUST_SAVE
        if (first := MATMULS.get(operation)) is None:
            return CheckpointPolicy.PREFER_RECOMPUTE
        left, right = arguments[first : first + 2]
        if left.shape[1] == adapter_rank:
            return CheckpointPolicy.PREFER_RECOMPUTE
        if right.shape[1] > left.shape[1]:
            widening[context.is_recompute] += 1
            if widening[context.is_recompute] % 2:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
