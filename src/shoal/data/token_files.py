"""Sequences of files that are already tokenized: memory-mapped where they are, not copied.

Preparation reads them once, to find ids that the tokenizer does not have and to count the loss tokens.
"""

import functools
import hashlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from shoal.catalogue.objectives import objective_facts
from shoal.config.schema import DataConfig
from shoal.data.pack import split_stream
from shoal.data.progress import Progress
from shoal.data.sequences import DOCUMENT, LOSS_TOKEN, Sequences, Summary, load_array, write_array, write_summary
from shoal.data.sources import Reading
from shoal.data.token_layouts import TokenFile, find_token_files
from shoal.data.tokenizer_base import Tokenizer
from shoal.mistakes import UserMistake

_TOKENS_AT_ONCE = 1 << 22
_MAPPED_AT_ONCE = 64  # each mapping holds a file descriptor, and there may be thousands of shards


class TokenSequences(Sequences):
    """Each file is a stream of sequences of `length` inputs; no sequence spans two files. A document begins where the
    file's index says so, or else after an end token."""

    def __init__(
        self,
        files: list[TokenFile],
        length: int,
        end: int,
        counted: np.ndarray,
        kept: np.ndarray | None,
        summary: Summary,
        special: np.ndarray | None = None,
    ) -> None:
        """`special`: for an encoder, which ids are special tokens, and therefore never masked."""
        self.summary = summary
        self._special = special
        self._files = files
        self._length = length
        self._end = end
        self._counted = counted
        self._kept = kept  # the sequences with loss tokens, if there are others
        self._tokens = np.array([file.tokens for file in files], dtype=np.int64)
        self._after = np.cumsum(_sequence_counts(self._tokens, length))  # sequences up to and including each file
        self._map = functools.lru_cache(_MAPPED_AT_ONCE)(lambda number: files[number].map())

    def __len__(self) -> int:
        return len(self._counted)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        numbers, starts, ends = self._bounds(np.array([range(len(self))[index]]))
        number, start, end = int(numbers[0]), int(starts[0]), int(ends[0])
        file, mapped = self._files[number], self._map(number)
        tokens = file.read(mapped, start, end)
        flags = np.full(end - start, LOSS_TOKEN, dtype=np.uint8)
        if self._special is not None:
            flags[self._special[tokens]] = 0
        if file.documents is None:
            before = file.read(mapped, max(start - 1, 0), end - 1)
            flags[end - start - len(before) :][before == self._end] = DOCUMENT
        else:
            first, last = np.searchsorted(file.documents, [start, end])
            flags[file.documents[first:last] - start] = DOCUMENT
        if start == 0:
            flags[0] = DOCUMENT
        return tokens, flags

    def lengths(self, indices: np.ndarray) -> np.ndarray:
        _, starts, ends = self._bounds(indices)
        found: np.ndarray = ends - starts
        return found

    def loss_tokens(self, indices: np.ndarray) -> np.ndarray:
        found: np.ndarray = self._counted[indices]
        return found

    def _bounds(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The file of each sequence, and where it starts and ends in it."""
        sequences = np.asarray(indices if self._kept is None else self._kept[indices], dtype=np.int64)
        numbers = np.searchsorted(self._after, sequences, side="right")
        before = np.where(numbers > 0, self._after[numbers - 1], 0)
        starts = (sequences - before) * self._length
        return numbers, starts, np.minimum(starts + self._length + 1, self._tokens[numbers])


def check_tokenized(data: DataConfig, not_apart: str | None = None, objective: str = "causal_lm") -> None:
    """A UserMistake if an option asks for what tokens cannot give. `not_apart`: why the model cannot confine
    attention to documents."""
    if (facts := objective_facts(objective)).of_answers:
        keys = "prompt, completion and label" if facts.unpaired else "chosen and rejected"
        raise UserMistake(
            f"train.objective {objective} compares answers, and data.source tokens does not tell them apart; give "
            f"text, in records with the keys {keys}."
        )
    if facts.classes:
        raise UserMistake(
            f"train.objective {objective} needs a label for each example, and data.source tokens is one stream without "
            "labels; give records with a text and data.label."
        )
    if facts.encoder and data.document_mask:
        raise UserMistake(
            f"data.document_mask is for causal language models, and train.objective {objective} joins the documents of "
            "data.source tokens; leave it out."
        )
    if data.format not in ("auto", "text"):
        raise UserMistake(f"data.source tokens has no records of format {data.format}. Use data.format: auto.")
    if not data.pack:
        raise UserMistake("data.source tokens is one stream of documents; data.pack: false is not supported for it.")
    if data.document_mask and not_apart is not None:
        raise UserMistake(f"data.document_mask is true, but {not_apart}; set it to false.")


def write_token_sequences(
    folder: Path,
    reading: Reading,
    tokenizer: Tokenizer,
    *,
    dtype: str,
    length: int,
    key: str,
    progress: Progress,
    encoder: bool = False,
) -> None:
    """Read the token files of `reading` once, and write into `folder` what `open_token_sequences` needs. For an
    `encoder` the loss tokens are those that may be masked: not the special ones."""
    files = find_token_files(reading.files, dtype, tokenizer.size)
    special = _special_ids(tokenizer.size, sorted(tokenizer.special)) if encoder else None
    digest = hashlib.sha256(str(length).encode())
    total = sum(file.tokens for file in files)
    counts, documents, scanned = [], 0, 0
    for file in files:
        counted, begun = _scan(file, tokenizer, length, digest, progress, scanned, total, special)
        counts.append(counted)
        documents += begun
        scanned += file.tokens
    loss_tokens = np.concatenate(counts)
    kept = np.flatnonzero(loss_tokens)
    if not len(kept):
        raise UserMistake(
            f"The {len(files):,} files of {key} hold {total:,} tokens, and none is a loss token. Check {key}."
        )
    layout = [
        {"path": str(file.path), "dtype": file.dtype.str, "offset": file.offset, "tokens": file.tokens}
        for file in files
    ]
    described = {"length": length, "end": tokenizer.end, "files": layout}
    if encoder:
        described |= {"size": tokenizer.size, "special": sorted(tokenizer.special)}
    (folder / "files.json").write_text(json.dumps(described) + "\n")
    for number, file in enumerate(files):
        if file.documents is not None:
            write_array(folder / f"documents-{number}.npy", file.documents)
        if file.extents is not None:
            write_array(folder / f"extents-{number}.npy", file.extents.reshape(-1))
    dropped = len(loss_tokens) - len(kept)
    if dropped:
        write_array(folder / "kept.npy", kept)
    write_array(folder / "loss_tokens.npy", loss_tokens[kept].astype(np.int32))
    trained = int(loss_tokens.sum(dtype=np.int64))
    summary = Summary(
        format="text",
        joined=True,
        separate=False,
        documents=documents,
        tokens=total,
        sequences=len(kept),
        longest=0,
        loss_tokens=trained,
        loss_token_share=0.0,
        content=digest.hexdigest(),
        dropped=dropped,
        encoder=encoder,
    )
    write_summary(folder, summary)
    lengths = open_token_sequences(folder).lengths(np.arange(len(kept)))
    write_summary(
        folder, replace(summary, longest=int(lengths.max()) - 1, loss_token_share=trained / int((lengths - 1).sum()))
    )


def open_token_sequences(folder: Path, *, separate: bool = False) -> TokenSequences:
    """The sequences prepared in `folder`. `separate`: attention is confined to documents."""
    described = json.loads((folder / "files.json").read_text())
    files = []
    for number, one in enumerate(described["files"]):
        extents = _load(folder / f"extents-{number}.npy")
        files.append(
            TokenFile(
                Path(one["path"]),
                np.dtype(one["dtype"]),
                one["offset"],
                one["tokens"],
                _load(folder / f"documents-{number}.npy"),
                None if extents is None else extents.reshape(2, -1),
            )
        )
    counted = _load(folder / "loss_tokens.npy")
    assert counted is not None
    summary = Summary(**json.loads((folder / "summary.json").read_text()))
    return TokenSequences(
        files,
        described["length"],
        described["end"],
        counted,
        _load(folder / "kept.npy"),
        replace(summary, separate=separate),
        _special_ids(described["size"], described["special"]) if "special" in described else None,
    )


def _special_ids(size: int, special: list[int]) -> np.ndarray:
    """For each id, whether it is a special token."""
    found = np.zeros(size, dtype=bool)
    found[special] = True
    return found


def _load(file: Path) -> np.ndarray | None:
    if not file.is_file():
        return None
    return load_array(file)


def _sequence_counts(tokens: np.ndarray, length: int) -> np.ndarray:
    # As many as `split_stream` finds: one less token than the file has is a label.
    found: np.ndarray = -(-np.maximum(tokens - 1, 0) // length)
    return found


def _scan(
    file: TokenFile,
    tokenizer: Tokenizer,
    length: int,
    digest: "hashlib._Hash",
    progress: Progress,
    scanned: int,
    total: int,
    special: np.ndarray | None,
) -> tuple[np.ndarray, int]:
    """The loss tokens of each sequence of the file, and the number of its documents. Hashes its content. `special`:
    for an encoder, which ids are special tokens."""
    bounds = split_stream(file.tokens, length)
    # Labels; of an encoder, inputs but the first.
    counts = bounds.ends - bounds.starts - (1 if special is None else 2)
    begins = np.empty(0, np.int64)  # the document that an end token at the end of the last block announced
    mapped = file.map() if file.tokens else np.empty(0, file.dtype)
    begun = 1 if file.tokens else 0
    digest.update(f"{file.dtype.str} {file.tokens}".encode())
    if file.documents is not None:
        digest.update(np.ascontiguousarray(file.documents).data)
    for start in range(0, file.tokens, _TOKENS_AT_ONCE):
        ids = file.read(mapped, start, min(start + _TOKENS_AT_ONCE, file.tokens))
        digest.update(np.ascontiguousarray(ids).data)
        _check_ids(file, ids, start, tokenizer)
        if file.documents is None:
            firsts = np.flatnonzero(ids == tokenizer.end) + start + 1
        else:
            first, last = np.searchsorted(file.documents, [start + 1, start + len(ids) + 1])
            firsts = file.documents[first:last]
        firsts = firsts[firsts < file.tokens]
        begun += len(firsts)
        if special is None:
            # Token p > 0 is a label of sequence (p - 1) // length and of no other.
            np.subtract.at(counts, (firsts - 1) // length, 1)
        else:
            # Token p is an input of sequence p // length; that sequence's first and the file's last are not masked.
            never = np.union1d(start + np.flatnonzero(special[ids]), np.concatenate([begins, firsts]))
            begins = never[never >= start + len(ids)]
            never = never[(never < start + len(ids)) & (never % length > 0) & (never < file.tokens - 1)]
            np.subtract.at(counts, never // length, 1)
        done = scanned + start + len(ids)
        progress.tick("Checking token ids", done, "tokens", done / total)
    return counts, begun


def _check_ids(file: TokenFile, ids: np.ndarray, start: int, tokenizer: Tokenizer) -> None:
    bad = ids.max() >= tokenizer.size or ids.min() < 0
    if bad:
        position = int(np.flatnonzero((ids >= tokenizer.size) | (ids < 0))[0])
        raise UserMistake(
            f"{file.path} has the id {int(ids[position])} at token {start + position:,}, but the tokenizer "
            f"{tokenizer.name} has {tokenizer.size:,} ids: the file was made with another tokenizer, or with another "
            f"data.token_dtype than {file.dtype.name}."
        )
