"""Records of the format preference as sequences: both answers of a pair in one sequence, the chosen one first."""

import json
import re
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
from shoal.data.sequences import DOCUMENT, LOSS_TOKEN
from shoal.mistakes import UserMistake

BYTES = load_tokenizer("bytes")
Pairs = Callable[..., Sequences]


@pytest.fixture
def pairs(tmp_path: Path, settings: Any, said: list[str]) -> Pairs:
    """The sequences of (prompt, chosen, rejected)."""

    def make(*records: tuple[str, str, str], objective: str = "dpo", **given: Any) -> Sequences:
        file = tmp_path / "pairs.jsonl"
        file.write_text(
            "".join(json.dumps(dict(zip(("prompt", "chosen", "rejected"), one, strict=True))) + "\n" for one in records)
        )
        data = settings(**{"source": "json", "path": file, "max_length": 64, **given})
        return prepare(data, BYTES, report=said.append, objective=objective)

    return make


def documents(sequences: Sequences) -> list[list[tuple[str, str]]]:
    """Of each sequence, the text and the answer of each document."""
    found = []
    for index in range(len(sequences)):
        tokens, flags = sequences[index]
        parts = np.split(np.arange(len(tokens)), np.flatnonzero(flags & DOCUMENT))[1:]
        found.append(
            [
                (BYTES.decode(tokens[part]), BYTES.decode(tokens[part][(flags[part] & LOSS_TOKEN) != 0]))
                for part in parts
            ]
        )
    return found


def end(text: str) -> str:
    return text + BYTES.decode(np.array([BYTES.end]))


ONE, TWO, LONG = ("a?", "yes", "no"), ("b?", "good", "bad"), ("c?", "x" * 20, "y" * 30)


@pytest.mark.parametrize("pack", [True, False])
def test_both_answers_of_a_pair_are_in_one_sequence_and_the_chosen_one_is_first(pack: bool, pairs: Pairs) -> None:
    found = documents(pairs(ONE, TWO, LONG, pack=pack))
    expected = [[(end(prompt + answer), end(answer)) for answer in answers] for prompt, *answers in (ONE, TWO, LONG)]
    if pack:  # the longest first
        expected = [expected[2], expected[1] + expected[0]]
    assert found == expected


def test_documents_do_not_attend_to_each_other_packed_or_not(pairs: Pairs) -> None:
    assert all(pairs(ONE, TWO, pack=pack).separate for pack in (True, False, "auto"))


def test_the_answers_of_a_pair_that_is_too_long_are_shortened_and_the_longer_one_first(
    pairs: Pairs, said: list[str]
) -> None:
    """63 tokens: the shorter document has 23, so that 40 are left for the other, or both have 31."""
    found = documents(pairs(("c?", "x" * 20, "y" * 90), ("c?", "x" * 80, "y" * 90), max_length=62, pack=False))
    assert found[0] == [(end("c?" + "x" * 20), end("x" * 20)), ("c?" + "y" * 38, "y" * 38)]
    assert found[1] == [("c?" + "x" * 29, "x" * 29), ("c?" + "y" * 29, "y" * 29)]
    assert "2 pairs are longer than data.max_length and were truncated." in said


def test_a_pair_without_an_answer_after_its_prompt_is_left_out_whole(pairs: Pairs, said: list[str]) -> None:
    found = documents(pairs(ONE, ("d" * 40, "x", "y"), max_length=62))
    assert found == [[(end("a?yes"), end("yes")), (end("a?no"), end("no"))]]
    assert "1 pairs have no loss tokens and were left out." in said
    assert said[0].startswith("2 pairs (preference)")
    with pytest.raises(UserMistake, match=r"None of the 1 pairs in data.path has loss tokens in both answers"):
        pairs(("d" * 40, "x", "y"), max_length=62)


def test_long_pairs_may_be_dropped_and_not_split(pairs: Pairs, said: list[str]) -> None:
    assert len(documents(pairs(ONE, ("c?", "x", "y" * 90), long_documents="drop"))[0]) == 2
    assert "1 pairs are longer than data.max_length and were left out." in said
    with pytest.raises(UserMistake, match=r"data.long_documents split .* use truncate or drop"):
        pairs(ONE, long_documents="split")
    with pytest.raises(UserMistake, match=r"All 1 pairs in data.path .* Raise data.max_length\.$"):
        pairs(("c?", "x", "y" * 90), long_documents="drop")


def test_a_preview_shows_both_answers_and_what_becomes_of_them(pairs: Pairs, tmp_path: Path, settings: Any) -> None:
    prepared = pairs(ONE, LONG, ("d" * 40, "x", "y"), max_length=44)
    data = settings(source="json", path=tmp_path / "pairs.jsonl", max_length=44)

    def look(**choice: Any) -> Any:
        return preview_source(data, BYTES, Choice(**choice), report=lambda _: None, objective="dpo")

    examples = look(count=3).examples
    assert [(one.number, one.fate, one.loss_tokens) for one in examples] == [
        (0, "kept", 4), (0, "kept", 3), (1, "truncated", 20), (1, "truncated", 20),
        (2, "dropped", 0), (2, "dropped", 0),
    ]  # fmt: skip
    assert [one.number for one in look(count=1, first=1).examples] == [1, 1]
    text = plain_text(source_pieces(look(count=2), "bytes", None, drawn=False))
    assert re.findall("chosen|rejected", text) == ["chosen", "rejected"] * 2
    shown = [[one.tokens for one in sequence.documents] for sequence in look(count=9, sequences=True).sequences]
    assert sorted(shown) == sorted([[6, 5], [22, 22]])
    stats = measure_source(data, BYTES, prepared, report=lambda _: None, objective="dpo")
    assert (stats.documents, stats.longer, stats.dropped) == (6, 2, 1)
    assert (stats.packing.packed.sequences, stats.packing.chosen) == (2, "packed")


def test_objectives_on_pairs_share_the_cache(pairs: Pairs, said: list[str]) -> None:
    pairs(ONE, TWO)
    pairs(ONE, TWO, objective="simpo")
    assert said[-1].startswith("Using cached tokenized data")


def test_only_answers_are_compared(pairs: Pairs) -> None:
    assert documents(pairs(ONE, train_on="all")) == documents(pairs(ONE))


def test_other_data_is_refused_with_the_columns_that_are_needed(tmp_path: Path, settings: Any) -> None:
    file = tmp_path / "alpaca.jsonl"
    file.write_text(json.dumps({"instruction": "a?", "output": "yes"}) + "\n")
    for refuse in (
        lambda data: check_first_record(data, "dpo"),
        lambda data: prepare(data, BYTES, report=lambda _: None, objective="dpo"),
    ):
        with pytest.raises(UserMistake, match=r"objective dpo compares .* alpaca has one: .* chosen and rejected"):
            refuse(settings(source="json", path=file))


def test_equal_answers_and_models_that_mix_documents_are_refused(pairs: Pairs, tmp_path: Path, settings: Any) -> None:
    with pytest.raises(UserMistake, match=r"pairs.jsonl:2: chosen and rejected are the same"):
        pairs(ONE, ("b?", "x", "x"))
    pairs(ONE)
    data = settings(source="json", path=tmp_path / "pairs.jsonl", max_length=64)
    with pytest.raises(UserMistake, match=r"objective dpo has both answers of a pair in one sequence, but it cannot"):
        prepare(data, BYTES, report=lambda _: None, objective="dpo", not_apart="it cannot")
