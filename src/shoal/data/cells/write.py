"""Cells to a folder of prepared sequences, one cell each, by worker processes where there are many."""

from collections.abc import Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path

import numpy as np

from shoal.data import workers
from shoal.data.cells.source import CellTokenizer
from shoal.data.cells.tokens import CellTokens, token_flags
from shoal.data.labels import number_classes
from shoal.data.progress import Progress
from shoal.data.sequences import (
    DOCUMENT_LENGTHS,
    LABELS,
    VALUES,
    ArrayWriter,
    Summary,
    hash_sequences,
    write_array,
    write_summary,
)
from shoal.data.tokenize import NothingToLearn
from shoal.data.tokenizer_base import disable_threads
from shoal.mistakes import UserMistake

WORTH_WORKERS = 32  # slabs; fewer are tokenized in this process
FORMAT = "cells"
Range = tuple[int, int, int]  # the file, the first cell, and the last one, which is not included


@dataclass
class _Written:
    """What is known of the cells whose tokens are written."""

    lengths: list[np.ndarray] = field(default_factory=list)
    whole: list[np.ndarray] = field(default_factory=list)  # lengths before cells were truncated
    labels: list[str] = field(default_factory=list)
    done: int = 0
    empty: int = 0
    few: int = 0  # cells that express too few genes
    unlabelled: int = 0


def write_cells(
    folder: Path,
    work: CellTokenizer,
    ranges: Iterable[Range],
    *,
    key: str,
    progress: Progress,
    classes: Sequence[str] | None = None,
) -> None:
    """Write the cells of `ranges` into `folder`, for `open_sequences`. `key`: the config's name of the data;
    `classes`: the only ones that cells may have."""
    progress.begin()
    written = _write_tokens(folder, work, ranges, progress)
    each = np.concatenate([np.empty(0, np.int64), *written.lengths])
    if not len(each):
        raise NothingToLearn(
            f"None of the {written.done:,} cells in {key} is left: {written.empty:,} express no gene of the "
            f"vocabulary, {written.few:,} fewer than data.cells.min_genes {work.scheme.cells.min_genes}."
        )
    names = None
    if work.cells.files and work.cells.files[0].labels is not None:
        names, numbers = number_classes(written.labels, classes, key)
        write_array(folder / LABELS, numbers)
    _write_index(folder, each, written, names, encoder=work.scheme.encoder)


def _write_tokens(folder: Path, work: CellTokenizer, ranges: Iterable[Range], progress: Progress) -> _Written:
    """The tokens of all cells, one after another, with their flags and, if they are binned, their bins."""
    binned, total = work.scheme.binned, work.cells.count
    of_files = [one.labels for one in work.cells.files]
    written = _Written()
    with (
        ArrayWriter(folder / "tokens.npy", work.scheme.dtype) as tokens,
        ArrayWriter(folder / "flags.npy", np.dtype(np.uint8)) as flags,
        ArrayWriter(folder / VALUES, np.dtype(np.int16)) as values,
        closing(_tokenize(work, ranges)) as tokenized,
    ):
        for (number, first, last), made in tokenized:
            written.empty += int(made.empty.sum())
            written.few += int((~made.kept & ~made.empty).sum())
            if (column := of_files[number]) is not None:
                here = [column[first + place] for place in np.flatnonzero(made.kept).tolist()]
                made, here, missing = _labelled(made, here, work, number)
                written.unlabelled += missing
                written.labels += here
            tokens.append(made.ids)
            flags.append(token_flags(made.lengths, work.scheme))
            if made.values is not None:
                values.append(made.values)
            written.lengths.append(made.lengths)
            written.whole.append(made.whole)
            written.done += last - first
            progress.tick("Tokenizing", written.done, "cells", written.done / max(total, 1))
        if work.scheme.encoder:  # every token is an input, so the last sequence ends one later; that one is never read
            tokens.append(np.array([work.scheme.end]))
            flags.append(np.zeros(1))
            values.append(np.zeros(1 if binned else 0))
    if not binned:
        (folder / VALUES).unlink()
    return written


def _write_index(
    folder: Path, each: np.ndarray, written: _Written, classes: list[str] | None, *, encoder: bool
) -> None:
    """Where each cell is, and the summary. `each`: the number of tokens of each cell."""
    ends = np.cumsum(each)
    starts, ends = ends - each, ends + int(encoder)
    counted = each - 2 if encoder else each - 1
    before = np.concatenate(written.whole)
    write_array(folder / DOCUMENT_LENGTHS, before)
    write_array(folder / "starts.npy", starts)
    write_array(folder / "ends.npy", ends)
    write_array(folder / "loss_tokens.npy", counted.astype(np.int32))
    inputs, trained = int((ends - starts - 1).sum()), int(counted.sum())
    write_summary(
        folder,
        Summary(
            format=FORMAT,
            joined=False,
            separate=False,
            documents=len(each),
            tokens=int(each.sum()),
            sequences=len(each),
            longest=int((ends - starts).max()) - 1,
            loss_tokens=trained,
            loss_token_share=trained / inputs,
            content=hash_sequences(folder),
            truncated=int((before > each).sum()),
            dropped=written.few + written.unlabelled,
            empty=written.empty,
            encoder=encoder,
            classes=classes,
        ),
    )


def _labelled(
    made: CellTokens, labels: list[str], work: CellTokenizer, number: int
) -> tuple[CellTokens, list[str], int]:
    """The cells that have a label. A UserMistake for those without, unless they are skipped."""
    if "" not in labels:
        return made, labels, 0
    if work.on_empty == "stop":
        raise UserMistake(
            f"{work.cells.files[number].path} has cells without a value in the column of data.label. Fill it, or set "
            "data.on_error: skip to leave them out."
        )
    keep = np.array([label != "" for label in labels])
    each = np.repeat(keep, made.lengths)
    kept = CellTokens(
        made.ids[each],
        made.lengths[keep],
        None if made.values is None else made.values[each],
        made.whole[keep],
        made.kept,
        made.counts,
        made.empty,
    )
    return kept, [label for label in labels if label], int((~keep).sum())


def _tokenize(work: CellTokenizer, ranges: Iterable[Range]) -> Generator[tuple[Range, CellTokens], None, None]:
    """The tokens of each slab, in order."""
    every = iter(ranges)
    begun = list(islice(every, WORTH_WORKERS))
    if len(begun) == WORTH_WORKERS and (count := workers.choose_workers()):
        listed = [*begun, *every]
        with closing(workers.map_in_order(work, listed, count, disable_threads)) as made:  # type: ignore[type-var]
            yield from zip(listed, made, strict=True)
    else:
        yield from ((one, work(one)) for one in chain(begun, every))
