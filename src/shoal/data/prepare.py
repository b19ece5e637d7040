"""Tokenize and pack once; later starts and other processes memory-map the result from the cache."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from shoal.config.schema import DataConfig
from shoal.data.cache import Report, obtain
from shoal.data.content import hash_contents, read_states
from shoal.data.progress import Progress
from shoal.data.sequences import Sequences, open_sequences
from shoal.data.sources import read_records
from shoal.data.sources.find import PATH, VALIDATION, find_files, find_source
from shoal.data.tokenize import Errors
from shoal.data.tokenizer_base import Tokenizer
from shoal.data.write import Settings, write_sequences
from shoal.mistakes import UserMistake
from shoal.paths import cache_root

# Part of every cache key. Raise it whenever the same text and settings would give other sequences than before (a
# prompt's wording, a packing rule, the meaning of a flag), or other files.
LAYOUT = 3


def prepare(
    data: DataConfig,
    tokenizer: Tokenizer,
    *,
    cache: Path | None = None,
    report: Report,
    path: object = None,
    not_apart: str | None = None,
) -> Sequences:
    """The sequences of `data` (or of `path`, its validation data), from the cache if they are there and complete."""
    settings = settings_of(data, path, not_apart)
    named_by = PATH if path is None else VALIDATION
    files = files_of(data, settings.source, path, cache_root(cache), report)
    before = read_states(files)
    content = hash_contents(before, cache_root(cache) / "hashes", Progress(report))
    described = [LAYOUT, asdict(settings), tokenizer.fingerprint, content]
    key = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:32]

    def build(folder: Path) -> None:
        _write_sequences(folder, settings, files, tokenizer, report, named_by, not_apart)
        if read_states(files) != before:
            raise UserMistake("The data changed while it was read. Start again once it is complete.")

    entry, ready = obtain(cache_root(cache) / "data", key, build, report)
    sequences = open_sequences(entry)
    if sequences.separate:  # it may have been cached for another model
        settings.refuse(sequences.summary.joined, not_apart)
    for sentence in sequences.summary.sentences():
        report(sentence)
    if data.pack == "auto" and not_apart is not None and not sequences.summary.joined:
        report(f"data.pack auto: one document per sequence, because {not_apart}.")
    if data.document_mask and not (sequences.summary.joined and settings.pack):
        report("data.document_mask has no effect: it is for plain text that is packed.")
    if ready:
        report(f"Using cached tokenized data: {entry}.")
    return sequences


def settings_of(data: DataConfig, path: object = None, not_apart: str | None = None) -> Settings:
    """What `data` says about the sequences of its files, or of `path`."""
    source = "auto" if path is not None and not isinstance(data.source, str) else data.source
    return Settings(
        source=find_source(source, data.path if path is None else path),
        format=str(data.format),
        max_length=int(data.max_length),
        pack=bool(data.pack),
        pack_apart=data.pack is True or (data.pack == "auto" and not_apart is None),
        train_on=str(data.train_on),
        on_error=str(data.on_error),
        long_documents=str(data.long_documents),
        document_mask=bool(data.document_mask),
    )


def files_of(data: DataConfig, source: str, path: object, cache: Path, report: Report) -> list[Path]:
    """The files of `data`, or of `path`; chess games are generated if there is no path."""
    wanted = data.path if path is None else path
    if source == "chess" and find_spec("chess") is None:
        raise UserMistake("data.source chess needs the package chess: pip install 'shoal[chess]'.")
    if source == "chess" and wanted is None:
        from shoal.data.chess_games import Match, played_file

        return [played_file(Match(data.games, data.plies, data.player), cache, report)]
    return find_files(source, wanted, PATH if path is None else VALIDATION)


def _write_sequences(
    folder: Path,
    settings: Settings,
    files: Sequence[Path],
    tokenizer: Tokenizer,
    report: Report,
    key: str,
    not_apart: str | None,
) -> None:
    errors = Errors(settings.on_error == "skip")
    write_sequences(
        folder,
        settings,
        read_records(settings.source, files, errors),
        tokenizer,
        errors=errors,
        report=report,
        where=str(files[0]) if len(files) == 1 else f"the {len(files):,} files starting with {files[0]}",
        key=key,
        not_apart=not_apart,
        sizes={Path(one.path): one.size for one in read_states(files)},
    )
