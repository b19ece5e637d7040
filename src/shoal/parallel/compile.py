"""Compile each block: blocks are alike, so one compilation serves them all, and the parts between stay plain Python."""

import torch
from torch import nn


def compile_backend(wanted: bool | str, device: torch.device) -> str | None:
    """The compiler for `train.compile`; None: blocks run as they are."""
    if wanted == "auto":
        return "inductor" if device.type == "cuda" else None
    if isinstance(wanted, bool):
        return "inductor" if wanted else None
    return wanted


def compile_blocks(blocks: list[nn.Module], backend: str) -> None:
    """In place: names of modules and parameters do not change."""
    # Blocks are smaller than DDP's buckets: cutting them where a bucket ends would only break them up.
    torch._dynamo.config.optimize_ddp = False
    # Rows of several lengths are a handful of shapes; past this many the block would fall back to eager.
    torch._dynamo.config.cache_size_limit = max(torch._dynamo.config.cache_size_limit, 32)
    for block in blocks:
        block.compile(backend=backend)
