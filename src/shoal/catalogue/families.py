"""The model families: their traits, their names in transformers, and their tensor and pipeline parallel plans.

Data and lookups only. A model of another architecture can be trained with every strategy but tensor, context and
pipeline parallelism; `models/anatomy.py` finds its parts.
"""

from shoal.catalogue.family import LLAMA_NAMES, Family, Names, Plan
from shoal.catalogue.forecast_families import FORECAST_ONLY
from shoal.mistakes import UserMistake

# What transformers' configs call dropout on the attention weights, on the hidden states, and elsewhere.
ATTENTION_DROPOUT = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
HIDDEN_DROPOUT = (
    "resid_pdrop", "hidden_dropout", "hidden_dropout_prob", "resid_dropout", "residual_dropout", "dropout",
)  # fmt: skip
OTHER_DROPOUT = ("embd_pdrop", "emb_pdrop", "embedding_dropout", "activation_dropout", "ffn_dropout")

LLAMA_PLAN = Plan(
    norms=("input_layernorm", "post_attention_layernorm"),
    column=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"),
    row=("self_attn.o_proj", "mlp.down_proj"),
)

FAMILIES: dict[str, Family] = {
    "llama": Family(
        "llama", LLAMA_NAMES, LLAMA_PLAN, gated=True, rotary=True, rms_norm=True, grouped=True, sized_heads=True
    ),
    "mistral": Family(
        "mistral", LLAMA_NAMES, LLAMA_PLAN, gated=True, rotary=True, rms_norm=True, grouped=True, sized_heads=True
    ),
    "qwen2": Family(
        "qwen2",
        LLAMA_NAMES,
        LLAMA_PLAN,
        gated=True,
        rotary=True,
        rms_norm=True,
        grouped=True,
        qkv_bias=True,
        norm_eps=1e-6,
        rope_theta=1e6,
    ),
    "qwen3": Family(
        "qwen3",
        LLAMA_NAMES,
        LLAMA_PLAN,
        gated=True,
        rotary=True,
        rms_norm=True,
        grouped=True,
        sized_heads=True,
        head_norms=True,
        norm_eps=1e-6,
        rope_theta=1e6,
    ),
    "neox": Family(
        "gpt_neox",
        Names(
            embedding="gpt_neox.embed_in.weight",
            block="gpt_neox.layers.{}.",
            head="lm_head.weight",
            attention=("query_key_value", "dense"),
            mlp=("dense_h_to_4h", "dense_4h_to_h"),
        ),
        # The fused matrix holds q, k and v head by head, so that the shard of a rank is one span.
        Plan(
            norms=("input_layernorm", "post_attention_layernorm"),
            column=("attention.query_key_value", "mlp.dense_h_to_4h"),
            row=("attention.dense", "mlp.dense_4h_to_h"),
            entry=("emb_dropout",),
        ),
        models="Pythia",
        rotary=True,
        hidden_dropout=True,
        linear_bias=True,
        norm_bias=True,
        parallel_residual=True,
        rotary_share=0.25,
    ),
    "gpt2": Family(
        "gpt2",
        Names(
            embedding="transformer.wte.weight",
            block="transformer.h.{}.",
            head="lm_head.weight",
            attention=("c_attn", "attn.c_proj"),
            mlp=("c_fc", "mlp.c_proj"),
        ),
        Plan(
            norms=("ln_1", "ln_2"),
            column=("attn.c_attn", "mlp.c_fc"),
            row=("attn.c_proj", "mlp.c_proj"),
            fused={"attn.c_attn": 3},
            positions="wpe",
            entry=("drop",),
        ),
        transposed=True,
        learned_positions=True,
        hidden_dropout=True,
        linear_bias=True,
        norm_bias=True,
        unfused_gelu=True,
        tied=True,
    ),
    # BERT norms after the residual sum, so that its last block's own norm is the final one.
    "bert": Family(
        "bert",
        Names(
            embedding="bert.embeddings.word_embeddings.weight",
            block="bert.encoder.layer.{}.",
            head="cls.predictions.decoder.weight",
            attention=("query", "key", "value", "attention.output.dense"),
            mlp=("intermediate.dense", "output.dense"),
        ),
        learned_positions=True,
        hidden_dropout=True,
        linear_bias=True,
        norm_bias=True,
        embedding_norm=True,
        final_norm=False,
        post_norm=True,
        head_transform=True,
        causal=False,
        segments=2,
        tied=True,
        norm_eps=1e-12,
    ),
    **FORECAST_ONLY,
}

BUILDABLE = tuple(name for name, family in FAMILIES.items() if family.buildable)
# By transformers' model_type: the name of the family, and its plan if it has one.
BY_MODEL_TYPE = {family.model_type: name for name, family in FAMILIES.items()}
PLANS = {family.model_type: family.plan for family in FAMILIES.values() if family.plan is not None}


def find_plan(model_type: str, key: str) -> Plan:
    """The plan for a transformers `model_type`. Raises a UserMistake that lists those which `key` (parallel.tp, …)
    supports."""
    plan = PLANS.get(model_type)
    if plan is None:
        raise UserMistake(
            f"{key} supports {', '.join(PLANS)}, and this model is {model_type}; "
            f"use {key} 1 and parallel.strategy fsdp, which shards any model."
        )
    return plan


def listed(names: list[str]) -> str:
    """`names` as in a sentence: a, b or c."""
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
