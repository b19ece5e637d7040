"""How training systems differ in what their code keeps in memory: facts about code, never about one measurement.

`OURS` is what this repository does; the others are for holding the forecast against published results.
"""

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class SystemTraits:
    """What a system's code does where memory or time shows it."""

    # RMSNorm written out in PyTorch keeps an fp32 copy of its input; one kernel, or a compiled block, does not.
    written_out_norms: bool = True
    # What goes from block to block is as wide as the weights that are trained, as autocast leaves it; or as computed.
    wide_stream: bool = False
    # What is called compiled are Liger's kernels, each with its own input and output.
    liger_kernels: bool = False
    # Keys and values are repeated for every query head before attention, and kept so.
    repeats_keys: bool = False
    # Queries, keys and values come out of one matrix product even where the family has three.
    joins_queries: bool = False
    # What a plain loss holds for each logit at its worst moment: log-softmax and two gradients, in fp32.
    logit_bytes: float = 12.0
    # The same where the vocabulary is cut over tensor-parallel ranks.
    cut_logit_bytes: float = 12.0
    # `pieces`: a chunked loss makes logits piece by piece, gradients with them. `upcast`: all logits are kept as they
    # were computed, and only their fp32 copies are made piece by piece. `recomputed`: each piece is made again.
    chunks: Literal["pieces", "upcast", "recomputed"] = "pieces"
    # A plain loss that is one kernel holds its logits and their gradient once each, in the dtype they are computed in:
    # where blocks are compiled it may be compiled too, and some systems have a kernel for it always.
    loss_kernel: Literal["never", "compiled", "always"] = "never"
    # With any recomputation, compiled blocks do not keep what they can make again element by element (compile.py).
    forgets_cheap: bool = False
    # Rows of logits that a fused loss has at a time (Liger's kernels); 0: it is a chunked loss.
    fused_rows: int = 0
    # What selective recomputation keeps besides attention: every second matrix product; or all products but every
    # second of those that widen their input.
    keeps: Literal["every second", "all but widening"] = "every second"
    # 8-bit products keep their inputs in 8 bits; others keep them as they were.
    eight_bit_inputs: bool = False
    # Before a block, what 8-bit products will read is gathered over tensor-parallel ranks in 8 bits already.
    gathers_in_eight_bits: bool = False
    # Weights and gradients are kept in 16 bits, and an fp32 copy of the weights with the optimizer's state (ZeRO).
    masters_with_optimizer: bool = False
    # Embedding and head, unless they are one, are gathered each for itself, and not together for the whole pass.
    ends_apart: bool = False
    # fp32 weights are cast to half precision once a step (ours) or whenever they are used (autocast).
    casts_each_use: bool = False
    # A 4-bit matrix product keeps its input for the backward pass, as bitsandbytes did in 2023.
    quantized_keep_inputs: bool = False
    # Before 8-bit products, what several of them read is rounded once, into both layouts that are needed; or for each
    # product and pass anew.
    casts_once: bool = False
    # The allocator's memory grows where it is (expandable segments), which leaves hardly a gap.
    grows_in_place: bool = False
    # Compiled, attention within packed documents skips what nobody looks at, and has no mask of every pair.
    skips_tiles: bool = False
    # Clipping, the update and the copies to compute with are one pass over memory, or each one of its own.
    one_pass_step: bool = False


OURS = SystemTraits(
    wide_stream=True,
    one_pass_step=True,
    forgets_cheap=True,
    keeps="all but widening",
    eight_bit_inputs=True,
    casts_once=True,
    grows_in_place=True,
    skips_tiles=True,
    ends_apart=True,
)
TORCHTITAN = SystemTraits(
    repeats_keys=True,
    cut_logit_bytes=18.0,
    gathers_in_eight_bits=True,
    ends_apart=True,
)
# From 2025 on its loss is compiled with its blocks.
TORCHTITAN_2025 = replace(TORCHTITAN, loss_kernel="compiled")
TORCHTUNE = SystemTraits(repeats_keys=True, chunks="upcast")
KEMPNERFORGE = SystemTraits(repeats_keys=True, logit_bytes=18.0)
LITGPT = SystemTraits(joins_queries=True, quantized_keep_inputs=True)
HUGGING_FACE = SystemTraits(wide_stream=True, liger_kernels=True, logit_bytes=14.0, casts_each_use=True, fused_rows=512)
# A loop written here for comparison: PyTorch, compiled blocks and Liger's loss.
BY_HAND = SystemTraits(fused_rows=512)
BY_HAND_AUTOCAST = replace(BY_HAND, wide_stream=True, casts_each_use=True)
DEEPSPEED = SystemTraits(logit_bytes=14.0, masters_with_optimizer=True)
COMPOSER = SystemTraits(written_out_norms=False, loss_kernel="always")

SYSTEMS: dict[str, SystemTraits] = {
    "shoal": OURS,
    "torchtitan": TORCHTITAN,
    "torchtitan-2025": TORCHTITAN_2025,
    "torchtune": TORCHTUNE,
    "kempnerforge": KEMPNERFORGE,
    "litgpt": LITGPT,
    "huggingface": HUGGING_FACE,
    "by-hand": BY_HAND,
    "autocast": BY_HAND_AUTOCAST,
    "composer": COMPOSER,
    "deepspeed": DEEPSPEED,
}
