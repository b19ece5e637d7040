import threading
import time
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal.config.schema import DataConfig
from shoal.data import Order, Sequences, ShuffledOrder, load_tokenizer, prepare
from shoal.data.loader import MicroBatch, StepBatch, batches, collate_next_token, evaluation_batches
from shoal.data.order import Spans
from shoal.data.sequences import LOSS_TOKEN

MakeSequences = Callable[..., Sequences]
PAD = 258


def take(count: int, sequences: Sequences, order: Order, **changes: Any) -> list[StepBatch]:
    options: dict[str, Any] = {"first_step": 0, "global_batch": 8, "micro_batch": 2, "rank": 0, "ranks": 1, "pad": PAD}
    return list(islice(batches(sequences, order, **(options | changes)), count))


def trained(micro_batches: Iterable[MicroBatch]) -> list[tuple[int, int]]:
    """The (input, label) pairs that count in the loss."""
    pairs: list[tuple[int, int]] = []
    for batch in micro_batches:
        kept = batch.labels != -100
        pairs += zip(batch.inputs[kept].tolist(), batch.labels[kept].tolist(), strict=True)
    return pairs


def expected_pairs(sequences: Sequences, sequence_ids: Iterable[int]) -> list[tuple[int, int]]:
    pairs = []
    for index in sequence_ids:
        tokens, flags = sequences[index]
        pairs += [(int(tokens[at - 1]), int(tokens[at])) for at in range(1, len(tokens)) if flags[at] & LOSS_TOKEN]
    return pairs


def test_a_step_has_the_same_sequences_for_any_world_size_and_micro_batch(make_sequences: MakeSequences) -> None:
    sequences = make_sequences(21)
    order = ShuffledOrder(21, seed=4, validation=0.1)
    for step in range(6):
        whole = order.training_sequences(step * 8, 8)
        for ranks, micro_batch in [(1, 8), (1, 2), (1, 1), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2)]:
            parts = [
                take(1, sequences, order, first_step=step, rank=rank, ranks=ranks, micro_batch=micro_batch)[0]
                for rank in range(ranks)
            ]
            assert sorted(np.concatenate([part.sequence_ids for part in parts]).tolist()) == sorted(whole.tolist())
            assert {part.weight for part in parts} == {int(sequences.loss_tokens(whole).sum())}
            pairs = [pair for part in parts for pair in trained(part.micro_batches)]
            assert sorted(pairs) == sorted(expected_pairs(sequences, whole))
            assert len(pairs) == parts[0].weight


def test_a_micro_batch_takes_its_sequences_at_the_offset_of_its_rank(make_sequences: MakeSequences) -> None:
    sequences, order = make_sequences(40), ShuffledOrder(40, seed=4)
    step = take(1, sequences, order, global_batch=12, micro_batch=2, rank=1, ranks=3)[0]
    whole = order.training_sequences(0, 12)
    assert step.sequence_ids.tolist() == whole[[2, 3, 8, 9]].tolist()
    assert len(step.micro_batches) == 2


def test_resuming_at_a_step_gives_the_batches_of_an_uninterrupted_run(make_sequences: MakeSequences) -> None:
    sequences, order = make_sequences(13), ShuffledOrder(13, seed=4)
    reached = take(9, sequences, order)
    for first in (1, 4, 8):
        resumed = take(9 - first, sequences, order, first_step=first)
        for one, other in zip(resumed, reached[first:], strict=True):
            assert one.sequence_ids.tolist() == other.sequence_ids.tolist()
            assert all(
                torch.equal(a.inputs, b.inputs) and torch.equal(a.labels, b.labels)
                for a, b in zip(one.micro_batches, other.micro_batches, strict=True)
            )


def test_an_epoch_of_batches_takes_every_sequence_once(make_sequences: MakeSequences) -> None:
    sequences, order = make_sequences(24), ShuffledOrder(24, seed=4)
    for epoch in range(3):
        steps = take(3, sequences, order, first_step=3 * epoch)
        assert sorted(np.concatenate([step.sequence_ids for step in steps]).tolist()) == list(range(24))


@pytest.mark.parametrize("separate", [True, False])
@pytest.mark.parametrize("length", [None, 20])
def test_sequences_are_padded_on_the_right_and_shapes_are_static_with_a_length(
    make_sequences: MakeSequences, separate: bool, length: int | None
) -> None:
    sequences, order = make_sequences(16, separate=separate), ShuffledOrder(16, seed=4)
    for step in take(4, sequences, order, length=length):
        for number, batch in enumerate(step.micro_batches):
            mine = step.sequence_ids[2 * number : 2 * number + 2]
            sizes = [len(sequences[index][0]) - 1 for index in mine]
            assert batch.inputs.shape == batch.labels.shape == (2, length or max(sizes))
            assert batch.inputs.dtype == batch.labels.dtype == torch.int64
            for line, size in enumerate(sizes):
                assert batch.inputs[line, :size].tolist() == sequences[mine[line]][0][:-1].tolist()
                assert (batch.inputs[line, size:] == PAD).all()
                assert (batch.labels[line, size:] == -100).all()
            if not separate:
                assert batch.positions is None
                assert batch.documents is None


def test_positions_restart_at_each_document_and_padding_is_a_document_of_its_own(make_sequences: MakeSequences) -> None:
    sequences, order = make_sequences(16, separate=True), ShuffledOrder(16, seed=4)
    for step in take(4, sequences, order, length=20):
        for number, batch in enumerate(step.micro_batches):
            assert batch.positions is not None
            assert batch.documents is not None
            assert batch.positions.dtype == torch.int64
            assert batch.documents.dtype == torch.int32
            for line, sequence in enumerate(step.sequence_ids[2 * number : 2 * number + 2]):
                positions, documents = [], []
                for flag in sequences[sequence][1][:-1].tolist():
                    positions.append(0 if flag & 2 else positions[-1] + 1)
                    documents.append((documents[-1] + 1 if documents else 0) if flag & 2 else documents[-1])
                padding = 20 - len(positions)
                documents += [documents[-1] + 1] * padding
                positions += [positions[-1] + 1 + more for more in range(padding)]
                assert batch.positions[line].tolist() == positions
                assert batch.documents[line].tolist() == documents
            same = batch.documents[:, :, None] == batch.documents[:, None, :]
            assert (same & torch.ones(20, 20, dtype=torch.bool).tril()).any(-1).all()


def test_documents_of_a_stream_can_be_kept_apart(tmp_path: Path) -> None:
    # abc. defghijklm. no.   The second sequence begins and ends inside a document.
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "abc"}\n{"text": "defghijklm"}\n{"text": "no"}\n')
    data = DataConfig(source="json", path=str(file), max_length=6, document_mask=True, pack=True)
    sequences = prepare(data, load_tokenizer("bytes"), report=lambda sentence: None)
    batch = collate_next_token(sequences, np.arange(len(sequences)), pad=PAD)
    assert batch.positions is not None
    assert batch.documents is not None
    assert batch.positions.tolist() == [[0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 4, 5], [0, 1, 2, 0, 1, 2]]
    assert batch.documents.tolist() == [[0, 0, 0, 0, 1, 1], [0] * 6, [0, 0, 0, 1, 1, 2]]
    end = 257
    assert batch.inputs.tolist() == [[*b"abc", end, *b"de"], [*b"fghijk"], [*b"lm", end, *b"no", PAD]]
    assert batch.labels.tolist() == [
        [*b"bc", end, -100, *b"ef"],
        [*b"ghijkl"],
        [ord("m"), end, -100, ord("o"), end, -100],
    ]


@pytest.mark.parametrize("workers", [1, 3])
def test_worker_threads_change_nothing_and_end_with_the_iterator(make_sequences: MakeSequences, workers: int) -> None:
    sequences, order = make_sequences(40), ShuffledOrder(40, seed=4)
    before = threading.active_count()
    iterator = batches(
        sequences, order, first_step=2, global_batch=8, micro_batch=4, rank=0, ranks=2, pad=PAD, workers=workers
    )
    assert threading.active_count() == before
    found = list(islice(iterator, 12))
    expected = take(12, sequences, order, first_step=2, micro_batch=4, ranks=2)
    assert [one.sequence_ids.tolist() for one in found] == [one.sequence_ids.tolist() for one in expected]
    assert threading.active_count() > before
    iterator.close()
    assert threading.active_count() == before


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_in_a_worker_is_raised_in_the_loop(
    make_sequences: MakeSequences, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    sequences, order = make_sequences(40), ShuffledOrder(40, seed=4)
    training_sequences = order.training_sequences

    def fail_at_the_third_step(first: int, count: int, left_out: Spans) -> np.ndarray:
        if first >= 16:
            raise OSError("the disk is gone")
        time.sleep(0.01)
        return training_sequences(first, count, left_out)

    monkeypatch.setattr(order, "training_sequences", fail_at_the_third_step)
    before = threading.active_count()
    iterator = batches(
        sequences, order, first_step=0, global_batch=8, micro_batch=8, rank=0, ranks=1, pad=PAD, workers=workers
    )
    assert [len(next(iterator).sequence_ids) for _ in range(2)] == [8, 8]
    with pytest.raises(OSError, match="disk is gone"):
        next(iterator)
    assert threading.active_count() == before


def test_impossible_splits_are_refused_at_once(make_sequences: MakeSequences) -> None:
    sequences, order = make_sequences(16), ShuffledOrder(16, seed=4)
    with pytest.raises(ValueError, match="cannot be split"):
        take(1, sequences, order, micro_batch=3)
    with pytest.raises(ValueError, match="more than the length"):
        take(1, sequences, order, length=3)
    with pytest.raises(ValueError, match="the order is over 15 sequences"):
        take(1, sequences, ShuffledOrder(15, seed=4))


@pytest.mark.parametrize("limit", [None, 1, 7, 100])
@pytest.mark.parametrize("separate", [True, False])
def test_evaluation_sees_the_same_sequences_on_any_number_of_ranks(
    make_sequences: MakeSequences, limit: int | None, separate: bool
) -> None:
    sequences = make_sequences(30, separate=separate)
    wanted = ShuffledOrder(30, seed=4, validation=0.4).validation_sequences()
    for ranks in (1, 2, 4, 5):
        for micro_batch in (1, 3, 4):
            parts = [
                list(
                    evaluation_batches(
                        sequences, wanted, micro_batch=micro_batch, rank=rank, ranks=ranks, pad=PAD, limit=limit
                    )
                )
                for rank in range(ranks)
            ]
            assert len({len(part) for part in parts}) == 1
            assert {batch.inputs.shape[0] for part in parts for batch in part} == {micro_batch}
            pairs = sorted(pair for part in parts for pair in trained(part))
            assert pairs == sorted(expected_pairs(sequences, wanted[:limit]))


def test_evaluation_of_no_sequences_yields_nothing(make_sequences: MakeSequences) -> None:
    none = np.empty(0, dtype=np.int64)
    assert list(evaluation_batches(make_sequences(3), none, micro_batch=2, rank=0, ranks=2, pad=PAD)) == []
