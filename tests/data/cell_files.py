"""Small `.h5ad` files, written with h5py alone: anndata takes seconds to import."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

TEXT = h5py.string_dtype()


def write_cells(
    path: Path,
    counts: Any,
    genes: Sequence[str] | None = None,
    *,
    cells: Sequence[str] | None = None,
    labels: Mapping[str, Sequence[str]] | None = None,
    layers: Mapping[str, Any] | None = None,
    layout: str = "csr",
    var: Mapping[str, Sequence[str]] | None = None,
) -> Path:
    """A file as anndata writes it, with the matrix `counts` as X; labels are categorical columns of obs."""
    counts = np.asarray(counts, dtype=np.float32)
    genes = genes or [f"G{number}" for number in range(counts.shape[1])]
    cells = cells or [f"{path.stem}-{number}" for number in range(len(counts))]
    with h5py.File(path, "w") as file:
        _write_matrix(file, "X", counts, layout)
        for name, matrix in (layers or {}).items():
            _write_matrix(file, f"layers/{name}", np.asarray(matrix, dtype=np.float32), layout)
        _write_table(file, "obs", cells)
        for name, column in (labels or {}).items():
            names = sorted({one for one in column if one})
            group = file.create_group(f"obs/{name}")
            group.attrs["encoding-type"] = "categorical"
            group["categories"] = np.array(names, dtype=TEXT)
            group["codes"] = np.array([names.index(one) if one else -1 for one in column], dtype=np.int8)
        _write_table(file, "var", genes)
        for name, column in (var or {}).items():
            file[f"var/{name}"] = np.array(list(column), dtype=TEXT)
    return path


def _write_table(file: h5py.File, name: str, index: Sequence[str]) -> None:
    table = file.create_group(name)
    table.attrs["_index"] = "_index"
    table["_index"] = np.array(list(index), dtype=TEXT)


def _write_matrix(file: h5py.File, name: str, matrix: np.ndarray, layout: str) -> None:
    if layout == "dense":
        file[name] = matrix
        return
    rows, columns = np.nonzero(matrix)
    values, major, minor, length = matrix[rows, columns], rows, columns, matrix.shape[0]
    if layout == "csc":
        order = np.lexsort((rows, columns))
        values, major, minor, length = values[order], columns[order], rows[order], matrix.shape[1]
    group = file.create_group(name)
    group.attrs["encoding-type"] = f"{layout}_matrix"
    group.attrs["shape"] = matrix.shape
    group["indptr"] = np.concatenate([[0], np.cumsum(np.bincount(major, minlength=length))]).astype(np.int32)
    group["indices"], group["data"] = minor.astype(np.int32), values


def draw_counts(cells: int, genes: int, seed: int = 0, share: float = 0.3) -> np.ndarray:
    """Sparse counts; every cell expresses the first gene or the second."""
    generator = np.random.default_rng(seed)
    counts = generator.poisson(3, (cells, genes)) * (generator.random((cells, genes)) < share)
    counts[:, 0] += generator.integers(0, 2, cells)
    counts[:, 1] += counts[:, 0] == 0
    return counts.astype(np.float32)
