"""Activation recomputation: what is not kept for the backward pass is computed again there."""

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shoal.config.schema import RecomputeConfig
from shoal.parallel.become import become

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
MATRIX_PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}


def recompute_blocks(blocks: list[nn.Module], how: str | RecomputeConfig) -> None:
    """Make the blocks that `train.recompute` names forget their activations."""
    if how == "none":
        return
    if isinstance(how, RecomputeConfig):
        blocks = blocks[:: how.every]
    for block in blocks:
        become(block, _PartlyRecomputed if how == "selective" else _Recomputed)


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
    """Keep attention and every second matrix product, as torchtitan does; a count for each pass over a block."""
    counts = {False: 0, True: 0}  # the forward pass and its repetition meet the same operations in the same order

    def policy(context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if operation in KEPT:
            return CheckpointPolicy.MUST_SAVE
        if operation in MATRIX_PRODUCTS:
            counts[context.is_recompute] += 1
            if counts[context.is_recompute] % 2:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
