"""The tokenizer of a run on cells whose model has none: its genes, their medians, and which of them vary most."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from shoal.config.schema import DataConfig
from shoal.data.cache import Report, obtain
from shoal.data.cells.gene_tokenizer import GeneTokenizer
from shoal.data.cells.h5ad import CellFile
from shoal.data.cells.source import Cells, find_cells
from shoal.data.cells.statistics import GeneStatistics, Medians, before_log1p
from shoal.data.cells.tokens import normalize
from shoal.data.cells.vocabulary import read_genes, read_medians
from shoal.data.content import hash_contents, read_states
from shoal.data.progress import Progress
from shoal.data.sources.find import find_files, find_source
from shoal.mistakes import UserMistake
from shoal.paths import cache_root

_LAYOUT = 1  # of the statistics in the cache


def are_cells(data: DataConfig) -> bool:
    """Whether every source is cells. Looks into a folder whose files alone tell."""
    if None not in data.kinds:
        return data.kinds == {"cells"}
    return all(
        block.path is not None and find_source(block.source, block.path) == "cells" for block, _ in data.blocks()
    )


def make_tokenizer(data: DataConfig, report: Report, cache: Path | None = None) -> GeneTokenizer:
    """The tokenizer for the cells of `data`, whose sources are all cells."""
    files = [file for block, _ in data.blocks() for file in find_files("cells", block.path)]
    cells = data.cells
    of_data = cells.gene_vocab in ("auto", "data")
    genes = _genes_of(files, data) if of_data else read_genes(cells.gene_vocab, cache)
    tokenizer = GeneTokenizer(genes)
    medians = None if cells.medians in ("auto", "none", "data") else read_medians(cells.medians)
    if medians is not None and not medians.keys() & set(genes):
        raise UserMistake(
            f"None of the {len(medians):,} genes in data.cells.medians {cells.medians} is in the vocabulary, whose own "
            f"are called {', '.join(genes[:3])} …: give medians of genes with these names."
        )
    left_out: list[str] = []
    if cells.highly_variable is not None or cells.medians == "data":
        kept, own = _statistics(data, files, tokenizer, report, cache)
        left_out = sorted(set(genes) - set(kept))
        genes = kept
        medians = own if cells.medians == "data" else medians
    return GeneTokenizer(genes, medians=medians, left_out=left_out)


def check_given(data: DataConfig, tokenizer: GeneTokenizer) -> None:
    """A UserMistake if the config asks for other genes than the model's tokenizer has."""
    cells = data.cells
    given = {
        "gene_vocab": cells.gene_vocab not in ("auto",),
        "medians": cells.medians not in ("auto",),
        "highly_variable": cells.highly_variable is not None,
    }
    for key, set_ in given.items():
        if set_:
            raise UserMistake(
                f"data.cells.{key} is set, but the model has a vocabulary of {len(tokenizer.genes):,} genes with all "
                "that belongs to it; leave it out."
            )


def _genes_of(files: Sequence[Path], data: DataConfig) -> list[str]:
    """The genes of all files, sorted: adding a file does not change the order of the others."""
    found: set[str] = set()
    for file in files:
        with CellFile(file) as opened:
            matrix = opened.choose_matrix(data.cells.matrix, counts=not data.cells.normalized)
            found.update(opened.genes(matrix, data.cells.gene_names).tolist())
    return sorted(found - {""} - set(GeneTokenizer.SPECIAL))


def _statistics(
    data: DataConfig, files: Sequence[Path], tokenizer: GeneTokenizer, report: Report, cache: Path | None
) -> tuple[list[str], dict[str, float]]:
    """The genes that stay, and their medians, from the cache if they are there."""
    cells, root = data.cells, cache_root(cache)
    content = hash_contents(read_states(files), root / "hashes", Progress(report))
    described = [_LAYOUT, content, tokenizer.fingerprint, cells.model_dump(mode="json")]
    key = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:32]

    def build(folder: Path) -> None:
        found = find_cells(data, files, tokenizer, labels=False)
        kept, medians = measure_genes(found, data, tokenizer, Progress(report))
        (folder / "genes.json").write_text(json.dumps({"kept": kept, "medians": medians}))

    entry, _ = obtain(root / "gene-statistics", key, build, report)
    read = json.loads((entry / "genes.json").read_text())
    return read["kept"], read["medians"]


def measure_genes(
    cells: Cells, data: DataConfig, tokenizer: GeneTokenizer, progress: Progress
) -> tuple[list[str], dict[str, float]]:
    """One pass over all cells: the most variable genes, or all, and their medians."""
    wanted = data.cells
    # Statistics are those of normalized counts, whatever is taken of them afterwards.
    linear = wanted.model_copy(update={"log1p": False})
    statistics, medians = GeneStatistics.empty(tokenizer.size), Medians(tokenizer.size)
    done = 0
    for number, first, last in cells.ranges():
        slab = cells.slab(number, first, last)
        counts = slab.counts
        expression = before_log1p(normalize(slab, linear), linear)
        ids = cells.files[number].ids[slab.genes]
        kept = np.repeat(counts >= wanted.min_genes, counts) & (ids >= 0)
        statistics.add(int((counts >= wanted.min_genes).sum()), ids[kept], expression[kept])
        if wanted.medians == "data":
            medians.add(ids[kept], expression[kept])
        done += last - first
        progress.tick("Measuring genes", done, "cells", done / cells.count)
    first_gene = len(tokenizer.SPECIAL)
    genes = np.arange(first_gene, tokenizer.size)
    if wanted.highly_variable is not None:
        of_genes = replace(statistics, sums=statistics.sums[first_gene:], squares=statistics.squares[first_gene:])
        genes = of_genes.most_variable(wanted.highly_variable) + first_gene
    found = medians.result()
    kept_genes = [tokenizer.tokens[one] for one in genes.tolist()]
    return kept_genes, {tokenizer.tokens[one]: float(found[one]) for one in genes if np.isfinite(found[one])}
