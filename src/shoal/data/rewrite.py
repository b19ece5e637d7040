"""Tokenized documents in their files: count their loss tokens, and write them anew in the order of their sequences."""

import numpy as np

from shoal.data import pack
from shoal.data.progress import Progress
from shoal.data.sequences import (
    DESIRABLE,
    DOCUMENT,
    LOSS_TOKEN,
    ArrayWriter,
)
from shoal.data.tokenize import Corpus

_TOKENS_AT_ONCE = 1 << 20


def count_loss_tokens(flags: np.ndarray, bounds: pack.Bounds) -> np.ndarray:
    """The loss tokens of each sequence. Its first token is not counted: no input precedes it."""
    counts = np.zeros(len(bounds.starts), dtype=np.int64)
    first = 0
    while first < len(counts):
        # Sequences are in token order, so all within a block of the file are counted at once.
        limit = bounds.starts[first] + _TOKENS_AT_ONCE
        last = max(int(np.searchsorted(bounds.ends, limit, side="right")), first + 1)
        starts, ends = bounds.starts[first:last], bounds.ends[first:last]
        marked = starts[0] + np.flatnonzero((flags[starts[0] : ends[-1]] & LOSS_TOKEN).view(np.bool_))
        after, before = np.searchsorted(marked, ends), np.searchsorted(marked, np.minimum(starts + 1, ends))
        counts[first:last] = after - before
        first = last
    return counts


def write_packed(
    corpus: Corpus,
    starts: np.ndarray,
    ends: np.ndarray,
    loss_tokens: np.ndarray,
    packing: pack.Packing,
    progress: Progress,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rewrite the documents in packing order, so that each sequence is contiguous in the file."""
    starts, lengths = starts[packing.order], (ends - starts)[packing.order]
    rewrite(corpus, starts, lengths, progress)
    last_documents = np.cumsum(packing.counts)
    packed_ends = np.cumsum(lengths)[last_documents - 1]
    packed_starts = np.concatenate([[0], packed_ends[:-1]])
    packed_loss_tokens = np.add.reduceat(loss_tokens[packing.order], last_documents - packing.counts)
    return packed_starts, packed_ends, packed_loss_tokens


def rewrite(corpus: Corpus, starts: np.ndarray, lengths: np.ndarray, progress: Progress) -> None:
    """Replace the files by these parts of them, one after another. Each part is a document from now on."""
    after = np.cumsum(lengths)
    tokens, flags = corpus.load("tokens"), corpus.load("flags")
    files = {name: corpus.folder / f"{name}-packed.npy" for name in ("tokens", "flags")}
    with ArrayWriter(files["tokens"], tokens.dtype) as writer, ArrayWriter(files["flags"], flags.dtype) as flag_writer:
        first = 0
        while first < len(starts):
            done = writer.length
            last = max(int(np.searchsorted(after, done + _TOKENS_AT_ONCE, side="right")), first + 1)
            here = lengths[first:last]
            begins = after[first:last] - here - done
            indices = np.repeat(starts[first:last] - begins, here)
            indices += np.arange(len(indices))
            writer.append(tokens.take(indices))
            marks = flags.take(indices)
            marks[begins] = DOCUMENT | (marks[begins] & DESIRABLE)  # also where a part of a split document begins
            flag_writer.append(marks)
            first = last
            progress.tick("Packing", last, "documents", writer.length / int(after[-1]))
    del tokens, flags
    for name, file in files.items():
        file.replace(corpus.folder / f"{name}.npy")
