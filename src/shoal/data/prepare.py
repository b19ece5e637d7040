"""Tokenize and pack once; later starts and other processes memory-map the result from the cache."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from shoal.config.schema import DataConfig
from shoal.data import pack
from shoal.data.cache import Report, obtain
from shoal.data.order import Order
from shoal.data.sequences import (
    DOCUMENT_LENGTHS,
    LOSS_TOKEN,
    ArrayWriter,
    Sequences,
    hash_sequences,
    open_sequences,
    write_array,
    write_summary,
)
from shoal.data.sources import OnBad, Record, read_records
from shoal.data.sources.find import PATH, VALIDATION, find_files, find_source
from shoal.data.tokenize import Corpus, Progress, cannot_pack, tokenize_files
from shoal.data.tokenizer_base import Tokenizer
from shoal.mistakes import UserMistake
from shoal.paths import cache_root

# Part of every cache key. Raise it whenever the same text and settings would give other sequences than before (a
# prompt's wording, a packing rule, the meaning of a flag), or other files.
LAYOUT = 3

_TOKENS_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class Settings:
    """What determines the sequences, besides the files and the tokenizer. All of it is part of the cache key."""

    source: str
    format: str
    max_length: int
    pack: bool  # documents that are joined to one stream
    pack_apart: bool  # documents that must not attend to each other
    train_on: str
    on_error: str


@dataclass(frozen=True)
class Sets:
    """Training and validation sequences, and the order over both. `validation` is None without validation."""

    training: Sequences
    validation: Sequences | None
    order: Order


def prepare_sets(
    data: DataConfig,
    tokenizer: Tokenizer,
    *,
    seed: int,
    cache: Path | None = None,
    report: Report,
    not_apart: str | None = None,
) -> Sets:
    """The data of a run. `data.validation` is a fraction to hold out, the path of a separate set, or 0. `not_apart` is
    the reason if the model cannot keep packed documents apart."""
    training = prepare(data, tokenizer, cache=cache, report=report, not_apart=not_apart)
    held_out = data.validation
    if held_out is None or isinstance(held_out, bool | int | float):
        share = float(held_out or 0)
        return Sets(training, training if share else None, Order(len(training), seed, share))
    validation = prepare(data, tokenizer, cache=cache, report=report, path=held_out, not_apart=not_apart)
    return Sets(training, validation, Order(len(training), seed, separate=len(validation)))


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
    source = find_source(data.source, data.path if path is None else path)
    settings = Settings(
        source=source,
        format=str(data.format),
        max_length=int(data.max_length),
        pack=bool(data.pack),
        pack_apart=data.pack is True or (data.pack == "auto" and not_apart is None),
        train_on=str(data.train_on),
        on_error=str(data.on_error),
    )
    named_by = PATH if path is None else VALIDATION
    files = _files(data, source, path, cache_root(cache), report)
    before = _states(files)
    described = [LAYOUT, asdict(settings), tokenizer.fingerprint, before]
    key = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:32]

    def build(folder: Path) -> None:
        _write_sequences(folder, settings, files, tokenizer, report, named_by, not_apart)
        if _states(files) != before:
            raise UserMistake("The data changed while it was read. Start again once it is complete.")

    entry, ready = obtain(cache_root(cache) / "data", key, build, report)
    sequences = open_sequences(entry)
    if sequences.separate and not_apart is not None:  # cached for another model
        raise cannot_pack(not_apart)
    for sentence in sequences.summary.sentences():
        report(sentence)
    if data.pack == "auto" and not_apart is not None and not sequences.summary.joined:
        report(f"data.pack auto: one document per sequence, because {not_apart}.")
    if ready:
        report(f"Using cached tokenized data: {entry}.")
    return sequences


def read_source(data: DataConfig, *, cache: Path | None = None, report: Report, on_bad: OnBad) -> Iterator[Record]:
    """The records of `data.path`, as `prepare` reads them."""
    source = find_source(data.source, data.path)
    return read_records(source, _files(data, source, None, cache_root(cache), report), on_bad)


def _files(data: DataConfig, source: str, path: object, cache: Path, report: Report) -> list[Path]:
    wanted = data.path if path is None else path
    if source == "chess" and find_spec("chess") is None:
        raise UserMistake("data.source chess needs the package chess: pip install 'shoal[chess]'.")
    if source == "chess" and wanted is None:
        from shoal.data.chess_games import Match, played_file

        return [played_file(Match(data.games, data.plies, data.player), cache, report)]
    return find_files(source, wanted, PATH if path is None else VALIDATION)


def _states(files: Sequence[Path]) -> list[tuple[str, int, int]]:
    try:
        states = [(str(file), file.stat()) for file in files]
    except OSError as error:  # a link to nowhere in a folder, or a file that was removed a moment ago
        raise UserMistake(f"{error.filename} cannot be read: {error.strerror}.") from None
    return [(name, state.st_size, state.st_mtime_ns) for name, state in states]


def _write_sequences(
    folder: Path,
    settings: Settings,
    files: Sequence[Path],
    tokenizer: Tokenizer,
    report: Report,
    key: str,
    not_apart: str | None,
) -> None:
    progress = Progress(report)
    corpus = tokenize_files(
        folder,
        files,
        tokenizer,
        source=settings.source,
        format_name=settings.format,
        train_on=settings.train_on,
        skip=settings.on_error == "skip",
        progress=progress,
        not_apart=not_apart if settings.pack_apart else None,
        key=key,
    )
    length = settings.max_length
    separate = settings.pack_apart and not corpus.format.joined
    if settings.pack and corpus.format.joined:
        bounds = pack.split_stream(corpus.tokens, length)
    else:
        bounds = pack.split_documents(corpus.lengths, length, split=corpus.format.joined)
    loss_tokens = count_loss_tokens(corpus.load("flags"), bounds)
    kept = loss_tokens > 0
    if not kept.any():
        raise UserMistake(
            f"None of the {corpus.documents:,} documents in {key} has a loss token"
            + (
                f": {bounds.truncated:,} were truncated at data.max_length {length}. Raise it."
                if bounds.truncated
                else "."
            )
        )
    starts, ends, loss_tokens = bounds.starts[kept], bounds.ends[kept], loss_tokens[kept]
    if separate:
        starts, ends, loss_tokens = _write_packed(corpus, starts, ends, loss_tokens, length + 1, progress)
    write_array(folder / DOCUMENT_LENGTHS, corpus.lengths)
    write_array(folder / "starts.npy", starts)
    write_array(folder / "ends.npy", ends)
    write_array(folder / "loss_tokens.npy", loss_tokens.astype(np.int32))
    trained = int(loss_tokens.sum(dtype=np.int64))
    write_summary(
        folder,
        replace(
            corpus.summary,
            separate=separate,
            sequences=len(starts),
            longest=int((ends - starts).max()) - 1,
            loss_tokens=trained,
            loss_token_share=trained / int((ends - starts - 1).sum()),
            content=hash_sequences(folder),
            truncated=bounds.truncated,
            dropped=int(np.sum(~kept)),
        ),
    )


def count_loss_tokens(flags: np.ndarray, bounds: pack.Bounds) -> np.ndarray:
    """The loss tokens of each sequence. Its first token is not counted: no input precedes it."""
    counts = np.zeros(len(bounds.starts), dtype=np.int64)
    first = 0
    while first < len(counts):
        # Sequences are in token order, so all within a block of the file are counted at once.
        limit = bounds.starts[first] + _TOKENS_AT_ONCE
        last = max(int(np.searchsorted(bounds.ends, limit, side="right")), first + 1)
        starts, ends = bounds.starts[first:last], bounds.ends[first:last]
        marked = np.asarray(flags[starts[0] : ends[-1]]) & LOSS_TOKEN
        before = np.concatenate([[0], np.cumsum(marked, dtype=np.int64)])
        counts[first:last] = before[ends - starts[0]] - before[np.minimum(starts + 1, ends) - starts[0]]
        first = last
    return counts


def _write_packed(
    corpus: Corpus, starts: np.ndarray, ends: np.ndarray, loss_tokens: np.ndarray, capacity: int, progress: Progress
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rewrite the documents in packing order, so that each sequence is contiguous in the file."""
    packing = pack.fit_documents(ends - starts, capacity)
    starts, lengths = starts[packing.order], (ends - starts)[packing.order]
    after = np.cumsum(lengths)
    for name in ("tokens", "flags"):
        values = corpus.load(name)
        unpacked = corpus.folder / f"{name}.npy"
        packed = corpus.folder / f"{name}-packed.npy"
        with ArrayWriter(packed, values.dtype) as writer:
            first = 0
            while first < len(starts):
                done = writer.length
                last = max(int(np.searchsorted(after, done + _TOKENS_AT_ONCE, side="right")), first + 1)
                here = lengths[first:last]
                shift = starts[first:last] - (after[first:last] - here - done)
                writer.append(values[np.repeat(shift, here) + np.arange(int(here.sum()))])
                first = last
                progress.tick(f"Packing: {writer.length:,} of {after[-1]:,} tokens.")
        packed.replace(unpacked)
    last_documents = np.cumsum(packing.counts)
    packed_ends = after[last_documents - 1]
    packed_starts = np.concatenate([[0], packed_ends[:-1]])
    packed_loss_tokens = np.add.reduceat(loss_tokens[packing.order], last_documents - packing.counts)
    return packed_starts, packed_ends, packed_loss_tokens
