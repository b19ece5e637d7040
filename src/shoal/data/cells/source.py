"""The cells of several files, and what is known of each file: its matrix, the tokens of its genes, its classes."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from shoal.catalogue.objectives import objective_facts
from shoal.config.schema import DataConfig
from shoal.config.schema_cells import CellsConfig
from shoal.data.cells.gene_tokenizer import GeneTokenizer
from shoal.data.cells.h5ad import CellFile, Matrix, Slab
from shoal.data.cells.tokens import CellTokens, Scheme, tokenize_slab
from shoal.data.cells.vocabulary import match_genes
from shoal.data.settings import Settings
from shoal.data.tokenizer_base import Tokenizer
from shoal.mistakes import UserMistake, shortened

SLAB = 256  # cells that are read and tokenized together: their genes fit a processor's cache
LABEL_KEY = "data.label"


@dataclass(frozen=True)
class FileFacts:
    """One file. `ids`: the token of each column, -1 where it has none."""

    path: Path
    matrix: str
    cells: int
    genes: int
    ids: np.ndarray
    unknown: int  # genes that are not in the vocabulary
    repeated: bool  # several columns have the same token
    labels: list[str] | None = None  # of each cell


@dataclass
class Cells:
    """Open files, whose matrices are read in slabs. May be sent to worker processes: each opens the files again."""

    files: Sequence[FileFacts]
    in_memory: bool = False
    _loaded: dict[int, Matrix] = field(default_factory=dict, repr=False)  # shared with forked processes
    _opened: dict[tuple[int, int], tuple[CellFile, Matrix]] = field(default_factory=dict, repr=False)

    def load(self) -> None:
        """Read every matrix now, if they are kept in memory."""
        if self.in_memory:
            for number, one in enumerate(self.files):
                with CellFile(one.path) as opened:
                    self._loaded[number] = opened.matrix(one.matrix, in_memory=True)

    def matrix(self, number: int) -> Matrix:
        if number in self._loaded:
            return self._loaded[number]
        # HDF5 does not survive a fork with open files.
        key = (os.getpid(), number)
        if key not in self._opened:
            opened = CellFile(self.files[number].path)
            self._opened[key] = opened, opened.matrix(self.files[number].matrix)
        return self._opened[key][1]

    def slab(self, number: int, first: int, last: int) -> Slab:
        """Cells of one file. A UserMistake for values that no expression has."""
        try:
            slab = self.matrix(number).slab(first, last)
        except OSError as error:
            raise UserMistake(f"{self.files[number].path} is damaged: {error}. Copy it again.") from error
        if len(slab.values) and not (slab.values.min() >= 0 and np.isfinite(slab.values.max())):
            raise UserMistake(
                f"{self.files[number].path}: {self.files[number].matrix} has negative or non-finite values among the "
                f"cells {first:,} to {last:,}; set data.cells.matrix to one with counts."
            )
        return slab

    def __getstate__(self) -> dict[str, object]:
        return {"files": self.files, "in_memory": self.in_memory, "_loaded": {}, "_opened": {}}

    @property
    def count(self) -> int:
        return sum(one.cells for one in self.files)

    def ranges(self, size: int = SLAB) -> Iterator[tuple[int, int, int]]:
        """All cells, in slabs: the file, the first cell and the last one, which is not included."""
        for number, one in enumerate(self.files):
            for first in range(0, one.cells, size):
                yield number, first, min(first + size, one.cells)


@dataclass(frozen=True)
class CellTokenizer:
    """Tokenizes slabs: a pure function of where they are, in this process or in a worker."""

    cells: Cells
    scheme: Scheme
    on_empty: str  # stop or skip

    def __call__(self, where: tuple[int, int, int]) -> CellTokens:
        number, first, last = where
        one = self.cells.files[number]
        slab = self.cells.slab(number, first, last)
        made = tokenize_slab(slab, one.ids, self.scheme, repeated=one.repeated)
        if made.empty.any() and not self.scheme.cells.min_genes and self.on_empty == "stop":
            place = int(np.flatnonzero(made.empty)[0])
            with CellFile(one.path) as opened:
                name = opened.cell_names()[first + place]
            found = "no gene" if not made.counts[place] else "no gene of the vocabulary"
            raise UserMistake(
                f"{one.path}: cell {name} expresses {found}. Set data.cells.min_genes: 1 to leave such cells out."
            )
        return made


def check_cells(data: DataConfig, files: Sequence[Path], objective: str) -> None:
    """A UserMistake that is found in a moment: no .h5ad file, no counts, no such column."""
    facts = objective_facts(objective)
    if facts.of_answers:
        raise UserMistake(
            f"train.objective {objective} compares answers, and data.source cells has none; use masked_lm, classify or "
            "causal_lm."
        )
    for file in files:
        with CellFile(file) as opened:
            matrix = opened.choose_matrix(data.cells.matrix, counts=not data.cells.normalized)
            opened.genes(matrix, data.cells.gene_names)
            if facts.classes and data.label is not None:
                opened.check_column(data.label, LABEL_KEY)


def find_cells(data: DataConfig, files: Sequence[Path], tokenizer: GeneTokenizer, *, labels: bool) -> Cells:
    """Open the files and check them: their matrices, their genes, the names of their cells, and with `labels` the
    classes of these."""
    found, cells = [], data.cells
    names = None if cells.same_names or len(files) < 2 else _Names()
    for file in files:
        with CellFile(file) as opened:
            matrix = opened.choose_matrix(cells.matrix, counts=not cells.normalized)
            genes = opened.genes(matrix, cells.gene_names).tolist()
            ids, unknown = match_genes(tokenizer, genes)
            check_match(file, genes, ids, unknown, tokenizer)
            cell_names = opened.cell_names()
            if names is not None:
                names.add(file, cell_names)
            column = None
            if labels:
                assert data.label is not None
                column = opened.column(data.label, LABEL_KEY)
            used = [one for one in ids if one >= 0]
            found.append(
                FileFacts(
                    file,
                    matrix,
                    len(cell_names),
                    len(genes),
                    np.array(ids, dtype=np.int32),
                    unknown,
                    len(set(used)) < len(used),
                    column,
                )
            )
    return Cells(found, in_memory=not cells.backed)


def check_match(file: Path, genes: Sequence[str], ids: Sequence[int], unknown: int, tokenizer: GeneTokenizer) -> None:
    """A UserMistake if more than half of a file's genes are unknown."""
    if not genes:
        raise UserMistake(f"{file} has no genes: its matrix has no columns. Leave it out.")
    if 2 * unknown > len(genes) or not any(one >= 0 for one in ids):
        example = next((name for name, one in zip(genes, ids, strict=True) if one < 0), genes[0])
        raise UserMistake(
            f"{unknown:,} of the {len(genes):,} genes in {file} are not in the vocabulary, such as "
            f"{shortened(example)}; those of it are called {shortened(', '.join(tokenizer.genes[:3]))} …: set "
            "data.cells.gene_names to the column of var with such names, or data.cells.gene_vocab to another "
            "vocabulary."
        )


class _Names:
    """The names of cells so far, as hashes."""

    def __init__(self) -> None:
        self._files: list[tuple[Path, np.ndarray]] = []

    def add(self, file: Path, names: np.ndarray) -> None:
        hashes = np.fromiter(map(hash, names), dtype=np.int64, count=len(names))
        for other, before in self._files:
            same = np.isin(hashes, before)
            if same.any():
                raise UserMistake(
                    f"{int(same.sum()):,} cells of {file} have the name of one in {other}, such as "
                    f"{names[int(np.flatnonzero(same)[0])]}. If they are copies, leave one file out; if only the names "
                    "are the same, set data.cells.same_names: true."
                )
        self._files.append((file, hashes))


def gene_tokenizer(tokenizer: Tokenizer) -> GeneTokenizer:
    """The tokenizer, which must be one of genes."""
    if isinstance(tokenizer, GeneTokenizer):
        return tokenizer
    raise UserMistake(
        f"The tokenizer {tokenizer.name} is for text, and data.source cells has genes; leave model.tokenizer out, "
        "which makes a token of each gene."
    )


def find_cell_tokenizer(
    data: DataConfig, files: Sequence[Path], tokenizer: Tokenizer, settings: Settings
) -> CellTokenizer:
    """What tokenizes the cells of these files. Opens and checks them."""
    genes = gene_tokenizer(tokenizer)
    scheme = scheme_of(data.cells, genes, settings.max_length, encoder=settings.encoder)
    cells = find_cells(data, files, genes, labels=settings.label is not None)
    return CellTokenizer(cells, scheme, settings.on_error)


def scheme_of(cells: CellsConfig, tokenizer: GeneTokenizer, max_length: int, *, encoder: bool) -> Scheme:
    """How cells become tokens of this tokenizer, in sequences of at most `max_length` inputs."""
    # The end token is an input of an encoder; for a decoder it is a label only.
    room = max_length - int(cells.cls) - int(encoder)
    if room < 1:
        raise UserMistake(
            f"data.max_length {max_length} has no room for a gene beside the special tokens of a cell. Raise it."
        )
    medians = None
    if tokenizer.medians is not None:
        medians = np.ones(tokenizer.size, dtype=np.float32)
        for gene, value in tokenizer.medians.items():
            medians[tokenizer.ids[gene]] = value
    return Scheme(
        cells=cells,
        most=min(room, cells.max_genes or room),
        encoder=encoder,
        cls=tokenizer.cls if cells.cls else None,
        end=tokenizer.end,
        dtype=np.dtype(np.uint16 if tokenizer.size <= 1 << 16 else np.int32),
        medians=medians if cells.tokens == "rank_value" else None,
    )
