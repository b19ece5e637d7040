"""What tensor and pipeline parallelism must know of a family: which matrices are cut which way, and what comes first.

The rest they learn from `models.anatomy`. A family that is not in the table can be trained with every other strategy.
"""

from dataclasses import dataclass, field
from typing import Any

from shoal.mistakes import UserMistake


@dataclass(frozen=True)
class Plan:
    """Names are relative to a block; those of `positions` and `entry` to the backbone."""

    norms: tuple[str, ...]  # what stands before attention and before the MLP
    column: tuple[str, ...]  # cut along their outputs: heads, or the MLP's inner width
    row: tuple[str, ...]  # cut along their inputs
    fused: dict[str, int] = field(default_factory=dict)  # columns that are so many matrices side by side
    positions: str | None = None  # a learned embedding of positions, added to that of tokens
    entry: tuple[str, ...] = ()  # what is done to embeddings before the first block


LLAMA = Plan(
    norms=("input_layernorm", "post_attention_layernorm"),
    column=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"),
    row=("self_attn.o_proj", "mlp.down_proj"),
)
# The fused matrix of NeoX holds q, k and v head by head, so that a cut between heads is one span.
NEOX = Plan(
    norms=("input_layernorm", "post_attention_layernorm"),
    column=("attention.query_key_value", "mlp.dense_h_to_4h"),
    row=("attention.dense", "mlp.dense_4h_to_h"),
    entry=("emb_dropout",),
)
GPT2 = Plan(
    norms=("ln_1", "ln_2"),
    column=("attn.c_attn", "mlp.c_fc"),
    row=("attn.c_proj", "mlp.c_proj"),
    fused={"attn.c_attn": 3},
    positions="wpe",
    entry=("drop",),
)
PLANS = {"llama": LLAMA, "mistral": LLAMA, "qwen2": LLAMA, "qwen3": LLAMA, "gpt_neox": NEOX, "gpt2": GPT2}


def find_plan(model: Any, key: str) -> Plan:
    """The plan for `model`, or a sentence that says which families `key` (parallel.tp, …) is built for."""
    plan = PLANS.get(model.config.model_type)
    if plan is None:
        raise UserMistake(
            f"{key} is built for {', '.join(PLANS)}, and this model is {model.config.model_type}; "
            f"use {key} 1 and parallel.strategy fsdp, which shards any model."
        )
    return plan
