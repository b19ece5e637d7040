"""What determines the sequences of a data set, besides its files and the tokenizer."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from shoal.catalogue.objectives import objective_facts
from shoal.mistakes import UserMistake


@dataclass(frozen=True)
class Settings:
    """All of it is part of the cache key."""

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

    def refuse_contradictions(self, joined: bool) -> None:
        """A UserMistake if the data, whose documents are `joined` or not, cannot be treated as these settings say."""
        splits = self.long_documents == "split"
        if self.of_answers and splits:
            raise UserMistake(
                "data.long_documents split makes several documents of one, and an answer is compared as a whole; use "
                "truncate or drop."
            )
        if self.label is not None and splits:
            raise UserMistake(
                "data.long_documents split makes several examples of one, and the label is that of the whole; use "
                "truncate or drop."
            )
        if self.encoder and self.pack and (self.label is not None or not joined):
            raise UserMistake(
                "data.pack true joins plain texts for train.objective masked_lm; these examples are one sequence each, "
                "so leave it out."
            )
        if self.encoder and self.pack and self.long_documents in ("truncate", "drop"):
            raise UserMistake(
                f"data.long_documents {self.long_documents} has no meaning for texts that are joined by data.pack "
                "true; leave one of them out."
            )
