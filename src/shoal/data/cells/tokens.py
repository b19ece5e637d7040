"""The tokens of cells: genes by falling expression, or in the order of the vocabulary with binned expression.

Numpy on slabs of many cells. A cell is sorted by keys of 64 bits, its score above its gene: one sort of integers, with
ties in the order of the vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from shoal.config.schema_cells import CellsConfig
from shoal.data.cells.h5ad import Slab
from shoal.data.sequences import DOCUMENT, LOSS_TOKEN

_GENE = np.uint64(0xFFFFFFFF)


@dataclass(frozen=True)
class Scheme:
    """How a cell becomes tokens. `encoder`: every token is an input, and special ones are no loss tokens."""

    cells: CellsConfig
    most: int  # genes of a cell
    encoder: bool
    cls: int | None
    end: int
    medians: np.ndarray | None = None  # by token id; 1 where there is none

    @property
    def binned(self) -> bool:
        return self.cells.tokens == "binned"


@dataclass(frozen=True)
class CellTokens:
    """The tokens of cells, one after another."""

    ids: np.ndarray  # int32
    flags: np.ndarray  # uint8
    lengths: np.ndarray  # int64, tokens of each cell
    values: np.ndarray | None  # int16, the bin of each token
    whole: np.ndarray  # int64, tokens of each cell before any was left out
    kept: np.ndarray  # bool, of the slab's cells: those with tokens here
    counts: np.ndarray  # int64, expressed genes of each cell of the slab, of the vocabulary or not
    empty: np.ndarray  # bool, of the slab's cells: those without a gene of the vocabulary


def normalize(slab: Slab, cells: CellsConfig) -> np.ndarray:
    """The expression of a slab (float32), normalized to a sum per cell, and its log1p."""
    values = slab.values.astype(np.float32)
    if cells.normalized:
        return values
    if cells.target_sum:
        totals = sum_by_cell(values, slab.counts)
        values *= np.repeat((cells.target_sum / np.maximum(totals, 1e-12)).astype(np.float32), slab.counts)
    return np.log1p(values) if cells.log1p else values


def sum_by_cell(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The sum of each cell's values, in float64."""
    rows = np.repeat(np.arange(len(counts)), counts)
    return np.bincount(rows, weights=values, minlength=len(counts))


def tokenize_slab(slab: Slab, ids: np.ndarray, scheme: Scheme, *, repeated: bool = False) -> CellTokens:
    """`ids`: the token of each column of the matrix, -1 where it has none. `repeated`: several columns have the same
    one; their expression is added."""
    all_counts = counts = slab.counts
    expression = _scores(slab, scheme)
    genes = ids[slab.genes]
    unknown = bool(len(genes)) and int(genes.min()) < 0
    if unknown or repeated:
        rows = np.repeat(np.arange(len(all_counts)), all_counts)
        if unknown:
            known = genes >= 0
            genes, expression, rows = genes[known], expression[known], rows[known]
        if repeated:
            genes, expression, rows = _add_up(genes, expression, rows)
        counts = np.bincount(rows, minlength=len(all_counts))
    empty = counts == 0
    kept = ~empty & (all_counts >= scheme.cells.min_genes)
    if not kept.all():
        here = np.repeat(kept, counts)
        genes, expression, counts = genes[here], expression[here], counts[kept]
    if scheme.medians is not None:
        expression = expression / scheme.medians[genes]
    genes, expression, few = _rank(genes, expression, counts, scheme.most)
    values = None
    if scheme.binned:
        values = _bins(expression, few, scheme.cells)
        genes, values = _by_vocabulary(genes, values, few)
    return _assemble(genes, values, few, counts, scheme, kept, all_counts, empty)


def _scores(slab: Slab, scheme: Scheme) -> np.ndarray:
    """What genes are ranked by, or binned."""
    cells = scheme.cells
    if scheme.binned:
        return normalize(slab, cells)
    if scheme.medians is None:
        return slab.values.astype(np.float32)  # neither a factor for the cell nor a logarithm changes its ranks
    # Ranks are of normalized counts over their medians: of log1p they would be others.
    linear = normalize(slab, cells.model_copy(update={"log1p": False}))
    return np.expm1(linear) if cells.normalized else linear


def _add_up(genes: np.ndarray, expression: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    keys = (rows.astype(np.int64) << 32) | genes
    unique, inverse = np.unique(keys, return_inverse=True)
    added = np.bincount(inverse, weights=expression).astype(np.float32)
    return (unique & 0xFFFFFFFF).astype(np.int32), added, unique >> 32


def _cells(counts: np.ndarray) -> Iterator[tuple[int, int]]:
    ends = np.cumsum(counts)
    return zip((ends - counts).tolist(), ends.tolist(), strict=True)


def _rank(
    genes: np.ndarray, scores: np.ndarray, counts: np.ndarray, most: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The genes of each cell by falling score, at most `most` of them; their scores; and how many each cell has."""
    # The bits of positive floats are ordered as they are; inverted, the largest comes first.
    inverted = ~np.ascontiguousarray(scores, dtype=np.float32).view(np.uint32)
    keys = (inverted.astype(np.uint64) << np.uint64(32)) | genes.astype(np.uint64)
    for begin, end in _cells(counts):
        keys[begin:end].sort()
    few = np.minimum(counts, most)
    if (few < counts).any():
        keys = keys[_offsets(counts) < np.repeat(few, counts)]
    ranked = (~(keys >> np.uint64(32)).astype(np.uint32)).view(np.float32)
    return (keys & _GENE).astype(np.int32), ranked, few


def _offsets(counts: np.ndarray) -> np.ndarray:
    """The place of each gene within its cell."""
    ends = np.cumsum(counts)
    offsets: np.ndarray = np.arange(int(counts.sum())) - np.repeat(ends - counts, counts)
    return offsets


def _bins(expression: np.ndarray, counts: np.ndarray, cells: CellsConfig) -> np.ndarray:
    """The bin of each gene in its cell, from 1 on. Expression falls within a cell."""
    bins = cells.bins - 1
    found = np.empty(len(expression), dtype=np.int16)
    if cells.binning == "uniform":
        ends = np.cumsum(counts)
        high, low = (np.repeat(expression[at], counts) for at in (ends - counts, ends - 1))
        width = np.where(high > low, high - low, 1)
        found[:] = np.minimum((expression - low) / width * bins, bins - 1) + 1
        return found
    steps = np.arange(1, bins)
    for begin, end in _cells(counts):
        rising = expression[begin:end][::-1]
        # Edges are expressions that occur, so that equal ones share a bin; the highest one is always in the last.
        edges = rising[steps * (end - begin) // bins]
        found[begin:end] = np.searchsorted(edges, expression[begin:end], side="right") + 1
    return found


def _by_vocabulary(genes: np.ndarray, values: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    keys = (genes.astype(np.uint64) << np.uint64(32)) | values.astype(np.uint64)
    for begin, end in _cells(counts):
        keys[begin:end].sort()
    return (keys >> np.uint64(32)).astype(np.int32), (keys & _GENE).astype(np.int16)


def _assemble(
    genes: np.ndarray,
    values: np.ndarray | None,
    counts: np.ndarray,
    before: np.ndarray,
    scheme: Scheme,
    kept: np.ndarray,
    all_counts: np.ndarray,
    empty: np.ndarray,
) -> CellTokens:
    """The special tokens around each cell's genes."""
    front = 0 if scheme.cls is None else 1
    lengths = counts + front + 1
    ends = np.cumsum(lengths)
    firsts = ends - lengths
    of_genes = np.ones(int(lengths.sum()), dtype=bool)
    of_genes[ends - 1] = False
    if front:
        of_genes[firsts] = False
    ids = np.empty(len(of_genes), dtype=np.int32)
    ids[of_genes] = genes
    ids[ends - 1] = scheme.end
    if scheme.cls is not None:
        ids[firsts] = scheme.cls
    flags = of_genes.astype(np.uint8) * np.uint8(LOSS_TOKEN)
    if not scheme.encoder:
        flags[ends - 1] = LOSS_TOKEN
    flags[firsts] = DOCUMENT
    bins = None
    if values is not None:
        bins = np.zeros(len(of_genes), dtype=np.int16)
        bins[of_genes] = values
    return CellTokens(ids, flags, lengths, bins, before + front + 1, kept, all_counts, empty)
