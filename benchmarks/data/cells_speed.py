"""How many cells per second are read and tokenized from an `.h5ad` file, against anndata's own loader.

    python benchmarks/data/cells_speed.py --output benchmarks/data/cells_speed.json

Synthetic counts of realistic sparsity: 20,000 genes, about 1,500 of them expressed per cell, in CSR with and without
gzip. `prepare` reads, ranks and writes tokens, with one process and with one per core. anndata's AnnLoader reads the
same backed file in batches of shuffled cells, as a training loop would, and hands over counts, not tokens. `in_memory`
is anndata with the whole file loaded, and consecutive slices of it.

Wall time depends on what else the machine does, so the CPU time of the process and its children is reported too.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from shoal.config.schema import DataConfig
from shoal.data import prepare, workers
from shoal.data.cells.make_tokenizer import make_tokenizer

GENES, EXPRESSED = 20_000, 1_500


def write_file(path: Path, cells: int, compression: str | None) -> None:
    import anndata
    import pandas
    from scipy.sparse import csr_matrix

    random = np.random.default_rng(0)
    counts = np.clip(random.normal(EXPRESSED, EXPRESSED / 4, cells), 200, GENES / 4).astype(int)
    chance = random.gamma(0.6, 1, GENES)
    # The genes with the highest of random scores are a draw without replacement, with these chances.
    scores = (np.log(chance) + random.gumbel(size=(64, GENES))).astype(np.float32)
    ranked = np.argsort(-scores, axis=1)
    genes = np.concatenate([np.sort(ranked[number % 64, :count]) for number, count in enumerate(counts)])
    values = random.geometric(0.45, len(genes)).astype(np.float32)
    matrix = csr_matrix((values, genes, np.concatenate([[0], np.cumsum(counts)])), shape=(cells, GENES))
    table = anndata.AnnData(matrix, var=pandas.DataFrame(index=[f"G{number}" for number in range(GENES)]))
    table.obs_names = [f"cell-{number}" for number in range(cells)]
    table.write_h5ad(path, compression=compression)


def timed(work: Callable[[], int], repeat: int) -> dict[str, Any]:
    """`work` returns how many cells it has read."""
    rates, processor = [], []
    for _ in range(repeat):
        begin, before = time.perf_counter(), os.times()
        cells = work()
        after = os.times()
        rates.append(cells / (time.perf_counter() - begin))
        spent = sum(after[:4]) - sum(before[:4])
        processor.append(cells / spent)
    return {
        "cells_per_second": round(statistics.median(rates)),
        "best_cells_per_second": round(max(rates)),
        "cells_per_cpu_second": round(statistics.median(processor)),
    }


def prepared(path: Path, count: int) -> Callable[[], int]:
    data = DataConfig(source="cells", path=str(path), max_length=2048, validation=0)
    tokenizer = make_tokenizer(data, lambda sentence: None)

    def work() -> int:
        choose = workers.choose_workers
        workers.choose_workers = lambda: count  # type: ignore[assignment]
        try:
            with tempfile.TemporaryDirectory() as cache:
                found = prepare(data, tokenizer, cache=Path(cache), report=lambda _: None, objective="masked_lm")
                return len(found)
        finally:
            workers.choose_workers = choose

    return work


def by_loader(path: Path, most: int) -> Callable[[], int]:
    import anndata
    from anndata.experimental import AnnLoader

    def work() -> int:
        table = anndata.read_h5ad(path, backed="r")
        read = 0
        for batch in AnnLoader(table, batch_size=256, shuffle=True):
            read += batch.X.shape[0]
            if read >= most:
                break
        table.file.close()
        return read

    return work


def in_memory(path: Path) -> Callable[[], int]:
    import anndata

    def work() -> int:
        table = anndata.read_h5ad(path)
        return sum(table.X[first : first + 1024].shape[0] for first in range(0, table.n_obs, 1024))

    return work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", type=int, default=10_000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    cores = workers.available_cores()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, compression in (("uncompressed", None), ("gzip", "gzip")):
            path = Path(folder) / f"{name}.h5ad"
            write_file(path, given.cells, compression)
            found[name] = {
                "mebibytes": round(path.stat().st_size / 2**20),
                "prepare_1_process": timed(prepared(path, 0), given.repeat),
                f"prepare_{cores}_workers": timed(prepared(path, cores), given.repeat),
                "anndata_loader": timed(by_loader(path, min(given.cells, 4096)), given.repeat),
                "anndata_in_memory": timed(in_memory(path), given.repeat),
            }
            print(name, json.dumps(found[name], indent=2), flush=True)
    result = {
        "machine": {
            "processor": platform.machine(),
            "cores": cores,
            "load": round(os.getloadavg()[0], 1),
            "numpy": version("numpy"),
            "anndata": version("anndata"),
            "h5py": version("h5py"),
        },
        "cells": given.cells,
        "genes": GENES,
        "expressed_per_cell": EXPRESSED,
        **found,
    }
    if given.output is not None:
        given.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
