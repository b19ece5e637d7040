"""The tokens of cells: genes by falling expression, or in the order of the vocabulary with binned expression.

Numpy on slabs of many cells. A cell is sorted by integers, its score above its gene: one sort, with ties in the order
of the vocabulary. Counts and genes that fit 16 bits each make keys of 32 bits, others of 64.
"""

from dataclasses import dataclass

import numpy as np

from shoal.config.schema_cells import CellsConfig
from shoal.data.cells.h5ad import Slab
from shoal.data.sequences import DOCUMENT, LOSS_TOKEN

_GENE = np.uint64(0xFFFFFFFF)
_HALF = 1 << 16


@dataclass(frozen=True)
class Scheme:
    """How a cell becomes tokens. `encoder`: every token is an input, and special ones are no loss tokens."""

    cells: CellsConfig
    most: int  # genes of a cell
    encoder: bool
    cls: int | None
    end: int
    dtype: np.dtype  # of token ids
    medians: np.ndarray | None = None  # by token id; 1 where there is none

    @property
    def binned(self) -> bool:
        return self.cells.tokens == "binned"


@dataclass(frozen=True)
class CellTokens:
    """The tokens of cells, one after another."""

    ids: np.ndarray
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
    unknown = bool(len(genes)) and ids.min() < 0 and genes.min() < 0
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
    few = np.minimum(counts, scheme.most)
    ids, firsts = _special_tokens(few, scheme)
    values = None
    if scheme.binned:
        values = np.zeros(len(ids), dtype=np.int16)
        _fill_binned(ids, values, firsts, genes, expression, counts, few, scheme.cells)
    else:
        _fill(ids, firsts, _keys(genes, expression), counts, few)
    special = 1 + int(scheme.cls is not None)
    return CellTokens(ids, few + special, values, counts + special, kept, all_counts, empty)


def token_flags(lengths: np.ndarray, scheme: Scheme) -> np.ndarray:
    """The flags of cells with so many tokens (uint8)."""
    ends = np.cumsum(lengths)
    flags = np.full(int(ends[-1]) if len(ends) else 0, LOSS_TOKEN, dtype=np.uint8)
    if scheme.encoder:
        flags[ends - 1] = 0
    flags[ends - lengths] = DOCUMENT
    return flags


def _scores(slab: Slab, scheme: Scheme) -> np.ndarray:
    """What genes are ranked by, or binned."""
    cells = scheme.cells
    if scheme.binned:
        return normalize(slab, cells)
    if scheme.medians is None:
        return slab.values.astype(
            np.float32, copy=False
        )  # neither a factor for the cell nor a logarithm changes its ranks
    # Ranks are of normalized counts over their medians: of log1p they would be others.
    linear = normalize(slab, cells.model_copy(update={"log1p": False}))
    return np.expm1(linear) if cells.normalized else linear


def _add_up(genes: np.ndarray, expression: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    keys = (rows.astype(np.int64) << 32) | genes
    unique, inverse = np.unique(keys, return_inverse=True)
    added = np.bincount(inverse, weights=expression).astype(np.float32)
    return (unique & 0xFFFFFFFF).astype(np.int32), added, unique >> 32


def _special_tokens(few: np.ndarray, scheme: Scheme) -> tuple[np.ndarray, np.ndarray]:
    """The ids of cells with `few` genes each, still without these, and where the genes of each begin."""
    front = int(scheme.cls is not None)
    ends = np.cumsum(few + front + 1)
    ids = np.empty(int(ends[-1]) if len(ends) else 0, dtype=scheme.dtype)
    ids[ends - 1] = scheme.end
    firsts = ends - few - 1
    if scheme.cls is not None:
        ids[firsts - 1] = scheme.cls
    return ids, firsts


def _keys(genes: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Integers that are ordered by falling score, then by gene, which is in their low bits."""
    if len(scores) and scores.max() < _HALF and genes.max() < _HALF:
        whole = scores.astype(np.uint32)
        if np.array_equal(whole, scores):  # counts, which raw data has
            return ((np.uint32(_HALF - 1) - whole) << np.uint32(16)) | genes.astype(np.uint32)
    return _wide_keys(genes, scores)


def _wide_keys(genes: np.ndarray, scores: np.ndarray) -> np.ndarray:
    # The bits of positive floats are ordered as they are; inverted, the largest comes first.
    inverted = ~np.ascontiguousarray(scores, dtype=np.float32).view(np.uint32)
    return (inverted.astype(np.uint64) << np.uint64(32)) | genes.astype(np.uint64)


def _fill(ids: np.ndarray, firsts: np.ndarray, keys: np.ndarray, counts: np.ndarray, few: np.ndarray) -> None:
    """Sort each cell's keys, and write the first `few` genes from its place in `firsts` on."""
    begin = 0
    for count, kept, first in zip(counts.tolist(), few.tolist(), firsts.tolist(), strict=True):
        cell = keys[begin : begin + count]
        cell.sort()
        ids[first : first + kept] = cell[:kept].astype(ids.dtype)  # the low bits
        begin += count


def _fill_binned(
    ids: np.ndarray,
    values: np.ndarray,
    firsts: np.ndarray,
    genes: np.ndarray,
    expression: np.ndarray,
    counts: np.ndarray,
    few: np.ndarray,
    cells: CellsConfig,
) -> None:
    """Each cell's genes in the order of the vocabulary, at most `few` with the highest expression, and their bins."""
    keys, begin = _wide_keys(genes, expression), 0
    for count, kept, first in zip(counts.tolist(), few.tolist(), firsts.tolist(), strict=True):
        cell = keys[begin : begin + count]
        cell.sort()
        ranked = (~(cell[:kept] >> np.uint64(32)).astype(np.uint32)).view(np.float32)
        by_gene = ((cell[:kept] & _GENE) << np.uint64(32)) | _bins(ranked, cells).astype(np.uint64)
        by_gene.sort()
        ids[first : first + kept] = by_gene >> np.uint64(32)
        values[first : first + kept] = by_gene & _GENE
        begin += count


def _bins(expression: np.ndarray, cells: CellsConfig) -> np.ndarray:
    """The bin of each gene of a cell, whose expression falls, from 1 on."""
    bins = cells.bins - 1
    if cells.binning == "uniform":
        high, low = expression[0], expression[-1]
        width = high - low if high > low else np.float32(1)
        uniform: np.ndarray = (np.minimum((expression - low) / width * bins, bins - 1) + 1).astype(np.int64)
        return uniform
    rising = expression[::-1]
    # Edges are expressions that occur, so that equal ones share a bin; the highest one is always in the last.
    edges = rising[np.arange(1, bins) * len(rising) // bins]
    return np.searchsorted(edges, expression, side="right") + 1
