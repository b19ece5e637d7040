"""How many operations a block that is not compiled launches in a forward and a backward pass.

Counted on the blocks of transformers, as the dispatcher sees them, views as half because they launch nothing: 171 in a
Llama, 207 with eager attention, 224 in a Qwen3, whose norms of queries and keys are written out too, 112 in a
GPT-NeoX. tests/plan/speed/test_launched.py counts them again.
"""

from shoal.catalogue.architectures import architecture_of
from shoal.plan.memory.activations import has_head_norms
from shoal.plan.run.blocks import linears
from shoal.plan.run.run import Run
from shoal.plan.speed.eager import rotary_of

LLAMA_OPERATIONS = 171
# Three matmuls with their transposed views, and the sum that is the gradient of a bias.
LINEAR, BIAS = 6, 1.5
# An RMSNorm that is written out: a cast, a power, a mean, a sum, a root, a product, a cast, a product; and their
# gradients. One that is a kernel has one in each pass.
WRITTEN_OUT_NORM, NORM = 25, 2
# A scale in fp32 is cast, and so is its gradient: with the other casts, blocks of LitGPT 0.5.13 have 181 operations in
# a Llama and 238 in a Qwen3.
WIDE_NORM = 3
# Of queries and keys: halves that are cut, negated and joined, two products and a sum; pairs, of which each element is
# multiplied twice on its own; or a product of complex numbers. Halves in fp32 have casts, and
# slices of which one is empty.
ROTARY = {"halves": 45, "fp32 halves": 48, "pairs": 63, "complex": 25}
# The activation function, the product with the gate, and the sum of two gradients; or one kernel in each pass; or GELU
# operation by operation.
GATED, ACTIVATION, WRITTEN_OUT_ACTIVATION = 6, 2, 28
# Residual sums, the sums of gradients of what several layers read, heads that are split and joined, attention.
OTHERS = 28
# Scores, scale, mask, softmax, casts and the output in place of one kernel; and keys and values that are repeated.
SCORES, REPEATED = 24, 12
DROPOUT = 2


def block_operations(run: Run) -> float:
    """Operations of a block, forward and backward."""
    shape, traits = run.shape, run.shape.traits
    layers = len(linears(shape, joined=run.traits.fused_qkv))
    written_out = WRITTEN_OUT_NORM + WIDE_NORM * run.traits.wide_norms
    norm = written_out if traits.rms_norm and run.traits.unfused_norms else NORM
    found = LINEAR * layers + BIAS * block_biases(run) + norm * block_norms(run) + OTHERS
    if traits.rotary:
        found += ROTARY[rotary_of(run)]
    if run.writes_out_gelu or run.writes_out_erf:
        found += WRITTEN_OUT_ACTIVATION
    else:
        found += GATED if traits.gated else ACTIVATION
    scores = run.attention == "scores" and not run.fuses_softmax
    repeated = shape.kv_heads < shape.heads and (scores or run.traits.repeats_keys)
    found += SCORES * scores + REPEATED * repeated
    return found + DROPOUT * (2 * run.dropout + run.attention_dropout)


def block_biases(run: Run) -> int:
    """Linear layers of a block that have a bias."""
    traits = run.shape.traits
    if traits.linear_bias:
        return len(linears(run.shape, joined=run.traits.fused_qkv))
    return 3 * traits.qkv_bias + len(traits.biased)


def block_norms(run: Run) -> int:
    """Norms of a block, with those of queries and keys."""
    shape = run.shape
    return architecture_of(shape.model_type).norms - bool(shape.shared_norm) + 2 * has_head_norms(run)
