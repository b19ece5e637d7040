"""Compile each block and the final norm: blocks are alike, so one compilation serves them all, and the parts between
stay plain Python."""

import torch
import torch._functorch.config
from torch import nn


def compile_backend(wanted: bool | str, device: torch.device) -> str | None:
    """The compiler for `train.compile`; None: blocks run as they are."""
    if wanted == "auto":
        return "inductor" if device.type == "cuda" else None
    if isinstance(wanted, bool):
        return "inductor" if wanted else None
    return wanted


# Reasons for which the compiler keeps a result for the backward pass although it could be computed again, element by
# element, out of others that are kept anyway: norms, and the product of the MLP's two halves. They save little time for
# much memory. Measured: docs/performance.md.
REASONS_TO_KEEP = (
    "ban_recompute_used_far_apart",
    "ban_recompute_long_fusible_chains",
    "ban_recompute_materialized_backward",
)


def compile_blocks(blocks: list[nn.Module], backend: str, *, keeps_all: bool) -> None:
    """In place: names of modules and parameters do not change. `keeps_all`: memory is not to be saved."""
    if any(getattr(torch._functorch.config, reason) != keeps_all for reason in REASONS_TO_KEEP):
        # The compiler's, and not this model's. Blocks of a run before this one in the same process are compiled for the
        # other choice, and blocks that look the same would be taken for them.
        torch.compiler.reset()
        for reason in REASONS_TO_KEEP:
            setattr(torch._functorch.config, reason, keeps_all)
    # Blocks are smaller than DDP's buckets: cutting them where a bucket ends would only break them up.
    torch._dynamo.config.optimize_ddp = False
    # Rows of several lengths are a handful of shapes; past this many the block would fall back to eager.
    torch._dynamo.config.cache_size_limit = max(torch._dynamo.config.cache_size_limit, 32)
    for block in blocks:
        block.compile(backend=backend)
