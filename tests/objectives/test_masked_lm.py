"""Masked language modelling on text: which tokens are masked, what is learnt, and what comes out."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from shoal import api
from shoal.config.load import config_from_mapping
from shoal.data.loader import IGNORED
from shoal.data.prepare import prepare
from shoal.data.tokenizer import load_tokenizer
from shoal.objectives import find_objective
from tests.encoders import masked, write_labelled
from tests.harness import lines, reference_run, train_again_on, train_on, weights


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_labelled(tmp_path_factory.mktemp("rows") / "rows.jsonl")


@pytest.fixture(scope="module")
def drawn(rows: Path):
    """The objective of a config on the rows, its sequences, and its tokenizer."""

    def make(**changes):
        config = config_from_mapping(masked(rows, **changes))
        tokenizer = load_tokenizer("bytes", add_tokens=["<mask>"])
        sequences = prepare(config.data, tokenizer, report=lambda _: None, objective="masked_lm")
        return find_objective(config, tokenizer), sequences, tokenizer

    return make


def test_every_example_is_one_sequence_from_its_begin_to_its_end_token(drawn):
    _, sequences, tokenizer = drawn()
    texts = []
    for index in range(len(sequences)):
        tokens = sequences[index][0][:-1]
        assert tokens[0] == tokenizer.begin
        assert tokens[-1] == tokenizer.end
        assert tokenizer.special.isdisjoint(tokens[1:-1].tolist())
        texts.append(tokenizer.decode(tokens[1:-1]))
    assert len(set(texts)) > 90


def test_the_share_of_masked_tokens_is_exact_and_most_of_them_are_the_mask_token(drawn):
    objective, sequences, tokenizer = drawn()
    ids = np.arange(len(sequences))
    batch = objective.collate(sequences, ids, pad=tokenizer.pad, positions=ids)
    predicted = batch.labels != IGNORED
    texts = [len(sequences[index][0]) - 3 for index in ids]
    assert predicted.sum(1).tolist() == [max(1, int(length * 0.15 + 0.5)) for length in texts]
    assert objective.weight(sequences, ids) == int(predicted.sum()) == batch.loss_tokens
    originals = torch.full_like(batch.inputs, tokenizer.pad)
    for index, length in zip(ids, texts, strict=True):
        originals[index, : length + 2] = torch.from_numpy(sequences[index][0][:-1].astype(np.int64))
    assert torch.equal(batch.labels[predicted], originals[predicted])
    assert torch.equal(batch.inputs[~predicted], originals[~predicted])
    seen = batch.inputs[predicted]
    shares = [float((seen == tokenizer.mask).float().mean()), float((seen == originals[predicted]).float().mean())]
    assert shares == pytest.approx([0.8, 0.1], abs=0.06)
    assert tokenizer.special - {tokenizer.mask} <= tokenizer.special - set(seen.tolist())


def test_masks_follow_from_seed_and_position_alone(drawn):
    objective, sequences, _ = drawn()
    ids = np.arange(8)
    whole = objective.collate(sequences, ids, pad=0, length=160, positions=100 + ids)
    parts = [objective.collate(sequences, ids[[one]], pad=0, length=160, positions=100 + ids[[one]]) for one in ids]
    assert torch.equal(whole.inputs, torch.cat([one.inputs for one in parts]))
    later = objective.collate(sequences, ids, pad=0, length=160, positions=200 + ids)
    assert not torch.equal(whole.labels, later.labels), "an epoch later the masks are others"
    other, _, _ = drawn(seed=7)
    assert not torch.equal(whole.labels, other.collate(sequences, ids, pad=0, length=160, positions=100 + ids).labels)
    evaluated = [objective.collate(sequences, ids, pad=0, length=160) for _ in range(2)]
    assert torch.equal(evaluated[0].inputs, evaluated[1].inputs)


def test_only_padding_has_an_attention_mask(drawn):
    objective, sequences, tokenizer = drawn()
    alone = objective.collate(sequences, np.array([3]), pad=tokenizer.pad)
    assert alone.mask is None
    padded = objective.collate(sequences, np.arange(6), pad=tokenizer.pad)
    assert torch.equal(padded.mask[:, 0, 0], padded.inputs != tokenizer.pad)


def test_micro_batches_do_not_change_what_is_learnt(rows, tmp_path):
    run = train_again_on(1, masked(rows, train__steps=2, train__micro_batch=8), tmp_path)
    expected = reference_run(masked(rows, train__steps=2, train__micro_batch=4))
    assert [line["loss_tokens"] for line in lines(run)] == [line["loss_tokens"] for line in lines(expected)]
    assert [line["loss"] for line in lines(run)] == pytest.approx([line["loss"] for line in lines(expected)], rel=2e-6)


@pytest.mark.slow
def test_a_resumed_run_has_the_masks_and_weights_of_one_that_was_not_stopped(rows, tmp_path):
    config = masked(rows, train__steps=4, train__schedule={"warmup": 2, "total_steps": 4})
    expected = reference_run(config)
    train_again_on(1, {**config, "train": {**config["train"], "steps": 2}}, tmp_path)
    run = train_on(2, {**config, "train": {**config["train"], "micro_batch": 4}}, tmp_path, resume=True)
    assert [line["loss"] for line in lines(run)] == pytest.approx([line["loss"] for line in lines(expected)], rel=2e-6)
    one, other = weights(run), weights(expected)
    assert max(float((one[name] - other[name]).abs().max()) for name in one) < 4e-5


def test_an_exported_run_has_the_logits_of_transformers(rows, tmp_path):
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    run = train_again_on(1, masked(rows, train__steps=2, data__validation=0.25, eval__every=2), tmp_path)
    exported = api.export(run, output=tmp_path / "hf")
    evaluated = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "hf").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer.mask_token == "<mask>"
    assert not model.config.is_decoder
    assert {name: one.shape for name, one in weights(run).items()} == {
        name: one.shape for name, one in model.named_parameters()
    }
    # The loss of the held-out examples, computed by transformers alone.
    config = config_from_mapping(masked(rows, data__validation=0.25))
    own = load_tokenizer("bytes", add_tokens=["<mask>"])
    from shoal.data.sets import prepare_sets

    sets = prepare_sets(config.data, own, seed=config.seed, report=lambda _: None, objective="masked_lm")
    batch = find_objective(config, own).collate(sets.validation, sets.order.validation_sequences(), pad=own.pad)
    with torch.no_grad():
        mask = (batch.inputs != own.pad).long()
        found = model(input_ids=batch.inputs, attention_mask=mask, labels=batch.labels)
    assert evaluated["eval_loss"] == pytest.approx(float(found.loss), rel=1e-5)
    predicted = batch.labels != IGNORED
    right = (found.logits.argmax(-1) == batch.labels)[predicted].float().mean()
    assert evaluated["eval_masked_accuracy"] == pytest.approx(float(right))
    assert exported
