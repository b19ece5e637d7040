"""Activation recomputation: what is not kept for the backward pass is computed again there."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shoal.config.schema import RecomputeConfig

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
    """Make the blocks that `train.recompute` names forget their activations. In place: no name changes."""
    if how == "none":
        return
    if isinstance(how, RecomputeConfig):
        chosen, contexts = blocks[:: how.every], None
    else:
        assert how in ("full", "selective"), how
        chosen, contexts = blocks, _keep_some if how == "selective" else None
    for block in chosen:
        _recompute(block, contexts)


def _recompute(block: nn.Module, contexts: Callable[[], Any] | None) -> None:
    # The forward of this one block, not its class; inside the module's call, so that sharding's hooks stay outside and
    # gathered weights are there when the backward pass computes again.
    inner = block.forward
    options: dict[str, Any] = {"use_reentrant": False}
    if contexts is not None:
        options["context_fn"] = contexts
    block.forward = partial(checkpoint, inner, **options)


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
