"""What `shoal data` shows of the objectives of encoders, and masked LM on data that is tokenized already."""

import json
from pathlib import Path

import numpy as np
import pytest

from shoal import api
from shoal.config.schema import DataConfig
from shoal.data import load_tokenizer, prepare, token_files
from shoal.data.inspect.spans import MaskedSpan
from shoal.data.masks import eligible_tokens, total_masked
from shoal.mistakes import UserMistake
from tests.encoders import masked, write_labelled
from tests.harness import lines, train_again_on
from tests.launch.command import forked_shoal

BYTES = load_tokenizer("bytes", add_tokens=["<mask>"])


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_labelled(tmp_path_factory.mktemp("rows") / "rows.jsonl")


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of bytes, each with its begin and end token."""
    drawn = np.random.default_rng(0)
    documents = [[BYTES.begin, *drawn.integers(97, 123, drawn.integers(1, 60)), BYTES.end] for _ in range(60)]
    path = tmp_path_factory.mktemp("tokens") / "stream.bin"
    np.array([token for one in documents for token in one], dtype=np.uint16).tofile(path)
    return path


def test_a_preview_of_masked_lm_shows_what_the_model_sees_and_predicts(rows: Path) -> None:
    found = api.data_preview(rows, ["train.objective=masked_lm", "data.max_length=512"], examples=4)
    texts = [json.loads(line)["text"] for line in rows.read_text().splitlines()[:4]]
    for example, text in zip(found.sources[0].examples, texts, strict=True):
        predicted = [span for span in example.spans if isinstance(span, MaskedSpan)]
        assert "".join(span.text for span in example.spans) == f"<|begin|>{text}<|end|>"
        assert len(predicted) == example.loss_tokens == max(1, int(len(text) * 0.15 + 0.5))
        assert {span.trained for span in predicted} == {True}
    assert "<mask>→" in found.text()
    assert f"{found.sources[0].examples[0].loss_tokens} masked\n" in found.text()
    again = api.data_preview(rows, ["train.objective=masked_lm", "data.max_length=512", "seed=7"], examples=4)
    assert again.text() != found.text(), "the masks are those of the seed"


def test_a_preview_of_packed_texts_has_the_masks_of_a_sequence(rows: Path) -> None:
    options = ["train.objective=masked_lm", "data.max_length=40", "data.pack=true"]
    (sequence, *_) = api.data_preview(rows, options, sequences=True).sources[0].sequences
    predicted = [span for one in sequence.documents for span in one.spans if isinstance(span, MaskedSpan)]
    assert sequence.inputs == sum(one.tokens for one in sequence.documents) == 40
    assert len(predicted) == sequence.loss_tokens > 0


def test_a_preview_of_classification_shows_the_label_and_what_is_cut(rows: Path, tmp_path: Path) -> None:
    options = ["train.objective=classify", "data.label=kind", "data.max_length=24"]
    seen = forked_shoal(tmp_path, "data", "preview", str(rows), "-n", "1", *options)
    kind = json.loads(rows.read_text().splitlines()[0])["kind"]
    assert f" tokens, label {kind}  truncated: it is longer than data.max_length 24\n" in seen.out
    (example,) = api.data_preview(rows, options, examples=1).sources[0].examples
    assert (example.label, example.loss_tokens, [span.trained for span in example.spans]) == (kind, 0, [False])
    assert len(example.spans[0].text) == len("<|begin|>") + 23  # the begin token is one


def test_stats_count_what_the_objective_trains_on(rows: Path) -> None:
    texts = [json.loads(line) for line in rows.read_text().splitlines()]
    found = api.data_stats(rows, ["train.objective=masked_lm", "data.max_length=512", "data.validation=0"])
    expected = sum(max(1, int(len(one["text"]) * 0.15 + 0.5)) for one in texts)
    assert (found.sources[0].loss_tokens, found.loss_tokens_per_epoch) == (expected, expected)
    assert f"{expected:,} are masked in each epoch" in found.text()
    options = ["train.objective=classify", "data.label=kind", "data.max_length=24", "data.validation=0"]
    found = api.data_stats(rows, options)
    kinds = [one["kind"] for one in texts]
    assert {one.name: one.examples for one in found.sources[0].classes} == {kind: kinds.count(kind) for kind in kinds}
    cut = [len(one["text"]) + 2 - 24 for one in texts if len(one["text"]) + 2 > 24]
    assert (found.sources[0].longer, found.sources[0].tokens_lost) == (len(cut), sum(cut))
    assert (found.loss_tokens_per_epoch, found.sources[0].packing.packed) == (96, None)


@pytest.mark.parametrize("block", [1 << 22, 7])
def test_special_tokens_of_token_files_are_never_masked(stream: Path, block: int, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(token_files, "_TOKENS_AT_ONCE", block)
    data = DataConfig(path=str(stream), source="tokens", max_length=16, validation=0)
    found = prepare(data, BYTES, report=lambda _: None, objective="masked_lm", cache=tmp_path)
    numbers = np.arange(len(found))
    eligible = [eligible_tokens(found[index][1]) for index in numbers]
    assert found.loss_tokens(numbers).tolist() == [len(one) for one in eligible]
    shown = np.concatenate([found[index][0][one] for index, one in zip(numbers, eligible, strict=True)])
    assert BYTES.special.isdisjoint(shown.tolist())
    whole = np.fromfile(stream, dtype=np.uint16)
    ordinary = (whole < 256).sum() - (whole[:-1][16::16] < 256).sum()  # but the first of each sequence
    assert len(shown) == ordinary
    assert found.summary.encoder
    assert total_masked(found.loss_tokens(numbers), 0.15) < len(shown)


def test_masked_lm_trains_on_token_files(stream: Path, tmp_path: Path) -> None:
    config = masked(
        stream, data__source="tokens", data__pack="auto", data__max_length=32, data__validation=0.1, train__steps=2
    )
    one, two = (
        lines(train_again_on(ranks, {**config, "train": {**config["train"], "micro_batch": 4}}, tmp_path / str(ranks)))
        for ranks in (1, 2)
    )
    assert [line["loss"] for line in one] == pytest.approx([line["loss"] for line in two], rel=2e-6)
    assert [line["loss_tokens"] for line in one] == [line["loss_tokens"] for line in two]


def test_token_files_have_no_labels(stream: Path) -> None:
    data = DataConfig(path=str(stream), source="tokens", max_length=16, validation=0, label="kind")
    with pytest.raises(UserMistake, match=r"needs a label for each example, and data.source tokens is one stream"):
        prepare(data, BYTES, report=lambda _: None, objective="classify")
