"""Activation recomputation: what is not kept for the backward pass is computed again there."""

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shoal.config.schema import RecomputeConfig
from shoal.parallel.patch import patch

# Dear to compute and small to keep: attention in its various kernels, and results that came over the network.
KEPT = {
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
KEPT.add(torch.ops.higher_order.flex_attention)
# Operations that multiply two matrices, and where among their arguments those are.
MATRIX_PRODUCTS = {torch.ops.aten.mm.default: 0, torch.ops.aten.addmm.default: 1, torch.ops.aten._scaled_mm.default: 0}


def recompute_blocks(blocks: list[nn.Module], how: str | RecomputeConfig) -> None:
    """Make the blocks that `train.recompute` names forget their activations."""
    if how in ("none", "cheap"):  # what is cheap is the compiler's to choose
        return
    if isinstance(how, RecomputeConfig):
        blocks = blocks[:: how.every]
    for block in blocks:
        patch(block, _PartlyRecomputed if how == "selective" else _Recomputed)


class _Recomputed:
    """A block that keeps its inputs alone.

    Inside the module's call, so that sharding's hooks stay outside, and gathered weights are there when the backward
    pass computes again.
    """

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return checkpoint(super().forward, *inputs, use_reentrant=False, **named)  # type: ignore[misc]


class _PartlyRecomputed:
    """A block that also keeps what was dear to compute."""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        inner = super().forward  # type: ignore[misc]
        return checkpoint(inner, *inputs, use_reentrant=False, context_fn=_keep_some, **named)


def _keep_some() -> Any:
    """Keep attention and matrix products, but of those that widen their input only every second.

    A byte kept saves as many operations as the input is wide, which is about the same for all of a block's products;
    the ones that widen make most of the bytes. Counted anew in each pass over a block.
    """
    widening = {False: 0, True: 0}  # the forward pass and its repetition meet the same operations in the same order

    def policy(context: Any, operation: Any, *arguments: Any, **_: Any) -> CheckpointPolicy:
        if operation in KEPT:
            return CheckpointPolicy.MUST_SAVE
        if (first := MATRIX_PRODUCTS.get(operation)) is None:
            return CheckpointPolicy.PREFER_RECOMPUTE
        left, right = arguments[first : first + 2]
        if right.shape[1] > left.shape[1]:
            widening[context.is_recompute] += 1
            if widening[context.is_recompute] % 2:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
