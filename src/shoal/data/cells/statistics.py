"""Statistics of genes over all cells: medians of their expression, and which of them vary most."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from shoal.config.schema_cells import CellsConfig

_BINS = 20  # of the mean expression, in which dispersions are compared
_RESOLUTION = 1 << 10  # medians are those of a histogram with this many bins per doubling


@dataclass
class GeneStatistics:
    """Sums over cells of the normalized expression of each gene, before log1p."""

    cells: int
    sums: np.ndarray
    squares: np.ndarray

    @classmethod
    def empty(cls, genes: int) -> "GeneStatistics":
        return cls(0, np.zeros(genes), np.zeros(genes))

    def add(self, cells: int, genes: np.ndarray, expression: np.ndarray) -> None:
        self.cells += cells
        self.sums += np.bincount(genes, weights=expression, minlength=len(self.sums))
        self.squares += np.bincount(genes, weights=np.square(expression, dtype=np.float64), minlength=len(self.sums))

    def most_variable(self, count: int) -> np.ndarray:
        """The `count` genes with the highest normalized dispersion, ascending: scanpy's flavor seurat.

        Genes are compared with those of similar mean expression: the log of variance over mean, as a z-score among the
        genes of one of 20 bins of the mean.
        """
        mean = self.sums / max(self.cells, 1)
        variance = (self.squares / max(self.cells, 1) - mean**2) * self.cells / max(self.cells - 1, 1)
        mean = np.where(mean == 0, 1e-12, mean)
        dispersion = variance / mean
        with np.errstate(divide="ignore", invalid="ignore"):
            logarithm = np.log(np.where(dispersion <= 0, np.nan, dispersion))
        level = np.log1p(mean)
        edges = np.linspace(level.min(), level.max(), _BINS + 1)
        place = np.clip(np.searchsorted(edges, level, side="left") - 1, 0, _BINS - 1)
        score = np.full(len(mean), -np.inf)
        for one in range(_BINS):
            here = (place == one) & np.isfinite(logarithm)
            if here.sum() == 1:
                score[here] = 1.0  # alone in its bin
            elif here.any():
                spread = logarithm[here].std(ddof=1)
                score[here] = (logarithm[here] - logarithm[here].mean()) / (spread if spread > 0 else 1)
        chosen = np.argsort(-score, kind="stable")[:count]
        return np.sort(chosen)


class Medians:
    """The median of the non-zero expression of each gene, from a histogram of its logarithm: within 0.1%."""

    _LOW, _HIGH = -20, 24  # powers of two

    def __init__(self, genes: int) -> None:
        self._genes = genes
        self._width = (self._HIGH - self._LOW) * _RESOLUTION
        self._counts: dict[int, int] = {}
        self._keys: list[np.ndarray] = []
        self._numbers: list[np.ndarray] = []

    def add(self, genes: np.ndarray, expression: np.ndarray) -> None:
        place = np.floor((np.log2(np.maximum(expression, 2.0**self._LOW)) - self._LOW) * _RESOLUTION)
        place = np.clip(place, 0, self._width - 1).astype(np.int64)
        keys, numbers = np.unique(genes.astype(np.int64) * self._width + place, return_counts=True)
        self._keys.append(keys)
        self._numbers.append(numbers)
        if len(self._keys) > 32:
            self._merge()

    def _merge(self) -> None:
        keys, inverse = np.unique(np.concatenate(self._keys), return_inverse=True)
        numbers = np.bincount(inverse, weights=np.concatenate(self._numbers)).astype(np.int64)
        self._keys, self._numbers = [keys], [numbers]

    def result(self) -> np.ndarray:
        """NaN for genes that no cell expresses."""
        found = np.full(self._genes, np.nan)
        if not self._keys:
            return found
        self._merge()
        (keys,), (numbers,) = self._keys, self._numbers
        owners = keys // self._width
        for gene, begin, end in _runs(owners):
            before = np.cumsum(numbers[begin:end])
            middle = begin + int(np.searchsorted(before, (before[-1] + 1) // 2))
            found[gene] = 2.0 ** ((keys[middle] % self._width + 0.5) / _RESOLUTION + self._LOW)
        return found


def _runs(owners: np.ndarray) -> Iterator[tuple[int, int, int]]:
    edges: Sequence[int] = [0, *(np.flatnonzero(np.diff(owners)) + 1).tolist(), len(owners)]
    for begin, end in pairwise(edges):
        yield int(owners[begin]), begin, end


def before_log1p(expression: np.ndarray, cells: CellsConfig) -> np.ndarray:
    """Normalized counts, of what `normalize` gave."""
    return np.expm1(expression) if cells.log1p or cells.normalized else expression
