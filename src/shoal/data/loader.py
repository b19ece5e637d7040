"""This rank's micro-batches of each step, as tensors, prefetched by worker threads."""

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from shoal.data.order import Order, Spans, positions_around
from shoal.data.sequences import DOCUMENT, LOSS_TOKEN, Sequences

IGNORED = -100  # the ignore index of the loss


@dataclass
class MicroBatch:
    """The sequences of one forward pass. Labels are already shifted: labels[i] is the token after inputs[i].

    `positions` and `documents` (document indices within a sequence, for a block-diagonal attention mask) are set when
    sequences hold several documents that must not attend to each other. Padding is a document of its own, so that
    every query has a key. `mask` (batch × 1 × queries × keys, True: attends) replaces `documents` where a rank holds
    only part of each sequence.
    """

    inputs: Tensor  # int64, batch × length
    labels: Tensor  # int64, batch × length
    positions: Tensor | None = None  # int64, batch × length; None: 0, 1, 2, …
    documents: Tensor | None = None  # int32, batch × length; None: each sequence is one document
    mask: Tensor | None = None
    # Pairs only, batch × pairs × 2, fp64: the log-probability of each chosen and rejected answer under the reference
    # model; zeros where the objective has none. Documents 2k and 2k + 1 of a sequence are its pair k.
    reference: Tensor | None = None
    # At most this many labels are not IGNORED; None: they are counted before the micro-batch is moved to a device.
    loss_tokens: int | None = None
    # Encoders only: a number for each token beside its id, which the model gets as token type; int64, batch × length.
    values: Tensor | None = None

    def counted(self) -> int | None:
        """`loss_tokens`, or their number if it can be told without waiting for a device."""
        if self.loss_tokens is not None or self.labels.device.type != "cpu":
            return self.loss_tokens
        return int(np.count_nonzero(self.labels.numpy() != IGNORED))

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
            None if self.reference is None else change(self.reference),
            self.loss_tokens,
            None if self.values is None else change(self.values),
        )


@dataclass
class StepBatch:
    """One optimizer step's micro-batches on this rank."""

    micro_batches: list[MicroBatch]
    weight: int  # what the summed loss is divided by: the loss tokens of the global batch, over all ranks
    sequence_ids: np.ndarray  # of this rank, micro-batch by micro-batch
    tokens: int = 0  # of the global batch, with prompts and without padding


class Collate(Protocol):
    """Makes the micro-batch of these sequences, with its labels: an objective's, or `collate_next_token`. `positions`:
    where each stands in the global order; None: they are evaluated."""

    def __call__(
        self,
        sequences: Sequences,
        sequence_ids: np.ndarray,
        *,
        pad: int,
        length: int | None = None,
        multiple: int = 1,
        positions: np.ndarray | None = None,
    ) -> MicroBatch: ...


Weigh = Callable[[Sequences, np.ndarray], int]  # what the summed loss of these sequences is divided by


def count_loss_tokens(sequences: Sequences, sequence_ids: np.ndarray) -> int:
    return int(sequences.loss_tokens(sequence_ids).sum(dtype=np.int64))


def count_tokens(sequences: Sequences, sequence_ids: np.ndarray) -> int:
    """The inputs of these sequences, which do not depend on how they are batched: without padding."""
    return int((sequences.lengths(sequence_ids) - 1).sum(dtype=np.int64))


def batches(
    sequences: Sequences,
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
    collate: Collate | None = None,
    weigh: Weigh = count_loss_tokens,
) -> Generator[StepBatch, None, None]:
    """An infinite iterator over steps, starting at `first_step` (counted from 0). Close it to end its threads.

    A step takes the next `global_batch` sequences of the order, whatever the number of ranks: micro-batch m of rank r
    is at offset (m · ranks + r) · micro_batch. Positions in `left_out` are skipped. Sequences are padded to the longest
    of their micro-batch, rounded up to a multiple of `multiple`, or to `length`.
    """
    micro_batches, rest = divmod(global_batch, micro_batch * ranks)
    if rest or not micro_batches or not 0 <= rank < ranks:
        raise ValueError(
            f"a global batch of {global_batch} cannot be split into micro-batches of {micro_batch} "
            f"for rank {rank} of {ranks}"
        )
    if order.sequences is not None and order.sequences != len(sequences):
        raise ValueError(f"the order is over {order.sequences} sequences, the data has {len(sequences)}")
    if length is not None and length < sequences.summary.longest:
        raise ValueError(f"sequences have up to {sequences.summary.longest} inputs, more than the length {length}")

    collate = collate or collate_next_token

    def make(step: int) -> StepBatch:
        everyone = order.training_sequences(step * global_batch, global_batch, left_out)
        mine = share_of_rank(everyone, micro_batch=micro_batch, rank=rank, ranks=ranks)
        positions = share_of_rank(
            positions_around(step * global_batch, global_batch, left_out),
            micro_batch=micro_batch,
            rank=rank,
            ranks=ranks,
        )
        made = [
            collate(sequences, one, pad=pad, length=length, multiple=multiple, positions=where)
            for one, where in zip(mine, positions, strict=True)
        ]
        return StepBatch(
            [one.pin() for one in made] if pin else made,
            weigh(sequences, everyone),
            mine.reshape(-1),
            count_tokens(sequences, everyone),
        )

    return _ahead(make, first_step, workers)


def share_of_rank(everyone: np.ndarray, *, micro_batch: int, rank: int, ranks: int) -> np.ndarray:
    """This rank's share of a step, with a row for each micro-batch. See `batches`."""
    return everyone.reshape(-1, ranks, micro_batch)[:, rank]


def _ahead(make: Callable[[int], StepBatch], step: int, workers: int) -> Generator[StepBatch, None, None]:
    """`make(step)`, `make(step + 1)`, … in that order, prefetched by `workers` threads."""
    if workers < 1:
        while True:
            yield make(step)
            step += 1
    # Threads, not processes: a batch is slices of memory-mapped files, which threads share without serialization. They
    # start when the first step is requested, so that the process may fork before that.
    pool = ThreadPoolExecutor(workers, thread_name_prefix="shoal-data")
    pending: deque[Future[StepBatch]] = deque()
    try:
        while True:
            while len(pending) < workers + 1:
                pending.append(pool.submit(make, step))
                step += 1
            yield pending.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def evaluation_batches(
    sequences: Sequences,
    sequence_ids: np.ndarray,
    *,
    micro_batch: int,
    rank: int,
    ranks: int,
    pad: int,
    length: int | None = None,
    multiple: int = 1,
    limit: int | None = None,
    collate: Collate | None = None,
) -> Iterator[MicroBatch]:
    """This rank's share of the first `limit` of `sequence_ids` (`limit` counts over all ranks). The same sequences are
    evaluated whatever the number of ranks.

    Every rank yields the same number of micro-batches of the same size, because ranks take part in collectives. The
    last ones are filled up with sequences whose labels are all ignored.
    """
    collate = collate or collate_next_token
    wanted = np.asarray(sequence_ids)[:limit]
    if not len(wanted):
        return
    for indices in evaluation_share(len(wanted), micro_batch=micro_batch, rank=rank, ranks=ranks):
        real = indices < len(wanted)
        batch = collate(sequences, wanted[np.where(real, indices, 0)], pad=pad, length=length, multiple=multiple)
        batch.labels[torch.from_numpy(~real)] = IGNORED
        yield batch


def evaluation_share(count: int, *, micro_batch: int, rank: int, ranks: int) -> np.ndarray:
    """Which of `count` sequences are in each micro-batch of this rank, in rows; indices from `count` on are none."""
    micro_batches = -(-count // (micro_batch * ranks))
    return np.arange(micro_batches * ranks * micro_batch).reshape(micro_batches, ranks, micro_batch)[:, rank]


def collate_next_token(
    sequences: Sequences,
    sequence_ids: np.ndarray,
    *,
    pad: int,
    length: int | None = None,
    multiple: int = 1,
    positions: np.ndarray | None = None,
) -> MicroBatch:
    """The labels of a causal language model: the next token, where it is a loss token."""
    found = [sequences[int(index)] for index in sequence_ids]
    longest = max(len(tokens) for tokens, _ in found) - 1
    width = -(-longest // multiple) * multiple if length is None else length
    shape = (len(found), width)
    inputs = np.full(shape, pad, dtype=np.int64)
    labels = np.full(shape, IGNORED, dtype=np.int64)
    counted = np.zeros(shape, dtype=np.uint8)  # the flags of the labels
    begins = np.zeros(shape, dtype=np.uint8) if sequences.separate else None  # the flags of the inputs
    for line, (tokens, flags) in enumerate(found):
        used = len(tokens) - 1
        inputs[line, :used] = tokens[:-1]
        labels[line, :used] = tokens[1:]
        counted[line, :used] = flags[1:]
        if begins is not None:
            begins[line, :used] = flags[:-1]
    # All else for the whole micro-batch at once: few calls, in most of which numpy lets the other threads run.
    np.copyto(labels, IGNORED, where=(counted & LOSS_TOKEN) == 0)
    within = documents = None
    if begins is not None:
        first = (begins & DOCUMENT) != 0
        first[:, 0] = True  # a sequence of a stream may begin inside a document
        columns = np.arange(width)
        # Positions in the padding continue the last document's: no position exceeds the length, and no kernel takes the
        # padding for a new document.
        within = columns - np.maximum.accumulate(np.where(first, columns, 0), axis=1)
        for line, (tokens, _) in enumerate(found):
            first[line, len(tokens) - 1 : len(tokens)] = True  # the padding, which is a document of its own
        documents = np.cumsum(first, axis=1, dtype=np.int32) - np.int32(1)
    return MicroBatch(
        torch.from_numpy(inputs),
        torch.from_numpy(labels),
        None if within is None else torch.from_numpy(within),
        None if documents is None else torch.from_numpy(documents),
    )
