"""This rank's share of each step, as tensors, prepared ahead of the loop that asks for them."""

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shoal.data.order import Order, Spans
from shoal.data.sequences import DOCUMENT, TARGET, Sequences

IGNORED = -100  # the label no loss counts


@dataclass
class MicroBatch:
    """The rows of one forward pass. Labels are shifted already: labels[i] is what follows inputs[i].

    `positions` and `documents` (numbers within the row, for a block-diagonal mask) are there when rows hold several
    documents that must not see each other. Padding is a document of its own, so that no query is without a key.
    `mask` (rows × 1 × queries × keys, true: sees) stands in for `documents` where a pass has a part of its rows only.
    """

    inputs: Tensor  # int64, rows × length
    labels: Tensor  # int64, rows × length
    positions: Tensor | None = None  # int64, rows × length; None: 0, 1, 2, …
    documents: Tensor | None = None  # int32, rows × length; None: each row is one
    mask: Tensor | None = None

    def to(self, device: torch.device | str, non_blocking: bool = True) -> "MicroBatch":
        return self._each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin(self) -> "MicroBatch":
        return self._each(lambda tensor: tensor.pin_memory())

    def _each(self, change: Callable[[Tensor], Tensor]) -> "MicroBatch":
        return MicroBatch(
            change(self.inputs),
            change(self.labels),
            None if self.positions is None else change(self.positions),
            None if self.documents is None else change(self.documents),
            None if self.mask is None else change(self.mask),
        )


@dataclass
class StepBatch:
    """One optimizer step's micro_batches on this rank. `loss_tokens` counts the whole global batch, over all ranks."""

    micro_batches: list[MicroBatch]
    loss_tokens: int
    rows: np.ndarray  # this rank's row numbers, pass after pass


def batches(
    rows: Sequences,
    order: Order,
    *,
    first_step: int,
    global_batch: int,
    micro_batch: int,
    rank: int,
    ranks: int,
    pad: int,
    length: int | None = None,
    multiple: int = 1,
    workers: int = 0,
    pin: bool = False,
    left_out: Spans = (),
) -> Generator[StepBatch, None, None]:
    """Steps from `first_step` (counted from 0) on, without end. Close it to end its threads.

    A step's rows are the next `global_batch` of the order, whoever takes them: pass p of rank r takes the micro-batch
    at offset (p · ranks + r) · micro_batch. Positions `left_out` of the order are stepped over. Rows are padded to the
    longest of their micro-batch, rounded up to a multiple of `multiple`, or to `length`.
    """
    micro_batches, rest = divmod(global_batch, micro_batch * ranks)
    if rest or not micro_batches or not 0 <= rank < ranks:
        raise ValueError(f"{global_batch} rows cannot be shared as {micro_batch} per pass by rank {rank} of {ranks}")
    if order.rows != len(rows):
        raise ValueError(f"the order is of {order.rows} rows, the data has {len(rows)}")
    if length is not None and length < rows.summary.longest:
        raise ValueError(f"rows have up to {rows.summary.longest} inputs, more than the length {length}")

    def make(step: int) -> StepBatch:
        everyone = order.training_sequences(step * global_batch, global_batch, left_out)
        mine = everyone.reshape(micro_batches, ranks, micro_batch)[:, rank]
        made = [assemble(rows, one, pad=pad, length=length, multiple=multiple) for one in mine]
        loss_tokens = int(rows.loss_tokens[everyone].sum(dtype=np.int64))
        return StepBatch([one.pin() for one in made] if pin else made, loss_tokens, mine.reshape(-1))

    return _ahead(make, first_step, workers)


def _ahead(make: Callable[[int], StepBatch], step: int, workers: int) -> Generator[StepBatch, None, None]:
    """`make(step)`, `make(step + 1)`, … in that order, some of them begun before they are asked for."""
    if workers < 1:
        while True:
            yield make(step)
            step += 1
    # Threads, not processes: a batch is slices of mapped memory, which costs nothing to share and much to send. They
    # start at the first step asked for, so that a process may fork before that.
    pool = ThreadPoolExecutor(workers, thread_name_prefix="shoal-data")
    begun: deque[Future[StepBatch]] = deque()
    try:
        while True:
            while len(begun) < workers + 1:
                begun.append(pool.submit(make, step))
                step += 1
            yield begun.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def evaluation_batches(
    rows: Sequences,
    sequence_ids: np.ndarray,
    *,
    micro_batch: int,
    rank: int,
    ranks: int,
    pad: int,
    length: int | None = None,
    multiple: int = 1,
    limit: int | None = None,
) -> Iterator[MicroBatch]:
    """This rank's share of `sequence_ids`, of which at most `limit` (over all ranks) are taken: whatever the number of
    ranks, the same sequences are evaluated.

    Every rank yields equally many micro-batches of equally many rows, because ranks meet in collectives. What is
    lacking at the end is filled with a row whose labels are all ignored.
    """
    wanted = np.asarray(sequence_ids)[:limit]
    if not len(wanted):
        return
    micro_batches = -(-len(wanted) // (micro_batch * ranks))
    places = np.arange(micro_batches * ranks * micro_batch).reshape(micro_batches, ranks, micro_batch)[:, rank]
    for place in places:
        real = place < len(wanted)
        batch = assemble(rows, wanted[np.where(real, place, 0)], pad=pad, length=length, multiple=multiple)
        batch.labels[torch.from_numpy(~real)] = IGNORED
        yield batch


def assemble(
    rows: Sequences, sequence_ids: np.ndarray, *, pad: int, length: int | None = None, multiple: int = 1
) -> MicroBatch:
    """The tensors of these rows."""
    found = [rows[int(row)] for row in sequence_ids]
    longest = max(len(tokens) for tokens, _ in found) - 1
    width = -(-longest // multiple) * multiple if length is None else length
    shape = (len(found), width)
    inputs = np.full(shape, pad, dtype=np.int64)
    labels = np.full(shape, IGNORED, dtype=np.int64)
    positions = np.zeros(shape, dtype=np.int64) if rows.separate else None
    documents = np.zeros(shape, dtype=np.int32) if rows.separate else None
    for line, (tokens, flags) in enumerate(found):
        used = len(tokens) - 1
        inputs[line, :used] = tokens[:-1]
        labels[line, :used] = np.where(flags[1:] & TARGET, tokens[1:].astype(np.int64), IGNORED)
        if positions is not None and documents is not None:
            begins = (np.asarray(flags[:-1]) & DOCUMENT) != 0
            number = np.cumsum(begins) - 1
            counting = np.arange(width)
            positions[line] = counting
            positions[line, :used] -= np.flatnonzero(begins)[number]
            documents[line, :used] = number
            documents[line, used:] = number[-1] + 1
            # The padding's positions go on from the last document's: small, and no kernel mistakes it for a new one.
            positions[line, used:] -= np.flatnonzero(begins)[-1]
    return MicroBatch(
        torch.from_numpy(inputs),
        torch.from_numpy(labels),
        None if positions is None else torch.from_numpy(positions),
        None if documents is None else torch.from_numpy(documents),
    )
