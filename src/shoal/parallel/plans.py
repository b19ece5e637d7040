"""The tensor and pipeline parallel plan of each model family: which matrices are column-parallel and row-parallel.

Everything else is read from `models.anatomy`. A family without a plan can be trained with every other strategy.
"""

from dataclasses import dataclass, field
from typing import Any

from shoal.mistakes import UserMistake


@dataclass(frozen=True)
class Plan:
    """Module names relative to a block; those in `positions` and `entry` relative to the backbone."""

    norms: tuple[str, ...]  # the norms before attention and before the MLP
    column: tuple[str, ...]  # split along their outputs: heads or intermediate size
    row: tuple[str, ...]  # split along their inputs
    fused: dict[str, int] = field(
        default_factory=dict
    )  # column-parallel matrices that are this many matrices, concatenated
    positions: str | None = None  # a learned position embedding
    entry: tuple[str, ...] = ()  # applied to the embeddings before the first block


LLAMA = Plan(
    norms=("input_layernorm", "post_attention_layernorm"),
    column=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"),
    row=("self_attn.o_proj", "mlp.down_proj"),
)
# The fused matrix of NeoX holds q, k and v head by head, so that the shard of a rank is one span.
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
    """The plan for `model`. Raises a UserMistake that lists the families which `key` (parallel.tp, …) supports."""
    plan = PLANS.get(model.config.model_type)
    if plan is None:
        raise UserMistake(
            f"{key} supports {', '.join(PLANS)}, and this model is {model.config.model_type}; "
            f"use {key} 1 and parallel.strategy fsdp, which shards any model."
        )
    return plan
