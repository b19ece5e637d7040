"""Cells for `shoal data`: statistics in genes and cells, and single cells as tokens."""

from dataclasses import dataclass

import numpy as np

from shoal.config.schema import DataConfig
from shoal.data.cells.h5ad import CellFile
from shoal.data.cells.source import CellTokenizer, find_cell_tokenizer, gene_tokenizer
from shoal.data.cells.tokens import token_flags
from shoal.data.inspect.lengths import Lengths, describe_lengths
from shoal.data.order import permute
from shoal.data.prepare import reading_of, settings_of
from shoal.data.sequences import LOSS_TOKEN, Sequences, StoredSequences
from shoal.data.tokenizer_base import Tokenizer
from shoal.paths import cache_root

FREQUENT = 5


@dataclass(frozen=True)
class FileStats:
    """One file; `unknown`: its genes that the vocabulary does not have."""

    path: str
    matrix: str
    cells: int
    genes: int
    unknown: int


@dataclass(frozen=True)
class Share:
    """A gene or a class, and the cells that have it."""

    name: str
    cells: int
    share: float


@dataclass(frozen=True)
class CellStats:
    """What a source of cells has. `genes_per_cell`: of the vocabulary, before any was left out."""

    tokens: str  # rank_value or binned
    files: list[FileStats]
    vocabulary: int
    expressed: int  # genes that some cell has as a token
    genes_per_cell: Lengths
    most_genes: int  # of a cell that fit a sequence
    tokens_lost: int
    frequent: list[Share]
    classes: list[Share] | None


def cell_tokenizer(data: DataConfig, tokenizer: Tokenizer, objective: str) -> CellTokenizer:
    reading = reading_of(data, None, cache_root(None), lambda sentence: None)
    return find_cell_tokenizer(data, reading.files, tokenizer, settings_of(data, reading, None, None, objective))


def measure_cells(data: DataConfig, tokenizer: Tokenizer, sequences: Sequences) -> CellStats:
    """The statistics of prepared cells."""
    genes = gene_tokenizer(tokenizer)
    assert isinstance(sequences, StoredSequences)
    assert sequences.documents is not None
    encoder = sequences.summary.encoder
    work = cell_tokenizer(data, tokenizer, "masked_lm" if encoder else "causal_lm")
    special = 1 + int(data.cells.cls)
    counts = np.bincount(sequences.tokens, minlength=genes.size)[len(genes.SPECIAL) :]
    cells = sequences.summary.documents
    stored = int((sequences.ends - sequences.starts - int(encoder)).sum())
    top = np.argsort(-counts, kind="stable")[:FREQUENT]
    classes = None
    if sequences.classes is not None and sequences.summary.classes is not None:
        of_class = np.bincount(sequences.classes, minlength=len(sequences.summary.classes))
        named = zip(sequences.summary.classes, of_class.tolist(), strict=True)
        classes = sorted(
            (Share(name, some, round(some / cells, 4)) for name, some in named), key=lambda one: -one.cells
        )
    return CellStats(
        tokens=str(data.cells.tokens),
        files=[FileStats(str(one.path), one.matrix, one.cells, one.genes, one.unknown) for one in work.cells.files],
        vocabulary=len(genes.genes),
        expressed=int((counts > 0).sum()),
        genes_per_cell=describe_lengths(sequences.documents - special),
        most_genes=work.scheme.most,
        tokens_lost=int(sequences.documents.sum()) - stored,
        frequent=[Share(genes.genes[one], int(counts[one]), round(float(counts[one]) / cells, 4)) for one in top],
        classes=classes,
    )


@dataclass(frozen=True)
class ShownCell:
    """One cell as the model sees it."""

    number: int
    where: str  # its file and name
    ids: np.ndarray
    trained: np.ndarray  # which tokens may count in the loss
    left_out: int  # genes that do not fit
    label: str | None
    values: list[int] | None


def read_some(
    data: DataConfig, tokenizer: Tokenizer, objective: str, *, first: int, count: int, seed: int | None
) -> tuple[list[ShownCell], int]:
    """`count` cells from `first` on, or drawn with `seed`, and how many there are. Reads no others."""
    work = cell_tokenizer(data, tokenizer, objective)
    total = work.cells.count
    numbers = np.arange(min(first, total), min(first + count, total))
    if seed is not None:
        numbers = permute(np.arange(min(count, total)), total, seed)
    ends = np.cumsum([one.cells for one in work.cells.files])
    shown = []
    for number in numbers.tolist():
        file = int(np.searchsorted(ends, number, side="right"))
        facts = work.cells.files[file]
        place = number - int(ends[file] - facts.cells)
        made = work((file, place, place + 1))
        with CellFile(facts.path) as opened:
            name = str(opened.cell_names()[place])
        shown.append(
            ShownCell(
                number,
                f"{facts.path} {name}",
                made.ids,
                (token_flags(made.lengths, work.scheme) & LOSS_TOKEN) != 0,
                int((made.whole - made.lengths).sum()),
                None if facts.labels is None else facts.labels[place],
                None if made.values is None else made.values.tolist(),
            )
        )
    return shown, total
