"""Tokenize and pack once; later starts and other processes memory-map the result from the cache."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from shoal.catalogue.objectives import objective_facts
from shoal.config.schema import DataConfig
from shoal.data.cache import Report, obtain
from shoal.data.cells.h5ad import check_installed
from shoal.data.cells.source import find_cell_tokenizer
from shoal.data.cells.write import write_cells
from shoal.data.content import hash_contents, read_states
from shoal.data.formats.chat_template import ChatTemplate, split_markers, tokenizer_template
from shoal.data.formats.choose import MAY_HAVE_CHATS, Options
from shoal.data.progress import Progress
from shoal.data.sequences import Sequences, Summary, open_sequences
from shoal.data.settings import Settings
from shoal.data.sources import OnBad, Reading, Record, read_records
from shoal.data.sources.find import PATH, VALIDATION, find_reading, find_source
from shoal.data.token_files import check_tokenized, open_token_sequences, write_token_sequences
from shoal.data.tokenize import Errors
from shoal.data.tokenizer_base import Tokenizer
from shoal.data.write import name_files, write_sequences
from shoal.mistakes import UserMistake
from shoal.paths import cache_root

# Part of every cache key. Raise it whenever the same text and settings would give other sequences than before (a
# prompt's wording, a packing rule, the meaning of a flag), or other files.
LAYOUT = 4
CELLS_LAYOUT = 2  # the same for cells alone


def prepare(
    data: DataConfig,
    tokenizer: Tokenizer,
    *,
    cache: Path | None = None,
    report: Report,
    path: object = None,
    not_apart: str | None = None,
    objective: str = "causal_lm",
    classes: Sequence[str] | None = None,
) -> Sequences:
    """The sequences of `data` (or of `path`, its validation data), from the cache if they are there and complete.
    `objective` decides whether they hold single documents, pairs, or documents with labels. `classes`: the only ones
    that examples may have; None: those that they have."""
    reading = reading_of(data, path, cache_root(cache), report)
    template = template_of(data, tokenizer)
    settings = settings_of(data, reading, template, not_apart, objective, classes)
    named_by = PATH if path is None else VALIDATION
    tokenized = reading.source == "tokens"
    if tokenized:
        check_tokenized(data, not_apart, objective)
    before = read_states(reading.files)
    # Files of tokens are used where they are, so their paths count; of others, only the content does.
    content = before if tokenized else hash_contents(before, cache_root(cache) / "hashes", Progress(report))
    described = [LAYOUT, settings.as_key(), tokenizer.fingerprint, content]
    cells = reading.source == "cells"
    if cells:
        described += [CELLS_LAYOUT, data.cells.model_dump(mode="json")]
    key = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:32]

    def build(folder: Path) -> None:
        if tokenized:
            write_token_sequences(
                folder,
                reading,
                tokenizer,
                dtype=settings.token_dtype,
                length=settings.max_length,
                key=named_by,
                progress=Progress(report),
                encoder=settings.encoder,
            )
        elif cells:
            work = find_cell_tokenizer(data, reading.files, tokenizer, settings)
            work.cells.load()
            write_cells(
                folder,
                work,
                work.cells.ranges(),
                key=named_by,
                progress=Progress(report),
                classes=settings.classes,
            )
        else:
            _write_sequences(folder, settings, reading, tokenizer, template, report, named_by, not_apart)
        if read_states(reading.files) != before:
            raise UserMistake("The data changed while it was read. Start again once it is complete.")

    entry, ready = obtain(cache_root(cache) / "data", key, build, report)
    sequences: Sequences
    sequences = open_token_sequences(entry, separate=data.document_mask) if tokenized else open_sequences(entry)
    if sequences.separate:  # it may have been cached for another model
        settings.refuse(sequences.summary.joined, not_apart)
    for sentence in sequences.summary.sentences():
        report(sentence)
    for sentence in notes(data, sequences.summary, tokenizer, not_apart):
        report(sentence)
    if ready:
        report(f"Using cached tokenized data: {entry}.")
    return sequences


def notes(data: DataConfig, summary: Summary, tokenizer: Tokenizer, not_apart: str | None) -> Iterator[str]:
    """What the user may not expect of these sequences."""
    if summary.format == "chat" and (split := split_markers(tokenizer, data.chat_template)) is not None:
        yield split
    if data.pack == "auto" and not_apart and not (summary.joined or summary.pairs or summary.encoder):
        yield f"data.pack auto: one document per sequence, because {not_apart}."
    if summary.desirable in (0, summary.documents - summary.dropped - summary.too_long):
        yield (
            f"All answers are {'' if summary.desirable else 'un'}desirable: there is nothing to tell them from. Check "
            "the labels."
        )
    if data.document_mask and not (summary.joined and data.pack):
        yield "data.document_mask has no effect: it is for plain text that is packed."


def template_of(data: DataConfig, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The chat template, if there is one and the format may need it."""
    return tokenizer_template(tokenizer, data.chat_template) if data.format in MAY_HAVE_CHATS else None


def settings_of(
    data: DataConfig,
    reading: Reading,
    template: ChatTemplate | None,
    not_apart: str | None = None,
    objective: str = "causal_lm",
    classes: Sequence[str] | None = None,
) -> Settings:
    """What `data` says about the sequences of `reading`."""
    facts = objective_facts(objective)
    of_answers = facts.of_answers
    return Settings(
        source=reading.source,
        split=reading.split,
        subset=reading.subset,
        columns=dict(reading.columns),
        token_dtype=str(data.token_dtype),
        format=str(data.format),
        max_length=int(data.max_length),
        pack=data.pack is True if facts.encoder else bool(data.pack),
        pack_apart=not facts.encoder and (data.pack is True or (data.pack == "auto" and not_apart is None)),
        train_on="answers" if of_answers and data.train_on == "all" else str(data.train_on),
        on_error=str(data.on_error),
        long_documents=str(data.long_documents),
        document_mask=bool(data.document_mask),
        chat_template=None if template is None else template.fingerprint,
        objective=objective,
        label=data.label if facts.classes else None,
        classes=None if classes is None else tuple(classes),
    )


def options_of(settings: Settings, template: ChatTemplate | None) -> Options:
    return Options(settings.train_on, template, settings.label, settings.encoder)


def read_source(data: DataConfig, *, cache: Path | None = None, report: Report, on_bad: OnBad) -> Iterator[Record]:
    """The records of `data.path`, as `prepare` reads them."""
    return read_records(reading_of(data, None, cache_root(cache), report), on_bad)


def reading_of(data: DataConfig, path: object, cache: Path, report: Report) -> Reading:
    """What is read for `data`, or for `path`; chess games are generated if there is no path."""
    wanted = data.path if path is None else path
    if path is not None and not isinstance(data.source, str):  # of a mixture
        data = data.model_copy(update={"source": "auto"})
    source = data.source if wanted is None else find_source(data.source, wanted)
    if source == "chess" and find_spec("chess") is None:
        raise UserMistake("data.source chess needs the package chess: pip install 'shoal[chess]'.")
    if source == "cells":
        check_installed()
    if source == "chess" and wanted is None:
        from shoal.data.chess_games import Match, played_file

        return Reading("chess", (played_file(Match(data.games, data.plies, data.player), cache, report),))
    return find_reading(data, path)


def _write_sequences(
    folder: Path,
    settings: Settings,
    reading: Reading,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    report: Report,
    key: str,
    not_apart: str | None,
) -> None:
    errors, files = Errors(settings.on_error == "skip"), reading.files
    write_sequences(
        folder,
        settings,
        read_records(reading, errors),
        tokenizer,
        options=options_of(settings, template),
        errors=errors,
        report=report,
        where=name_files(files),
        key=key,
        not_apart=not_apart,
        sizes={Path(one.path): one.size for one in read_states(files)},
    )
