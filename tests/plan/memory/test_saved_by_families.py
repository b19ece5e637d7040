"""What autograd saves in eager blocks of the families that are only forecast, by building them with transformers."""

from typing import Any

import pytest
import torch

from shoal.catalogue.gpus import LINKS, find_gpu
from shoal.catalogue.shapes import ModelShape, shape_from_sizes
from shoal.plan.memory.activations import block_kept
from shoal.plan.run.run import Run
from tests.catalogue.forecast_only import config_of
from tests.plan.memory.test_saved_tensors import LENGTH, MICRO_BATCH, saved_bytes

DROPOUTS = (
    "attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "dropout", "embd_pdrop", "hidden_dropout_prob",
    "resid_pdrop",
)  # fmt: skip


def shape_of(family: str, layers: int, kv_heads: int) -> ModelShape:
    return shape_from_sizes(
        family,
        hidden=128,
        layers=layers,
        heads=4,
        kv_heads=kv_heads,
        ffn=512,
        vocab=64,
        positions=LENGTH + 2,
        tied=True,
    )


def saved(shape: ModelShape, attention: str) -> int:
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    config = config_of(shape)
    for name in DROPOUTS:
        if hasattr(config, name):
            setattr(config, name, 0.0)
    kind: Any = AutoModelForCausalLM if shape.traits.causal else AutoModelForMaskedLM
    model = kind.from_config(config, dtype=torch.bfloat16, attn_implementation=attention).train()
    tokens = torch.full((MICRO_BATCH, LENGTH), 5)
    options = {"use_cache": False} if shape.traits.causal else {}
    return saved_bytes(model, lambda: model(input_ids=tokens, **options).logits.float().sum())


@pytest.mark.parametrize(
    ("family", "kv_heads", "attention"),
    [
        ("bloom", 4, "eager"),
        ("distilbert", 4, "sdpa"),
        ("electra", 4, "sdpa"),
        ("esm", 4, "sdpa"),
        ("gpt_bigcode", 1, "sdpa"),
        ("opt", 4, "sdpa"),
        ("roberta", 4, "sdpa"),
        ("starcoder2", 2, "sdpa"),
    ],
)
def test_a_block_of_transformers_saves_what_is_forecast(family: str, kv_heads: int, attention: str) -> None:
    found = saved(shape_of(family, 2, kv_heads), attention) - saved(shape_of(family, 1, kv_heads), attention)
    gpu = find_gpu("h200")
    run = Run(
        shape=shape_of(family, 2, kv_heads),
        gpu=gpu,
        link=LINKS[gpu.link],
        network=LINKS["infiniband-ndr"],
        length=LENGTH,
        micro_batch=MICRO_BATCH,
        compiled=False,
        precision="bf16-true",
        attention="scores" if attention == "eager" else "fused",
    )
    assert block_kept(run).amount == pytest.approx(found, rel=0.01)
