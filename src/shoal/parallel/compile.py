"""Compile each block and the final norm. Blocks are identical, so one compilation serves them all; the code between
them stays eager."""

import math

import torch
import torch._functorch.config
from torch import nn

from shoal.config.mesh import length_multiple
from shoal.config.schema import Config

# Few enough distinct sequence lengths for the compiler, at little padding.
ROUND_LENGTHS_TO = 64


def compile_backend(wanted: bool | str, device: torch.device) -> str | None:
    """The torch.compile backend for `train.compile`; None: blocks run eagerly."""
    if wanted == "auto":
        return "inductor" if device.type == "cuda" else None
    if isinstance(wanted, bool):
        return "inductor" if wanted else None
    return wanted


# Heuristics by which the partitioner saves a result for the backward pass although it could be recomputed elementwise
# from others that are saved anyway: norms, and the gated activation of the MLP. They save little time for much memory.
# Measured: docs/performance.md.
REASONS_TO_KEEP = (
    "ban_recompute_used_far_apart",
    "ban_recompute_long_fusible_chains",
    "ban_recompute_materialized_backward",
)


def compile_blocks(blocks: list[nn.Module], backend: str, *, keeps_all: bool) -> None:
    """In place: names of modules and parameters do not change. `keeps_all`: do not trade time for memory."""
    if any(getattr(torch._functorch.config, reason) != keeps_all for reason in REASONS_TO_KEEP):
        # These settings are global. A previous run in this process may have compiled identical blocks under the other
        # settings, and the cache would return those.
        torch.compiler.reset()
        for reason in REASONS_TO_KEEP:
            setattr(torch._functorch.config, reason, keeps_all)
    # Blocks are smaller than DDP's buckets: splitting graphs at bucket boundaries would only add graph breaks.
    torch._dynamo.config.optimize_ddp = False
    # Sequences of several lengths are a handful of shapes; beyond this limit a block would fall back to eager.
    torch._dynamo.config.cache_size_limit = max(torch._dynamo.config.cache_size_limit, 32)
    for block in blocks:
        block.compile(backend=backend)


def sequence_multiple(config: Config, *, compiled: bool) -> int:
    """Sequence lengths are rounded up to a multiple of this: the compiler specializes kernels to each length."""
    multiple = length_multiple(config.parallel, config.train.precision)
    rounded = math.lcm(multiple, ROUND_LENGTHS_TO)
    return rounded if compiled and config.data.max_length % rounded == 0 else multiple
