"""Records of the format unpaired as sequences: single answers, each with its label."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.data import Sequences, load_tokenizer, prepare
from shoal.data.first_look import check_first_record
from shoal.data.inspect.packed import Choice
from shoal.data.inspect.preview import preview_source
from shoal.data.inspect.preview_text import plain_text, source_pieces
from shoal.data.inspect.stats import measure_source
from shoal.data.sequences import DESIRABLE, DOCUMENT
from shoal.mistakes import UserMistake

BYTES = load_tokenizer("bytes")
NAME = "apo_zero_unpaired"
GOOD = {"prompt": "a?", "completion": "yes", "label": True}
BAD = {"prompt": "bb?", "completion": "never", "label": False}
Examples = Callable[..., Sequences]


@pytest.fixture
def examples(tmp_path: Path, settings: Any, said: list[str]) -> Examples:
    """The sequences of these records."""

    def make(*records: dict[str, Any], objective: str = NAME, **given: Any) -> Sequences:
        file = tmp_path / "examples.jsonl"
        file.write_text("".join(json.dumps(one) + "\n" for one in records))
        data = settings(**{"source": "json", "path": file, "max_length": 64, **given})
        return prepare(data, BYTES, report=said.append, objective=objective)

    return make


def labels(sequences: Sequences) -> list[list[tuple[str, bool]]]:
    """Of each sequence, the text and the label of each document."""
    found = []
    for index in range(len(sequences)):
        tokens, flags = sequences[index]
        firsts = np.flatnonzero(flags & DOCUMENT)
        texts = [BYTES.decode(part).removesuffix("<|end|>") for part in np.split(tokens, firsts[1:])]
        found.append([(text, bool(flags[first] & DESIRABLE)) for text, first in zip(texts, firsts, strict=True)])
    return found


@pytest.mark.parametrize("pack", [True, False])
def test_an_answer_keeps_its_label_where_it_is_packed_or_truncated(
    pack: bool, examples: Examples, said: list[str]
) -> None:
    long = {"prompt": "c?", "completion": "x" * 90, "label": True}
    found = labels(examples(GOOD, BAD, long, max_length=30, pack=pack))
    truncated = [("c?" + "x" * 29, True)]
    assert found == (
        [truncated, [("bb?never", False), ("a?yes", True)]]
        if pack
        else [[("a?yes", True)], [("bb?never", False)], truncated]
    )
    assert said[0].startswith("3 documents (unpaired, 2 desirable)")
    assert "1 documents are longer than data.max_length and were truncated." in said


def test_both_answers_of_a_pair_have_a_label_and_need_not_fit_one_sequence(examples: Examples) -> None:
    pair = {"prompt": "c?", "chosen": "x" * 20, "rejected": "y" * 25}
    for given in ({}, {"format": "preference"}, {"format": "unpaired"}):
        found = labels(examples(pair, GOOD, max_length=30, **given))
        assert sorted(one for sequence in found for one in sequence) == [
            ("a?yes", True), ("c?" + "x" * 20, True), ("c?" + "y" * 25, False),
        ]  # fmt: skip


@pytest.mark.parametrize(("label", "is_desirable"), [(1, True), (0, False), ("True", True), ("false", False)])
def test_labels_of_tables_are_understood(label: object, is_desirable: bool, examples: Examples) -> None:
    assert labels(examples({**GOOD, "label": label})) == [[("a?yes", is_desirable)]]


@pytest.mark.parametrize("label", [None, "good", 2, [True]])
def test_another_label_is_refused(label: object, examples: Examples) -> None:
    with pytest.raises(UserMistake, match=r"examples.jsonl:2: label must be true \(a desirable answer\) or false"):
        examples(GOOD, {**BAD, "label": label})


def test_messages_are_rendered_as_a_conversation(examples: Examples) -> None:
    chat = {
        "prompt": [{"role": "user", "content": "a?"}],
        "completion": [{"role": "assistant", "content": "yes"}],
        "label": True,
    }
    ((text, is_desirable),) = labels(examples(chat, chat_template="chatml", max_length=99))[0]
    assert is_desirable
    assert "user\na?" in text
    assert "assistant\nyes" in text


@pytest.mark.parametrize(("label", "kind"), [(True, "desirable"), (False, "undesirable")])
def test_equal_labels_are_reported_once(label: bool, kind: str, examples: Examples, said: list[str]) -> None:
    examples({**GOOD, "label": label}, {**BAD, "label": label})
    assert [one for one in said if one.startswith("All answers are")] == [
        f"All answers are {kind}: there is nothing to tell them from. Check the labels."
    ]
    said.clear()
    examples(GOOD, BAD)
    assert not [one for one in said if one.startswith("All answers are")]


def test_data_without_labels_is_refused_with_the_keys_that_are_needed(tmp_path: Path, settings: Any) -> None:
    file = tmp_path / "plain.jsonl"
    file.write_text(json.dumps({"prompt": "a?", "completion": "yes"}) + "\n")
    data = settings(source="json", path=file)
    for refuse in (check_first_record, lambda data, name: prepare(data, BYTES, report=print, objective=name)):
        with pytest.raises(
            UserMistake, match=r"needs to know which answers are desirable, and data.format completion does not say: "
            r"records need the keys prompt and completion and label or chosen and rejected",
        ):  # fmt: skip
            refuse(data, NAME)
    with pytest.raises(UserMistake, match=r"plain.jsonl:1 lacks prompt and completion and label or chosen"):
        prepare(settings(source="json", path=file, format="unpaired"), BYTES, report=print, objective=NAME)


def test_labels_are_for_this_objective_only(examples: Examples) -> None:
    """Without it they are left alone, as any other column."""
    assert labels(examples(GOOD, BAD, objective="causal_lm", pack=False)) == [[("a?yes", False)], [("bb?never", False)]]
    with pytest.raises(UserMistake, match=r"data.format unpaired has a label for each answer, .* apo_zero_unpaired"):
        examples(GOOD, objective="causal_lm", format="unpaired")


def test_answers_are_whole_and_models_keep_them_apart(examples: Examples, tmp_path: Path, settings: Any) -> None:
    with pytest.raises(UserMistake, match=r"data.long_documents split .* use truncate or drop"):
        examples(GOOD, long_documents="split")
    data = settings(source="json", path=tmp_path / "examples.jsonl", max_length=64)
    with pytest.raises(UserMistake, match=r"needs to know the documents of a sequence, but it cannot"):
        prepare(data, BYTES, report=lambda _: None, objective=NAME, not_apart="it cannot")


def test_a_preview_and_statistics_show_them(examples: Examples, tmp_path: Path, settings: Any) -> None:
    prepared = examples(GOOD, BAD, {"prompt": "c?", "chosen": "x", "rejected": "y"})
    data = settings(source="json", path=tmp_path / "examples.jsonl", max_length=64)
    shown = preview_source(data, BYTES, Choice(count=4), report=lambda _: None, objective=NAME)
    assert [(one.number, one.fate, one.loss_tokens, one.desirable) for one in shown.examples] == [
        (0, "kept", 4, True), (1, "kept", 6, False), (2, "kept", 2, True), (2, "kept", 2, False),
    ]  # fmt: skip
    assert "6 in the loss, undesirable" in plain_text(source_pieces(shown, "bytes", None, drawn=False))
    packed = preview_source(data, BYTES, Choice(count=1, sequences=True), report=lambda _: None, objective=NAME)
    assert len(packed.sequences[0].documents) == 4
    stats = measure_source(data, BYTES, prepared, report=lambda _: None, objective=NAME)
    assert (stats.documents, stats.packing.chosen, stats.packing.packed.sequences) == (4, "packed", 1)
