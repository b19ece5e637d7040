"""Records to a folder of prepared sequences: tokenize, split or truncate, pack."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from shoal.catalogue.objectives import objective_facts
from shoal.data import pack
from shoal.data.cache import Report
from shoal.data.formats.choose import Format, Options
from shoal.data.progress import Progress
from shoal.data.sequences import (
    DESIRABLE,
    DOCUMENT,
    DOCUMENT_LENGTHS,
    LABELS,
    LOSS_TOKEN,
    ArrayWriter,
    Summary,
    hash_sequences,
    write_array,
    write_summary,
)
from shoal.data.sources import Record
from shoal.data.tokenize import Corpus, Errors, NothingToLearn, tokenize_records
from shoal.data.tokenizer_base import Tokenizer
from shoal.mistakes import UserMistake, shortened

_TOKENS_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class Settings:
    """What determines the sequences, besides the files and the tokenizer. All of it is part of the cache key."""

    source: str
    split: str
    subset: str | None
    columns: Mapping[str, str]
    token_dtype: str
    format: str
    max_length: int
    pack: bool  # documents that are joined to one stream
    pack_apart: bool  # documents that must not attend to each other
    train_on: str
    on_error: str
    chat_template: str | None = None  # its fingerprint
    long_documents: str = "auto"
    document_mask: bool = False  # documents of a stream do not attend to each other either
    objective: str = "causal_lm"
    label: str | None = None  # the field with the class of an example
    classes: tuple[str, ...] | None = None  # the only names that it may have; None: those in the data

    @property
    def encoder(self) -> bool:
        return objective_facts(self.objective).encoder

    @property
    def pairs(self) -> bool:
        """Whether a record is two documents, chosen and rejected, that stay in one sequence."""
        return objective_facts(self.objective).pairs

    @property
    def unpaired(self) -> bool:
        """Whether documents have labels."""
        return objective_facts(self.objective).unpaired

    @property
    def of_answers(self) -> bool:
        """Whether documents are compared as a whole."""
        return self.pairs or self.unpaired

    def as_key(self) -> dict[str, object]:
        """The part of a cache key: objectives that need the same sequences share them."""
        key = asdict(self)
        del key["objective"]
        if self.encoder:
            return key | {"encoder": True}
        del key["label"], key["classes"]
        return key | ({"pairs": True} if self.pairs else {"unpaired": True} if self.unpaired else {})

    def refuse(self, joined: bool, not_apart: str | None) -> None:
        """A UserMistake if documents must not attend to each other, but the model cannot keep them apart."""
        if not_apart is not None and self.pairs:
            raise UserMistake(
                f"train.objective {self.objective} has both answers of a pair in one sequence, but {not_apart}; use "
                "another model."
            )
        if not_apart is not None and self.unpaired:
            raise UserMistake(
                f"train.objective {self.objective} needs to know the documents of a sequence, but {not_apart}; use "
                "another model."
            )
        if not_apart is not None and self.pack_apart and not joined:
            raise UserMistake(f"data.pack is true, but {not_apart}; set data.pack: false, or leave it out.")
        if not_apart is not None and self.pack and self.document_mask and joined:
            raise UserMistake(
                f"data.document_mask is true, but {not_apart}; leave it out, or set data.pack: false, which makes a "
                "sequence of each document."
            )


def write_sequences(
    folder: Path,
    settings: Settings,
    records: Iterator[Record],
    tokenizer: Tokenizer,
    *,
    options: Options,
    errors: Errors,
    report: Report,
    where: str,
    key: str,
    not_apart: str | None = None,
    sizes: Mapping[Path, int] | None = None,
) -> None:
    """Write the sequences of `records` into `folder`, for `open_sequences`.

    `errors` is what the reader of `records` calls for a bad one. Messages say that the records are in `where`, which
    the config's `key` names. `not_apart` is the reason if the model cannot keep packed documents apart. `sizes`: the
    bytes of the files, in order, to report how long it takes.
    """

    def check(chosen: Format) -> None:
        settings.refuse(chosen.joined, not_apart)
        if settings.of_answers and settings.long_documents == "split":
            raise UserMistake(
                "data.long_documents split makes several documents of one, and an answer is compared as a whole; use "
                "truncate or drop."
            )
        if settings.label is not None and settings.long_documents == "split":
            raise UserMistake(
                "data.long_documents split makes several examples of one, and the label is that of the whole; use "
                "truncate or drop."
            )
        if settings.encoder and settings.pack and (settings.label is not None or not chosen.joined):
            raise UserMistake(
                "data.pack true joins plain texts for train.objective masked_lm; these examples are one sequence each, "
                "so leave it out."
            )
        if settings.encoder and settings.pack and settings.long_documents in ("truncate", "drop"):
            raise UserMistake(
                f"data.long_documents {settings.long_documents} has no meaning for texts that are joined by data.pack "
                "true; leave one of them out."
            )

    progress = Progress(report)
    corpus = tokenize_records(
        folder,
        records,
        tokenizer,
        format_name=settings.format,
        options=options,
        errors=errors,
        progress=progress,
        where=where,
        key=key,
        sizes=sizes,
        objective=settings.objective,
        check=check,
    )
    progress.begin()
    joined, length = corpus.format.joined, settings.max_length
    stream = settings.pack and joined
    separate = settings.document_mask if stream else (settings.pack_apart or settings.of_answers) and not joined
    long = pack.rule_for_long(settings.long_documents, joined and settings.label is None)
    bounds, affected = _bounds(corpus, length, long, stream, progress, encoder=settings.encoder)
    counted = replace(bounds, ends=bounds.ends - 1) if settings.encoder else bounds  # inputs, or labels
    loss_tokens = count_loss_tokens(corpus.load("flags"), counted)
    kept = loss_tokens > (-1 if settings.label is not None else 0)
    per_unit = 2 if settings.pairs else 1  # documents that are kept, packed and counted together
    if settings.pairs:
        kept = kept.reshape(-1, 2).all(axis=1).repeat(2)  # both prompts whole, and something of both answers
    summary = replace(
        corpus.summary,
        separate=separate,
        truncated=affected if long == "truncate" else 0,
        split=affected if long == "split" else 0,
        too_long=affected if long == "drop" else 0,
        dropped=int(np.sum(~kept)) // per_unit,
        pairs=settings.pairs,
        encoder=settings.encoder,
        desirable=_count_desirable(corpus, bounds.starts[kept]) if settings.unpaired else None,
    )
    if not kept.any():
        raise _nothing_to_learn(summary, key, length)
    starts, ends, loss_tokens = bounds.starts[kept], bounds.ends[kept], loss_tokens[kept]
    if separate and not stream:
        packing = pack.pack_units(ends - starts, length + 1, per_unit, together=settings.pack_apart)
        starts, ends, loss_tokens = _write_packed(corpus, starts, ends, loss_tokens, packing, progress)
    if settings.label is not None:
        firsts = np.cumsum(corpus.lengths) - corpus.lengths
        names = [corpus.labels[one] for one in np.searchsorted(firsts, starts).tolist()]
        classes, numbers = number_classes(names, settings.classes, key)
        write_array(folder / LABELS, numbers)
        summary = replace(summary, classes=classes)
    write_array(folder / DOCUMENT_LENGTHS, corpus.lengths)
    write_array(folder / "starts.npy", starts)
    write_array(folder / "ends.npy", ends)
    write_array(folder / "loss_tokens.npy", loss_tokens.astype(np.int32))
    trained, inputs = int(loss_tokens.sum(dtype=np.int64)), int((ends - starts - 1).sum())
    write_summary(
        folder,
        replace(
            summary,
            sequences=len(starts),
            longest=int((ends - starts).max()) - 1,
            loss_tokens=trained,
            loss_token_share=trained / inputs,
            filled=inputs / (len(starts) * length) if stream or (separate and settings.pack_apart) else None,
            content=hash_sequences(folder),
        ),
    )


def number_classes(names: Sequence[str], known: Sequence[str] | None, key: str) -> tuple[list[str], np.ndarray]:
    """The classes, in the order of their numbers, and the number of each example's. `known`: the only ones that there
    may be; `key`: the config's name of the data."""
    found = set(names)
    if known is not None and (unknown := sorted(found - set(known))):
        count = sum(name in unknown for name in names)
        raise UserMistake(
            f"{count:,} examples in {key} have a label that no training example has, such as {shortened(unknown[0])}; "
            f"the classes are {shortened(', '.join(known))}."
        )
    if known is None and len(found) < 2:
        raise UserMistake(
            f"All examples in {key} have the label {shortened(names[0])}: there is nothing to tell apart. Check "
            "data.label."
        )
    numeric = all(name.lstrip("-").isdecimal() for name in found)
    classes = list(known) if known is not None else sorted(found, key=int if numeric else None)
    numbers = {name: number for number, name in enumerate(classes)}
    return classes, np.array([numbers[name] for name in names], dtype=np.int32)


def _count_desirable(corpus: Corpus, starts: np.ndarray) -> int:
    return int(np.count_nonzero(corpus.load("flags")[starts] & DESIRABLE))


def _bounds(
    corpus: Corpus, length: int, long: str, stream: bool, progress: Progress, *, encoder: bool
) -> tuple[pack.Bounds, int]:
    """Where the sequences are (the documents, if they are packed later), and how many documents were too long."""
    if encoder and stream:
        return pack.split_stream(int(corpus.lengths.sum()) + 1, length), 0
    if encoder:
        bounds = pack.split_examples(corpus.lengths, length, long)
        return bounds, bounds.long
    if stream and long == "split":
        return pack.split_stream(int(corpus.lengths.sum()), length), 0
    if corpus.format.pairs:
        bounds = pack.shorten_pairs(corpus.lengths, length, long)
        return bounds, bounds.long
    bounds = pack.split_documents(corpus.lengths, length, long)
    if not stream:
        return bounds, bounds.long
    if bounds.long:
        _rewrite(corpus, bounds.starts, bounds.ends - bounds.starts, progress)
    return pack.split_stream(int((bounds.ends - bounds.starts).sum()), length), bounds.long


def name_files(files: Sequence[Path]) -> str:
    """These files, for a sentence."""
    return str(files[0]) if len(files) == 1 else f"the {len(files):,} files starting with {files[0]}"


def _nothing_to_learn(summary: Summary, key: str, length: int) -> NothingToLearn:
    if summary.too_long == summary.units:
        instead = "" if summary.pairs else ", or set data.long_documents: split"
        return NothingToLearn(
            f"All {summary.units:,} {summary.unit} in {key} are longer than data.max_length {length}, and "
            f"data.long_documents is drop. Raise data.max_length{instead}."
        )
    if summary.pairs:
        return NothingToLearn(
            f"None of the {summary.units:,} pairs in {key} has loss tokens in both answers: {summary.truncated:,} were "
            f"truncated at data.max_length {length}, which has to hold both prompts and answers. Raise it."
        )
    if summary.truncated:
        return NothingToLearn(
            f"None of the {summary.documents:,} documents in {key} has a loss token: {summary.truncated:,} were "
            f"truncated at data.max_length {length}. Raise it, or set data.long_documents: split."
        )
    return NothingToLearn(
        f"None of the {summary.documents:,} documents in {key} has a loss token. Check that they have answers, or set "
        "data.train_on: all."
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
        marked = starts[0] + np.flatnonzero((flags[starts[0] : ends[-1]] & LOSS_TOKEN).view(np.bool_))
        after, before = np.searchsorted(marked, ends), np.searchsorted(marked, np.minimum(starts + 1, ends))
        counts[first:last] = after - before
        first = last
    return counts


def _write_packed(
    corpus: Corpus,
    starts: np.ndarray,
    ends: np.ndarray,
    loss_tokens: np.ndarray,
    packing: pack.Packing,
    progress: Progress,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rewrite the documents in packing order, so that each sequence is contiguous in the file."""
    starts, lengths = starts[packing.order], (ends - starts)[packing.order]
    _rewrite(corpus, starts, lengths, progress)
    last_documents = np.cumsum(packing.counts)
    packed_ends = np.cumsum(lengths)[last_documents - 1]
    packed_starts = np.concatenate([[0], packed_ends[:-1]])
    packed_loss_tokens = np.add.reduceat(loss_tokens[packing.order], last_documents - packing.counts)
    return packed_starts, packed_ends, packed_loss_tokens


def _rewrite(corpus: Corpus, starts: np.ndarray, lengths: np.ndarray, progress: Progress) -> None:
    """Replace the files by these parts of them, one after another. Each part is a document from now on."""
    after = np.cumsum(lengths)
    tokens, flags = corpus.load("tokens"), corpus.load("flags")
    files = {name: corpus.folder / f"{name}-packed.npy" for name in ("tokens", "flags")}
    with ArrayWriter(files["tokens"], tokens.dtype) as writer, ArrayWriter(files["flags"], flags.dtype) as flag_writer:
        first = 0
        while first < len(starts):
            done = writer.length
            last = max(int(np.searchsorted(after, done + _TOKENS_AT_ONCE, side="right")), first + 1)
            here = lengths[first:last]
            begins = after[first:last] - here - done
            indices = np.repeat(starts[first:last] - begins, here)
            indices += np.arange(len(indices))
            writer.append(tokens.take(indices))
            marks = flags.take(indices)
            marks[begins] = DOCUMENT | (marks[begins] & DESIRABLE)  # also where a part of a split document begins
            flag_writer.append(marks)
            first = last
            progress.tick("Packing", last, "documents", writer.length / int(after[-1]))
    del tokens, flags
    for name, file in files.items():
        file.replace(corpus.folder / f"{name}.npy")
