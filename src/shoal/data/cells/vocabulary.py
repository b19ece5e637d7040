"""Which genes are tokens: those of the data, of a file, or of a name whose file is in the cache; and their medians."""

import csv
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from shoal.data.cells.gene_tokenizer import GeneTokenizer
from shoal.mistakes import UserMistake, suggestion
from shoal.paths import cache_root, user_path

KEY = "data.cells.gene_vocab"
MEDIANS_KEY = "data.cells.medians"
_SPECIAL = ("<", "[")  # how special tokens of other vocabularies begin


def read_genes(name: str, cache: Path | None) -> list[str]:
    """The genes of the vocabulary called `name`: a file, or the name of one in the cache."""
    file = user_path(name, KEY)
    if not file.is_file():
        folder = cache_root(cache) / "genes"
        if "/" in name or file.suffix:
            raise UserMistake(f"{KEY} {name} does not exist (relative to {Path.cwd()}). Check the path.")
        found = [folder / f"{name}{suffix}" for suffix in (".txt", ".json", ".tsv", ".csv")]
        file = next((one for one in found if one.is_file()), found[0])
        if not file.is_file():
            there = sorted(one.stem for one in folder.glob("*")) if folder.is_dir() else []
            raise UserMistake(
                f"{KEY} {name} has no file: write its genes, one per line, to {file}, or give the path of a file."
                + suggestion(name, there)
            )
    genes = _read_names(file)
    if not genes:
        raise UserMistake(f"{KEY}: {file} has no genes. It needs one per line.")
    if len(set(genes)) < len(genes):
        twice = next(gene for number, gene in enumerate(genes) if gene in genes[:number])
        raise UserMistake(f"{KEY}: {file} has {twice} more than once. Remove the copies.")
    return genes


def _read_names(file: Path) -> list[str]:
    if file.suffix == ".json":
        read = _read_json(file, KEY)
        if isinstance(read, dict):  # a gene and its number
            numbered = sorted(read.items(), key=lambda pair: (not isinstance(pair[1], int), pair[1]))
            read = [gene for gene, _ in numbered]
        if not isinstance(read, list) or not all(isinstance(gene, str) for gene in read):
            raise UserMistake(f"{KEY}: {file} must be a list of genes, or genes with their numbers.")
        return [gene for gene in read if not gene.startswith(_SPECIAL)]
    lines = (line[0].strip() for line in _read_table(file, KEY) if line)
    return [name for name in lines if name and not name.startswith((*_SPECIAL, "#"))]


def read_medians(name: str) -> dict[str, float]:
    """A file with the median of each gene: a table of two columns, or a JSON object."""
    file = user_path(name, MEDIANS_KEY)
    if not file.is_file():
        raise UserMistake(
            f"{MEDIANS_KEY} {name} is neither none, data nor a file (relative to {Path.cwd()}). Check the path."
        )
    if file.suffix == ".json":
        read = _read_json(file, MEDIANS_KEY)
        pairs = list(read.items()) if isinstance(read, dict) else []
    else:
        pairs = [(line[0].strip(), line[1]) for line in _read_table(file, MEDIANS_KEY) if len(line) > 1]
    medians = {}
    for number, (gene, value) in enumerate(pairs):
        try:
            medians[gene] = float(value)
        except (TypeError, ValueError):
            if number:  # the first line may name the columns
                raise UserMistake(f"{MEDIANS_KEY}: {file} has no number for {gene}, but {value!r}.") from None
    if not medians or min(medians.values()) <= 0:
        raise UserMistake(f"{MEDIANS_KEY}: {file} must have genes with positive medians, one per line.")
    return medians


def _read_json(file: Path, key: str) -> object:
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise UserMistake(f"{key}: {file} is not JSON: {error}.") from error


def _read_table(file: Path, key: str) -> Iterable[Sequence[str]]:
    try:
        text = file.read_text()
    except UnicodeDecodeError as error:
        raise UserMistake(
            f"{key}: {file} is not text. Pickled vocabularies are not read: write the genes to a file, one per line."
        ) from error
    delimiter = "\t" if "\t" in text else ","
    return csv.reader(text.splitlines(), delimiter=delimiter)


def match_genes(tokenizer: GeneTokenizer, names: Sequence[str]) -> tuple[list[int], int]:
    """The token of each gene (-1: none), and how many of them neither are in the vocabulary nor were left out."""
    known, left_out = tokenizer.ids, tokenizer.left_out
    first = len(tokenizer.SPECIAL)
    ids = [number if (number := known.get(name, -1)) >= first else -1 for name in names]
    unknown = sum(one < 0 and name not in left_out for one, name in zip(ids, names, strict=True))
    return ids, unknown
