"""Mistakes with encoders: one sentence each, exit status 2, and most before torch is imported."""

import json
from pathlib import Path

import pytest

from shoal import api
from shoal.mistakes import UserMistake
from tests.encoders import BERT, KINDS, classifying, masked, write_labelled
from tests.harness import LLAMA, train_on
from tests.launch.command import forked_shoal


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_labelled(tmp_path_factory.mktemp("rows") / "rows.jsonl")


CONFIG_MISTAKES = {
    "no label": (
        classifying, {"data__label": None},
        "train.objective classify needs data.label, the field of the records that names the class",
    ),
    "causal shape": (
        masked, {"model__shape": {**LLAMA, "positions": 512}},
        "model.shape is a llama, whose tokens attend to earlier ones only, and train.objective masked_lm needs an "
        "encoder; use family bert",
    ),
    "encoder shape": (
        masked, {"train__objective": "causal_lm"},
        "model.shape is a bert, an encoder, in which every token would attend to its own label; use",
    ),
    "tp": (masked, {"parallel": {"tp": 2}}, "parallel.tp 2 is for causal language models, not for train.objective"),
    "pp": (masked, {"parallel": {"pp": 2}}, "parallel.pp 2 is for causal language models"),
    "cp": (masked, {"parallel": {"cp": 2}}, "parallel.cp 2 is for causal language models"),
    "stream": (
        classifying, {"data__streaming": True},
        "data.streaming does not know all classes before it has read all examples",
    ),
    "shares": (masked, {"train__masking": {"mask": 0.8, "random": 0.4}}, "are more than all of the predicted tokens"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", CONFIG_MISTAKES)
def test_a_config_that_cannot_work_is_refused(mistake, rows):
    make, changes, sentence = CONFIG_MISTAKES[mistake]
    with pytest.raises(UserMistake) as raised:
        api.config_from_mapping(make(rows, **changes))
    assert sentence in str(raised.value)


def test_a_label_that_does_not_exist_lists_those_there_are(rows, tmp_path):
    (tmp_path / "run.yaml").write_text(json.dumps(classifying(rows, data__label="kinds")))
    seen = forked_shoal(tmp_path, "train", "run.yaml")
    assert (seen.status, seen.out) == (2, "")
    assert seen.err.endswith(f"data.label is kinds, but {rows}:1 has only text, kind. Did you mean kind?\n")


def test_a_label_of_the_validation_data_that_training_does_not_have_is_refused(rows, tmp_path):
    other = write_labelled(tmp_path / "other.jsonl", 20, food="drink")
    with pytest.raises(UserMistake) as raised:
        train_on(1, classifying(rows, data__validation=str(other)), tmp_path)
    count = other.read_text().count("drink")
    assert str(raised.value) == (
        f"{count} examples in data.validation have a label that no training example has, such as drink; the classes "
        "are animal, food, tool."
    )


def test_one_class_alone_is_refused(tmp_path):
    alone = write_labelled(tmp_path / "rows.jsonl", 20, **dict.fromkeys(KINDS, "thing"))
    with pytest.raises(UserMistake, match=r"All examples in data.path have the label thing: there is nothing to tell"):
        train_on(1, classifying(alone), tmp_path)


def test_masked_lm_needs_a_mask_token(rows, tmp_path):
    with pytest.raises(UserMistake, match=r"the tokenizer bytes has no mask token; use one that has, or add one with"):
        train_on(1, masked(rows, model__add_tokens=[]), tmp_path)


def test_a_causal_model_is_no_encoder_and_an_encoder_no_causal_model(rows, tmp_path):
    from transformers import CONFIG_MAPPING

    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 264}
    CONFIG_MAPPING["llama"](**sizes).save_pretrained(tmp_path / "llama")
    CONFIG_MAPPING["bert"](**sizes).save_pretrained(tmp_path / "bert")
    tokenizer = {"tokenizer": "bytes", "add_tokens": ["<mask>"]}
    with pytest.raises(UserMistake, match="llama is not an encoder: its tokens attend to earlier ones only, and train"):
        train_on(1, masked(rows, model={"from": str(tmp_path / "llama"), **tokenizer}), tmp_path)
    causal = masked(rows, model={"from": str(tmp_path / "bert"), **tokenizer}, train__objective="causal_lm")
    with pytest.raises(UserMistake, match=r"this bert is an encoder, .* language model, or train.objective masked_lm"):
        train_on(1, causal, tmp_path)


def test_options_without_effect_are_said(rows):
    from shoal.config.effect import without_effect

    config = api.config_from_mapping(classifying(rows, train__mask_ratio=0.3, data__train_on="all"))
    said = without_effect(config, 1)
    assert "train.mask_ratio 0.3 has no effect: train.objective classify masks nothing." in said
    assert "data.train_on all has no effect: train.objective classify reads the whole text." in said
    assert BERT["family"] == "bert"
