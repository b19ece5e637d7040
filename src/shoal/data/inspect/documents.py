"""The documents of a source one by one, with the records they come from: to look at data without preparing it."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from shoal.catalogue.objectives import objective_facts
from shoal.config.schema import DataConfig
from shoal.data.cache import Report
from shoal.data.formats.chat_template import no_template
from shoal.data.formats.choose import Document, Format, Options, check_pairs, choose_format
from shoal.data.formats.preference import read_documents
from shoal.data.pack import rule_for_long
from shoal.data.prepare import read_source, template_of
from shoal.data.sources import Record
from shoal.data.sources.find import find_source
from shoal.data.sources.read import READERS
from shoal.data.tokenizer_base import Tokenizer
from shoal.mistakes import UserMistake

Numbered = tuple[int, Record, Document]


class Documents:
    """An iterator over the documents of the valid records. Bad ones stop it or are counted, as data.on_error says."""

    def __init__(
        self,
        data: DataConfig,
        tokenizer: Tokenizer,
        *,
        report: Report,
        cache: Path | None = None,
        objective: str = "causal_lm",
    ) -> None:
        self.data = data
        self.read = self.skipped = 0
        self.first_skipped: str | None = None
        template = template_of(data, tokenizer)
        facts, self.objective = objective_facts(objective), objective
        self.encoder, self.labelled = facts.encoder, facts.classes and data.label is not None
        self._options = Options(str(data.train_on), template, data.label if facts.classes else None, facts.encoder)
        self._records = read_source(data, cache=cache, report=report, on_bad=self._on_bad)
        self._next = next(self._records, None)
        if self._next is None:
            raise UserMistake(f"There is no record in {shown_path(data)}. Check data.path.")
        self.format: Format = choose_format(str(data.format), self._next, objective)
        check_pairs(self.format, objective)
        if self.format.name == "chat" and template is None:
            raise no_template(tokenizer.name)

    def _on_bad(self, mistake: UserMistake) -> None:
        if self.data.on_error != "skip":
            raise mistake
        self.skipped += 1
        self.first_skipped = self.first_skipped or str(mistake)

    def __iter__(self) -> Iterator[Numbered]:
        """Each document with its record and the number of that, from 0."""
        continues = False
        while (record := self._next) is not None:
            number, self.read = self.read, self.read + 1
            try:
                documents = read_documents(self.format, record, self._options)
            except UserMistake as mistake:
                self._on_bad(mistake)
            else:
                for document in documents:
                    yield number, record, replace(document, continues=continues, continued=record.continued)
                continues = record.continued
            self._next = next(self._records, None)


def has_records(data: DataConfig) -> bool:
    """Whether the source is read record by record. Token files are not."""
    return find_source(data.source, data.path) in READERS


def shown_path(data: DataConfig) -> str | None:
    return data.path if data.path is None or isinstance(data.path, str) else ", ".join(data.path)


def long_documents(data: DataConfig, joined: bool) -> str:
    """What happens to documents longer than data.max_length: truncate, split or drop."""
    return rule_for_long(data.long_documents, joined)
