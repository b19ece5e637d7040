"""An `.h5ad` file: its genes, its cells, one column of them, and the expression matrix in slabs of cells.

Only the parts that are needed are read, with h5py: anndata would first load every embedding and neighbour graph that a
file has. Files of anndata before 0.7, with tables as compound datasets, are read too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from shoal.mistakes import UserMistake, suggestion

AUTO = "auto"
_LOOKED_AT = 64  # cells whose values tell whether a matrix has counts


def check_installed() -> None:
    """A UserMistake if the packages of the extra are missing."""
    if find_spec("h5py") is None or find_spec("anndata") is None:
        raise UserMistake("data.source cells needs the package anndata: pip install 'shoal[cells]'.")


@dataclass(frozen=True)
class Slab:
    """Consecutive cells as a CSR matrix. `genes` are the columns of the non-zero `values`; cell k has those from
    `ends[k - 1]` to `ends[k]`."""

    ends: np.ndarray
    genes: np.ndarray
    values: np.ndarray

    @property
    def counts(self) -> np.ndarray:
        """Non-zero genes of each cell."""
        return np.diff(self.ends, prepend=0)


class CellFile:
    """An open `.h5ad` file. Close it, or use it in a `with` statement."""

    def __init__(self, path: Path) -> None:
        check_installed()
        import h5py

        self.path = path
        try:
            self._file = h5py.File(path, "r")
        except OSError as error:
            if not path.is_file():
                raise UserMistake(f"{path} cannot be read: {error}.") from error
            if path.suffix == ".gz":
                raise UserMistake(
                    f"{path} is compressed as a whole, so that no part of it can be read alone; unpack it with gunzip, "
                    "or write it with anndata's write_h5ad(compression='gzip')."
                ) from error
            raise UserMistake(
                f"{path} is not an .h5ad file: HDF5 cannot open it. Write it again with anndata's write_h5ad, or "
                "change data.source."
            ) from error
        missing = [name for name in ("X", "obs", "var") if name not in self._file]
        if missing:
            self._file.close()
            raise UserMistake(
                f"{path} is an HDF5 file without {' and '.join(missing)}, so it is not an .h5ad file. Write it with "
                "anndata's write_h5ad."
            )

    def __enter__(self) -> "CellFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    # Cells

    def cell_names(self) -> np.ndarray:
        return self._index("obs")

    def columns(self) -> list[str]:
        """The columns of obs."""
        return _columns(self._file["obs"])

    def check_column(self, name: str, key: str) -> None:
        if name not in (there := self.columns()):
            raise UserMistake(
                f"{key} {name} is not a column of obs in {self.path}; it has {', '.join(there) or 'no columns'}."
                + suggestion(name, there)
            )

    def column(self, name: str, key: str) -> list[str]:
        """A column of obs as text. Cells without a value have an empty one. Messages name the config's `key`."""
        self.check_column(name, key)
        table = self._file["obs"]
        values = table[name]
        if hasattr(values, "keys"):  # a group: categorical, or nullable
            if "codes" in values:
                return _categories(_texts(values["categories"][:]), values["codes"][:])
            missing = values["mask"][:]
            return ["" if gone else text for gone, text in zip(missing, _texts(values["values"][:]), strict=True)]
        if not hasattr(table, "keys"):  # anndata before 0.7
            legacy = f"uns/{name}_categories"
            return _categories(_texts(self._file[legacy][:]), values) if legacy in self._file else _texts(values)
        if "__categories" in table and name in table["__categories"]:  # 0.7
            return _categories(_texts(table["__categories"][name][:]), values[:])
        return _texts(values[:])

    # Genes and matrices

    def matrices(self) -> list[str]:
        """The names by which data.cells.matrix may mean a matrix of this file."""
        found = ["X"]
        if "raw.X" in self._file or "raw/X" in self._file:
            found.append("raw")
        return [*found, *self._file.get("layers", ())]

    def genes(self, matrix: str, column: str | None = None) -> np.ndarray:
        """The names of the matrix's genes: the index of var, or one of its columns."""
        where = "var"
        if matrix == "raw":
            where = "raw.var" if "raw.var" in self._file else "raw/var"
        if column is None:
            return self._index(where)
        table = self._file[where]
        if column not in (there := _columns(table)):
            raise UserMistake(
                f"data.cells.gene_names {column} is not a column of var in {self.path}; it has "
                f"{', '.join(there) or 'no columns'}."
            )
        values = table[column]
        if hasattr(values, "keys") and "codes" in values:
            return np.array(_categories(_texts(values["categories"][:]), values["codes"][:]), dtype=object)
        return np.array(_texts(values[:] if hasattr(values, "shape") else values["values"][:]), dtype=object)

    def choose_matrix(self, wanted: str, *, counts: bool) -> str:
        """The matrix called `wanted`, or with `auto` the first that has what is needed: raw counts, or non-negative
        values. A UserMistake if there is none."""
        there = self.matrices()
        if wanted != AUTO and wanted not in there:
            raise UserMistake(
                f"data.cells.matrix {wanted} is not in {self.path}; it has {', '.join(there)}."
                + (suggestion(wanted, there) or " Name one of these.")
            )
        found = {name: self._kind(name) for name in ([wanted] if wanted != AUTO else _by_likelihood(there))}
        for kind in ("counts",) if counts else ("positive", "counts"):
            if (name := next((name for name, its in found.items() if its == kind), None)) is not None:
                return name
        kinds = {
            "negative": "negative values (it is scaled)",
            "positive": "fractions (it is normalized)",
            "non-finite": "NaN or infinite values",
        }
        listed = "; ".join(f"{name} has {kinds[kind]}" for name, kind in found.items())
        lacking = "raw counts" if counts else "normalized values"
        if counts:
            remedy = "give the file with its counts"
            if "positive" in found.values():
                remedy += ", or, if they are normalized and log1p was taken of them, set data.cells.normalized: true"
        else:
            remedy = "give non-negative ones"
        raise UserMistake(f"{self.path} has no {lacking}: {listed}. {remedy[0].upper()}{remedy[1:]}.")

    def _kind(self, matrix: str) -> str:
        """counts, positive, negative or non-finite, by the first cells."""
        opened = self.matrix(matrix)
        if not opened.cells:
            raise UserMistake(f"{self.path} has no cells: {matrix} has no rows. Leave it out.")
        values = opened.slab(0, min(_LOOKED_AT, opened.cells)).values
        if len(values) and values.min() < 0:
            return "negative"
        if not np.isfinite(values).all():
            return "non-finite"
        return "counts" if np.array_equal(values, np.round(values)) else "positive"

    def matrix(self, name: str, *, in_memory: bool = False) -> "Matrix":
        """The matrix, to be read in slabs of cells; `in_memory`: it is loaded at once."""
        names = {"X": ("X",), "raw": ("raw.X", "raw/X")}.get(name, (f"layers/{name}",))
        stored = next(self._file[one] for one in names if one in self._file)
        kind = _encoding(stored)
        if kind == "dense":
            return DenseMatrix(stored[:] if in_memory else stored)
        if kind == "csr":
            return SparseMatrix(stored["indptr"][:], *(_part(stored, one, in_memory) for one in ("indices", "data")))
        if kind == "csc":
            return _by_cells(stored)
        raise UserMistake(f"{name} of {self.path} is stored as {kind}, which is not a matrix of csr, csc or numbers.")

    def _index(self, where: str) -> np.ndarray:
        table = self._file[where]
        if hasattr(table, "keys"):
            name = table.attrs.get("_index", "_index" if "_index" in table else "index")
            return np.array(_texts(table[name][:]), dtype=object)
        assert table.dtype.names is not None
        return np.array(_texts(table[table.dtype.names[0]]), dtype=object)


class Matrix:
    """The expression of cells (rows) in genes (columns)."""

    cells: int
    genes: int

    def slab(self, first: int, last: int) -> Slab:
        raise NotImplementedError


class DenseMatrix(Matrix):
    """A matrix with its zeros."""

    def __init__(self, stored: Any) -> None:
        self._stored = stored
        self.cells, self.genes = stored.shape

    def slab(self, first: int, last: int) -> Slab:
        rows = self._stored[first:last]
        cells, genes = np.nonzero(rows)
        ends = np.cumsum(np.bincount(cells, minlength=last - first))
        return Slab(ends, genes.astype(np.int32), rows[cells, genes])


class SparseMatrix(Matrix):
    """A CSR matrix. Its cells are contiguous, so that a slab is read in two calls."""

    def __init__(self, pointers: np.ndarray, genes: Any, values: Any, width: int = 0) -> None:
        self._pointers, self._genes, self._values = pointers, genes, values
        self.cells, self.genes = len(pointers) - 1, width

    def slab(self, first: int, last: int) -> Slab:
        begin, end = int(self._pointers[first]), int(self._pointers[last])
        genes, values = self._genes[begin:end], self._values[begin:end]
        ends = self._pointers[first + 1 : last + 1].astype(np.int64) - begin
        if len(values) and not values.all():  # stored zeros are no expression
            kept = values != 0
            before = np.concatenate([[0], np.cumsum(kept)])
            return Slab(before[ends], genes[kept], values[kept])
        return Slab(ends, genes, values)


def _by_cells(stored: Any) -> SparseMatrix:
    """A CSC matrix is contiguous by genes: it is loaded and turned into CSR."""
    from scipy.sparse import csc_matrix

    parts = tuple(stored[name][:] for name in ("data", "indices", "indptr"))
    turned = csc_matrix(parts, shape=tuple(_shape(stored))).tocsr()
    return SparseMatrix(turned.indptr, turned.indices, turned.data)


def _encoding(stored: Any) -> str:
    if hasattr(stored, "shape"):
        return "dense"
    found = stored.attrs.get("encoding-type", stored.attrs.get("h5sparse_format", "something else"))
    return str(found.decode() if isinstance(found, bytes) else found).removesuffix("_matrix")


def _shape(stored: Any) -> Sequence[int]:
    shape = stored.attrs.get("shape", stored.attrs.get("h5sparse_shape"))
    return [int(size) for size in shape]


def _part(stored: Any, name: str, in_memory: bool) -> Any:
    return stored[name][:] if in_memory else stored[name]


def _columns(table: Any) -> list[str]:
    if not hasattr(table, "keys"):
        return list(table.dtype.names[1:])
    index = table.attrs.get("_index", "_index")
    return [name for name in table if name not in (index, "__categories")]


def _texts(values: Any) -> list[str]:
    return [_text(one) for one in np.asarray(values).tolist()]


def _text(value: object) -> str:
    """NaN is no value. pandas makes a float of an integer where others of its column are missing."""
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, float):
        return "" if value != value else str(int(value) if value.is_integer() else value)
    return str(value)


def _categories(names: Sequence[str], codes: np.ndarray) -> list[str]:
    return ["" if code < 0 else names[code] for code in np.asarray(codes).tolist()]


def _by_likelihood(names: Sequence[str]) -> list[str]:
    """Where raw counts are by custom: a layer called counts, then raw, then X."""
    first = [name for name in ("counts", "raw", "X") if name in names]
    return [*first, *(name for name in names if name not in first)]
