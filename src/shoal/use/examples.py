"""Held-out examples as questions: the tokens of a prompt, and the answer that the data has for it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np

from shoal.catalogue.causal_models import why_not_packed
from shoal.config.schema import Config, DataConfig
from shoal.data.encode import encode
from shoal.data.formats.chat_template import no_template
from shoal.data.formats.choose import Document, Format, Options, choose_format
from shoal.data.formats.preference import read_documents
from shoal.data.prepare import reading_of, template_of
from shoal.data.sequences import DOCUMENT
from shoal.data.sets import prepare_sets
from shoal.data.sources import Record, read_records
from shoal.data.tokenizer_base import Tokenizer
from shoal.mistakes import UserMistake
from shoal.paths import cache_root
from shoal.use.load import LoadedRun

Report = Callable[[str], None]


@dataclass(frozen=True)
class Example:
    """A prompt and the answer to it. Of a conversation, the prompt is all that precedes its last answer."""

    prompt: list[int]
    answer: str
    record: Record


def held_out_examples(
    config: Config, loaded: LoadedRun, *, every: bool, most: int | None = None, report: Report = lambda _: None
) -> list[Example]:
    """The examples that were held out in training, in the order of the data; with `every`, all of data.path.

    `most`: only the first ones.
    """
    data = config.data
    held_out: Iterator[tuple[DataConfig, Record]]
    if every:
        held_out = _records(data, None, report)
    elif isinstance(data.validation, str):
        held_out = _records(data, data.validation, report)
    elif data.validation:
        held_out = _split_off(config, loaded, report)
    else:
        raise UserMistake(
            f"{loaded.path} has no held-out data (data.validation is 0); give other data, such as data.path=FILE."
        )
    found = list(islice(_examples(_Reader(loaded.tokenizer, config), held_out), most))
    if not found:
        raise UserMistake("There are no held-out examples. Check data.path and data.validation.")
    return found


def _examples(reader: "_Reader", records: Iterator[tuple[DataConfig, Record]]) -> Iterator[Example]:
    for block, record in records:
        try:
            found = reader.example(block, record)
            if found is not None:
                yield found
        except UserMistake:
            if block.on_error != "skip":
                raise


def _records(data: DataConfig, path: str | None, report: Report) -> Iterator[tuple[DataConfig, Record]]:
    """The records of each source, or of the validation data at `path`, with the settings they are read with."""
    blocks = [block for block, _ in data.blocks()] if path is None else [data]
    for block in blocks:
        reading = reading_of(block, path, cache_root(), report)
        if reading.source == "tokens":
            raise UserMistake("data.source tokens has no prompts and answers to generate; omit --generate.")
        skip = block.on_error == "skip"
        for record in read_records(reading, (lambda _: None) if skip else _stop):
            yield block, record


def _stop(mistake: UserMistake) -> None:
    raise mistake


def _split_off(config: Config, loaded: LoadedRun, report: Report) -> Iterator[tuple[DataConfig, Record]]:
    """The records whose documents are in the sequences that data.validation, a share, held out.

    Sequences do not tell which records they are made of, so records are recognized by their tokens.
    """
    if config.data.streaming:
        raise UserMistake(
            "Data that is streamed has no fixed held-out examples; give other data, such as data.path=FILE."
        )
    not_apart = why_not_packed(loaded.model.config.get_text_config().model_type)
    sets = prepare_sets(
        config.data,
        loaded.tokenizer,
        seed=config.seed,
        report=report,
        not_apart=not_apart,
        objective=config.train.objective,
    )
    assert sets.validation is not None
    if sets.training.summary.joined:
        raise _no_answers(config.data.format)
    wanted: dict[bytes, int] = {}
    for index in sets.order.validation_sequences():
        tokens, flags = sets.validation[int(index)]
        for part in np.split(tokens, np.flatnonzero(flags[1:] & DOCUMENT) + 1):
            key = _key(part, config.data.max_length)
            wanted[key] = wanted.get(key, 0) + 1
    reader = _Reader(loaded.tokenizer, config)
    for block, record in _records(config.data, None, report):
        if not wanted:
            return
        for document in reader.trained(block, record):
            key = _key(encode(loaded.tokenizer, [document]).ids, config.data.max_length)
            if key in wanted:
                wanted[key] -= 1
                if not wanted[key]:
                    del wanted[key]
                yield block, record
                break


def _key(tokens: np.ndarray, length: int) -> bytes:
    return tokens[: length + 1].astype(np.int32).tobytes()


class _Reader:
    """Reads records in the format of the first one, as the preparation of the data does."""

    def __init__(self, tokenizer: Tokenizer, config: Config) -> None:
        self._tokenizer = tokenizer
        self._objective = config.train.objective
        self._formats: dict[tuple[object, ...], Format] = {}
        self._template = template_of(config.data, tokenizer)

    def example(self, block: DataConfig, record: Record) -> Example | None:
        """The record as a prompt and its answer; None if that is an undesirable one."""
        document = self._documents(block, record, "last")[0]
        if document.desirable is False:
            return None
        trained = [index for index, (_, loss) in enumerate(document.segments) if loss]
        if not trained or not trained[-1]:
            raise _no_answers(self._format(block, record).name, record)
        before, answer = document.segments[: trained[-1]], document.segments[trained[-1]][0]
        ids = self._prompt(document, [text for text, _ in before])
        if document.whole:  # with the token that ends the turn
            answer = self._tokenizer.decode(self._tokenizer.encode(answer), keep_special=False)
        return Example(ids, answer.strip(), record)

    def trained(self, block: DataConfig, record: Record) -> Sequence[Document]:
        """The documents of the record as training sees them; none if it is one that is skipped."""
        try:
            return self._documents(block, record, str(block.train_on))
        except UserMistake:
            if block.on_error == "skip":
                return []
            raise

    def _documents(self, block: DataConfig, record: Record, train_on: str) -> Sequence[Document]:
        return read_documents(self._format(block, record), record, Options(train_on, self._template))

    def _format(self, block: DataConfig, first: Record) -> Format:
        key = (block.format, str(block.path))
        if key not in self._formats:
            chosen = choose_format(str(block.format), first, self._objective)
            if chosen.joined:
                raise _no_answers(chosen.name)
            if chosen.name == "chat" and self._template is None:
                raise no_template(self._tokenizer.name)
            self._formats[key] = chosen
        return self._formats[key]

    def _prompt(self, document: Document, texts: list[str]) -> list[int]:
        tokenizer = self._tokenizer
        parts = ["".join(texts)] if document.whole else texts
        begins = document.begin and tokenizer.prepends_begin and tokenizer.begin is not None
        return [
            *([tokenizer.begin] if begins and tokenizer.begin is not None else []),
            *chain.from_iterable(ids.tolist() for ids in tokenizer.encode_many(parts)),
        ]


def _no_answers(name: str, record: Record | None = None) -> UserMistake:
    where = "The data" if record is None else record.where
    return UserMistake(
        f"{where} has no prompt and answer to generate (data.format {name}); omit --generate, which needs "
        "instructions, conversations or completions."
    )
