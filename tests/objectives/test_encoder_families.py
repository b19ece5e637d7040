"""Encoders of transformers: masked and class losses are those of their own code, with padding and without."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal.config.load import config_from_mapping
from shoal.config.schema import ModelConfig
from shoal.data.loader import IGNORED
from shoal.data.prepare import prepare
from shoal.data.tokenizer import load_tokenizer
from shoal.models.prepare import blueprint, prepare_model
from shoal.models.weights import Weights, materialize
from shoal.objectives import find_objective
from tests.encoders import classifying, masked, write_labelled

SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 264,
    "max_position_embeddings": 160, "pad_token_id": 258, "bos_token_id": 256, "eos_token_id": 257,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": SIZES,
    "roberta": SIZES | {"max_position_embeddings": 160 + 259},
    "electra": SIZES | {"embedding_size": 32},
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "vocab_size": 264, "pad_token_id": 258},
    "modernbert": SIZES | {"local_attention": 16, "cls_token_id": 256, "sep_token_id": 257},
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_labelled(tmp_path_factory.mktemp("rows") / "rows.jsonl", 24)


def saved(family: str, kind: str, folder: Path) -> Any:
    """A model with random weights, saved by transformers."""
    import transformers

    settings = transformers.AutoConfig.for_model(family, **FAMILIES[family])
    settings.id2label = {0: "animal", 1: "food", 2: "tool"}
    torch.manual_seed(0)
    model = getattr(transformers, kind).from_config(settings).eval()
    for one in model.parameters():  # so that no parameter is without effect
        torch.nn.init.normal_(one, std=0.1)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("objective", ["masked_lm", "classify"])
def test_the_loss_is_that_of_transformers(objective, family, rows, tmp_path):
    kind = "AutoModelForMaskedLM" if objective == "masked_lm" else "AutoModelForSequenceClassification"
    theirs = saved(family, kind, tmp_path)
    make = masked if objective == "masked_lm" else classifying
    config = config_from_mapping(make(rows))
    tokenizer = load_tokenizer("bytes", add_tokens=["<mask>"])
    sequences = prepare(config.data, tokenizer, report=lambda _: None, objective=objective)
    learnt = find_objective(config, tokenizer, sequences.summary.classes)
    plan = blueprint(ModelConfig(from_=str(tmp_path)), objective)
    assert plan.positions in (160, 512)
    prepared = prepare_model(plan, longest=144)
    materialize(
        prepared.model, prepared.anatomy, device=torch.device("cpu"), dtype=torch.float32, source=Weights(tmp_path, 0)
    )
    module = learnt.module(prepared.model, prepared.anatomy, "plain").eval()
    batch = learnt.collate(sequences, np.arange(6), pad=tokenizer.pad)
    assert batch.mask is not None
    with torch.no_grad():
        loss, weight = module(batch).sums[:2]
        mask = (batch.inputs != tokenizer.pad).long()
        labels = batch.labels if objective == "masked_lm" else batch.labels[:, 0]
        expected = theirs(input_ids=batch.inputs, attention_mask=mask, labels=labels)
    assert float(loss) / int(weight) == pytest.approx(float(expected.loss), rel=1e-5)
    assert len(prepared.anatomy.blocks) == 2
    if objective == "masked_lm":
        right = (expected.logits.argmax(-1) == labels)[labels != IGNORED].sum()
        assert int(module(batch).sums[2]) == int(right)
