import numpy as np
import pytest

from shoal.data.pack import fit_documents, split_documents, split_stream


def test_every_token_of_a_stream_but_the_first_is_a_label_once() -> None:
    for tokens in [2, 3, 9, 10, 11, 100, 101, 102]:
        for length in [1, 2, 5, 10, 200]:
            bounds = split_stream(tokens, length)
            labels = [
                index for start, end in zip(bounds.starts, bounds.ends, strict=True) for index in range(start + 1, end)
            ]
            assert labels == list(range(1, tokens))
            assert (bounds.ends - bounds.starts)[:-1].tolist() == [length + 1] * (len(bounds.starts) - 1)
    assert len(split_stream(1, 5).starts) == len(split_stream(0, 5).starts) == 0


def test_splitting_documents_loses_no_label_and_never_crosses_a_document_boundary() -> None:
    random = np.random.default_rng(1)
    for _ in range(50):
        lengths = random.integers(1, 40, random.integers(1, 20))
        length = int(random.integers(1, 15))
        bounds = split_documents(lengths, length, "split")
        boundaries = np.concatenate([[0], np.cumsum(lengths)])
        labels = [
            index for start, end in zip(bounds.starts, bounds.ends, strict=True) for index in range(start + 1, end)
        ]
        assert labels == [index for index in range(boundaries[-1]) if index not in boundaries]
        assert (bounds.ends - bounds.starts).max() <= length + 1
        owners = np.searchsorted(boundaries, bounds.starts, side="right")
        assert (owners == np.searchsorted(boundaries, bounds.ends - 1, side="right")).all()


def test_truncated_documents_are_counted() -> None:
    bounds = split_documents(np.array([3, 6, 7, 2]), 5, "truncate")
    assert bounds.starts.tolist() == [0, 3, 9, 16]
    assert bounds.ends.tolist() == [3, 9, 15, 18]
    assert bounds.long == 1


def test_packing_takes_each_document_once_and_overfills_no_sequence() -> None:
    random = np.random.default_rng(2)
    for _ in range(100):
        capacity = int(random.integers(1, 60))
        lengths = random.integers(1, capacity + 1, random.integers(1, 200))
        packing = fit_documents(lengths, capacity)
        assert sorted(packing.order.tolist()) == list(range(len(lengths)))
        assert packing.counts.sum() == len(lengths)
        filled = np.add.reduceat(lengths[packing.order], np.cumsum(packing.counts) - packing.counts)
        assert filled.max() <= capacity
        # Best-fit decreasing never needs more than this; a broken search for free space does.
        assert len(filled) <= 11 / 9 * np.ceil(lengths.sum() / capacity) + 1 + np.sum(lengths > capacity / 2)
        again = fit_documents(lengths, capacity)
        assert (again.order == packing.order).all()


def test_packing_finds_the_tightest_fit() -> None:
    packing = fit_documents(np.array([6, 5, 4, 3, 2]), 10)
    assert [sorted(part.tolist()) for part in np.split(packing.order, np.cumsum(packing.counts)[:-1])] == [
        [0, 2],
        [1, 3, 4],
    ]


def test_packing_a_hundred_thousand_documents_is_quick_and_tight() -> None:
    lengths = np.random.default_rng(3).integers(10, 600, 100_000)
    packing = fit_documents(lengths, 2049)
    assert len(packing.counts) == pytest.approx(lengths.sum() / 2049, rel=0.01)
