"""Several sources in one order: shares, epochs, resuming anywhere, and what each sequence holds."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data import load_tokenizer
from shoal.data.mixture import MixedOrder
from shoal.data.order import ShuffledOrder
from shoal.data.sequences import DOCUMENT
from shoal.data.sets import Sets, prepare_sets

Write = Callable[[str, Any], Path]
BYTES = load_tokenizer("bytes")

sources = st.lists(st.tuples(st.integers(1, 40), st.floats(0.05, 20.0)), min_size=2, max_size=4)

# An epoch is over when the rarest has been read: with the rates above it may have 16,000 positions.
similar = st.lists(st.tuples(st.integers(1, 40), st.floats(0.4, 4.0)), min_size=2, max_size=4)


def make_order(sources: list[tuple[int, float]], *, repeat: bool, seed: int = 1) -> MixedOrder:
    orders = [ShuffledOrder(count, seed + number) for number, (count, _) in enumerate(sources)]
    return MixedOrder(orders, [rate for _, rate in sources], seed=seed, repeat=repeat)


@given(sources, st.booleans(), st.integers(0, 500), st.lists(st.integers(1, 40), min_size=1, max_size=8))
@settings(max_examples=15, deadline=None)
def test_any_split_of_the_positions_gives_the_same_order(
    sources: list[tuple[int, float]], repeat: bool, first: int, sizes: list[int]
) -> None:
    order = make_order(sources, repeat=repeat)
    whole = order.training_sequences(first, sum(sizes))
    parts = [order.training_sequences(first + sum(sizes[:k]), size) for k, size in enumerate(sizes)]
    assert np.concatenate(parts).tolist() == whole.tolist()


@given(sources, st.integers(0, 3))
@settings(max_examples=15, deadline=None)
def test_where_sources_end_an_epoch_has_every_sequence_once(sources: list[tuple[int, float]], epoch: int) -> None:
    order = make_order(sources, repeat=False)
    assert order.training_count == sum(count for count, _ in sources)
    found = order.training_sequences(epoch * order.training_count, order.training_count)
    expected = {j * len(sources) + k for k, (count, _) in enumerate(sources) for j in range(count)}
    assert len(found) == len(expected)
    assert set(found.tolist()) == expected


@given(sources, st.integers(1, 400))
@settings(max_examples=15, deadline=None)
def test_after_any_number_of_positions_each_source_has_had_its_share(
    sources: list[tuple[int, float]], positions: int
) -> None:
    order = make_order(sources, repeat=True)
    total = sum(rate for _, rate in sources)
    found = Counter((order.training_sequences(0, positions) % len(sources)).tolist())
    for source, (_, rate) in enumerate(sources):
        assert abs(found[source] - positions * rate / total) <= 1 + len(sources) * rate / total / 2
    assert order.positions_before(positions) == [found[source] for source in range(len(sources))]


@given(similar)
@settings(max_examples=15, deadline=None)
def test_where_sources_repeat_an_epoch_is_over_when_each_has_been_read(sources: list[tuple[int, float]]) -> None:
    order = make_order(sources, repeat=True)
    assert order.training_count is not None
    count = len(sources)
    seen = set(order.training_sequences(0, order.training_count).tolist())
    before = set(order.training_sequences(0, order.training_count - 1).tolist())
    everything = {j * count + k for k, (size, _) in enumerate(sources) for j in range(size)}
    assert seen == everything
    assert before != everything


def mixed(write: Write, settings: Any, said: list[str], **changes: Any) -> Sets:
    write("a.jsonl", [{"text": f"{number:04d} " * 6} for number in range(60)])
    answers = [{"instruction": f"Say {number}.", "output": f"{number} " * (number % 7 + 1)} for number in range(50)]
    file = write("b.jsonl", answers)
    blocks = [
        {"path": str(file.parent / "a.jsonl"), "weight": 3},
        {"path": str(file), "weight": 1, "format": "alpaca"},
    ]
    data = settings(**{"source": blocks, "max_length": 512, **changes})
    return prepare_sets(data, BYTES, seed=5, report=said.append)


@pytest.mark.parametrize("by", ["tokens", "examples"])
def test_weights_are_shares_of_tokens_or_of_examples(write: Write, settings: Any, said: list[str], by: str) -> None:
    sets = mixed(write, settings, said, mixing={"by": by})
    assert sets.order.training_count is not None
    ids = sets.order.training_sequences(0, 4000)
    amounts = [0.0, 0.0]
    for one in ids.tolist():
        tokens, flags = sets.training[one]
        separate = one % 2 == 1
        amounts[one % 2] += (
            len(tokens) - 1
            if by == "tokens"
            else np.count_nonzero(flags & DOCUMENT)
            if separate
            else 60 / (one_source(sets))
        )
    assert amounts[0] / sum(amounts) == pytest.approx(0.75, abs=0.02)
    assert f"weights are shares of {by}" in said[-1]
    assert sets.mean_loss_tokens == pytest.approx(sets.training.loss_tokens(ids).mean(), rel=0.02)


def one_source(sets: Sets) -> int:
    """The sequences of the first source."""
    return len(sets.training._parts[0])  # type: ignore[attr-defined]


def test_a_stream_of_text_is_one_document_to_the_mask_of_a_mixture(
    write: Write, settings: Any, said: list[str]
) -> None:
    sets = mixed(write, settings, said)
    assert sets.training.separate
    text, answers = (sets.training[number][1] for number in (0, 1))
    assert np.flatnonzero(text & DOCUMENT).tolist() == [0]
    assert np.count_nonzero(answers & DOCUMENT) > 1


def test_a_fraction_is_held_out_of_each_source(write: Write, settings: Any, said: list[str]) -> None:
    sets = mixed(write, settings, said, validation=0.2)
    held_out = sets.order.validation_sequences()
    assert sets.validation is sets.training
    assert {number % 2 for number in held_out[:8].tolist()} == {0, 1}
    trained = sets.order.training_sequences(0, sets.order.training_count or 0)
    assert not set(trained.tolist()) & set(held_out.tolist())


def test_the_validation_set_of_a_mixture_may_be_a_file(write: Write, settings: Any, said: list[str]) -> None:
    file = write("held-out.jsonl", [{"text": "of its own"}])
    sets = mixed(write, settings, said, validation=str(file))
    assert sets.validation is not None
    assert sets.order.validation_sequences().tolist() == [0]
    assert BYTES.decode(sets.validation[0][0][:-1]) == "of its own"


def test_a_mixture_says_how_often_an_epoch_has_each_source(write: Write, settings: Any, said: list[str]) -> None:
    mixed(write, settings, said, validation=0.2, mixing={"when_exhausted": "end"})
    assert said[-1].count(" 1.00 times") == 2
    mixed(write, settings, said, validation=0.2)
    assert said[-1].count(" 1.00 times") == 1


def test_the_content_of_a_mixture_changes_with_its_weights(write: Write, settings: Any, said: list[str]) -> None:
    first = mixed(write, settings, said).training.summary.content
    assert mixed(write, settings, said).training.summary.content == first
    assert mixed(write, settings, said, mixing={"by": "examples"}).training.summary.content != first
