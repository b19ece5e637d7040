"""Which kind of data a file holds, by its name. One table for the config, the plan and the readers."""

from pathlib import PurePath

# Each source, and the suffixes of the files it reads in a folder. A text source reads every file.
SUFFIXES: dict[str, tuple[str, ...]] = {
    "json": (".json", ".jsonl", ".ndjson"),
    "parquet": (".parquet",),
    "csv": (".csv", ".tsv"),
    "tokens": (".bin", ".idx", ".npy"),
    "chess": (".pgn", ".uci"),
    "cells": (".h5ad",),
    "text": (
        ".txt",
        ".text",
        ".md",
        ".rst",
        ".py",
        ".c",
        ".cpp",
        ".h",
        ".java",
        ".js",
        ".ts",
        ".go",
        ".rs",
        ".tex",
        ".html",
    ),
}
COMPRESSED = (".gz", ".zst")  # may follow the suffix of a json, csv, chess or text file


def uncompressed_suffix(name: str) -> str:
    """The suffix of a file name in lower case, without that of its compression."""
    path = PurePath(name)
    return PurePath(path.stem).suffix.lower() if path.suffix.lower() in COMPRESSED else path.suffix.lower()


def source_of_name(name: str) -> str | None:
    """The source that reads files of this name; None: the name does not tell."""
    if name.startswith("scanpy:"):  # a dataset that comes with scanpy
        return "cells"
    suffix = uncompressed_suffix(name)
    return next((source for source, suffixes in SUFFIXES.items() if suffix in suffixes), None)
