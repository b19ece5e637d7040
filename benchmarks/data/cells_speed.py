"""How many cells per second are read and tokenized from an `.h5ad` file, against anndata's own loader.

    python benchmarks/data/cells_speed.py --output benchmarks/data/cells_speed.json

Synthetic counts of realistic sparsity: 20,000 genes, about 1,500 of them expressed per cell, in CSR with and without
gzip. `prepare` reads, ranks, hashes and writes tokens, with one process and with one per core. anndata's AnnLoader
reads the same backed file in batches of shuffled cells, as a training loop would, and hands over counts, not tokens; it
has no workers here, because its collate function refuses its own batches with them (anndata 0.12). `in_memory` is
anndata with the whole file loaded, and consecutive slices of it.

Wall time depends on what else the machine does. So the runs are interleaved, and ratios to the loader are those of
neighbouring runs; the CPU time of the process and its children is reported too; and `cores_wanted` is the time in
which threads ran or waited for a core (Linux's schedstat), over wall time: what they would have kept busy, had the
cores been theirs.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from shoal.config.schema import DataConfig
from shoal.data import prepare, workers
from shoal.data.cells.make_tokenizer import make_tokenizer

GENES, EXPRESSED = 20_000, 1_500
LOADER = "anndata_loader"


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


class Demand:
    """How long the threads of this process and its children ran or waited for a core, by a sampling thread."""

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> "Demand":
        self._read()
        self._before = sum(self._seen.values())
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self._read()

    @property
    def seconds(self) -> float:
        return (sum(self._seen.values()) - self._before) / 1e9

    def _sample(self) -> None:
        while not self._done.wait(0.02):
            self._read()

    def _read(self) -> None:
        own = Path("/proc/self/task")
        try:
            children = " ".join((task / "children").read_text() for task in own.iterdir()).split()
            for folder in (own, *(Path(f"/proc/{child}/task") for child in children)):
                for task in folder.iterdir():
                    if task.name == str(self._thread.native_id):
                        continue
                    ran, waited, _ = (task / "schedstat").read_text().split()
                    self._seen[str(task)] = int(ran) + int(waited)
        except OSError:  # one of them has just ended
            pass


Work = Callable[[], int]  # returns how many cells it has read


def interleaved(works: dict[str, Work], repeat: int) -> dict[str, dict[str, Any]]:
    """Each in turn, `repeat` times; medians, and ratios within a turn to the loader."""
    rates: dict[str, list[tuple[float, float, float]]] = {name: [] for name in works}
    for _ in range(repeat):
        for name, work in works.items():
            begin, before = time.perf_counter(), os.times()
            with Demand() as demand:
                cells = work()
            wall, after = time.perf_counter() - begin, os.times()
            spent = sum(after[:4]) - sum(before[:4])
            rates[name].append((cells / wall, cells / spent, demand.seconds / wall))
    found = {}
    for name, runs in rates.items():
        ratios = [
            [one[column] / other[column] for one, other in zip(runs, rates[LOADER], strict=True)] for column in (0, 1)
        ]
        found[name] = {
            "cells_per_second": round(statistics.median(one[0] for one in runs)),
            "best_cells_per_second": round(max(one[0] for one in runs)),
            "cells_per_cpu_second": round(statistics.median(one[1] for one in runs)),
            "cores_wanted": round(statistics.median(one[2] for one in runs), 2),
            "times_loader": round(statistics.median(ratios[0]), 2),
            "times_loader_least_and_most": [round(min(ratios[0]), 2), round(max(ratios[0]), 2)],
            "times_loader_per_cpu_second": round(statistics.median(ratios[1]), 2),
        }
    return found


def prepared(path: Path, count: int) -> Work:
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


def by_loader(path: Path, most: int) -> Work:
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


def in_memory(path: Path) -> Work:
    import anndata

    def work() -> int:
        table = anndata.read_h5ad(path)
        return sum(table.X[first : first + 1024].shape[0] for first in range(0, table.n_obs, 1024))

    return work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", type=int, default=20_000)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    warnings.simplefilter("ignore", FutureWarning)  # AnnLoader is deprecated; its successor is another package
    cores = workers.available_cores()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, compression in (("uncompressed", None), ("gzip", "gzip")):
            path = Path(folder) / f"{name}.h5ad"
            write_file(path, given.cells, compression)
            found[name] = {
                "mebibytes": round(path.stat().st_size / 2**20),
                **interleaved(
                    {
                        "prepare_1_process": prepared(path, 0),
                        LOADER: by_loader(path, min(given.cells, 4096)),
                        f"prepare_{cores}_workers": prepared(path, cores),
                        "anndata_in_memory": in_memory(path),
                    },
                    given.repeat,
                ),
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
        "repeats": given.repeat,
        "genes": GENES,
        "expressed_per_cell": EXPRESSED,
        **found,
    }
    if given.output is not None:
        given.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
