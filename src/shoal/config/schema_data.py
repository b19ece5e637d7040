"""The block `data`."""

from typing import Annotated, Any, Literal

from annotated_types import Ge, Le
from pydantic import Field, Strict, model_validator

from shoal.catalogue.data_files import source_of_name
from shoal.config.schema_base import MOST_IN_SIZE, Block, Positive, ShareBelowOne, Size, Texts, contradiction, spelled
from shoal.config.schema_cells import CellsConfig

SourceName = Annotated[
    Literal["auto", "json", "text", "parquet", "csv", "hf", "tokens", "chess", "cells"],
    spelled(
        ("auto", "json", "text", "parquet", "csv", "hf", "tokens", "chess", "cells"),
        {
            "jsonl": "json",
            "txt": "text",
            "huggingface": "hf",
            "tsv": "csv",
            "pgn": "chess",
            "h5ad": "cells",
            "anndata": "cells",
        },
    ),
]
RecordFormat = Annotated[
    Literal["auto", "alpaca", "chat", "completion", "preference", "text", "unpaired"],
    spelled(
        ("auto", "alpaca", "chat", "completion", "preference", "text", "unpaired"),
        {
            "sharegpt": "chat",
            "messages": "chat",
            "openai": "chat",
            "chatml": "chat",
            "dpo": "preference",
            "kto": "unpaired",
        },
    ),
]
TrainOn = Literal["all", "answers", "last"]
_PATH = "File, folder or pattern to read, or a list of these; for hf, a folder or the id of a cached dataset"
_COLUMNS = "Names of the data for the names of the format, such as {prompt: question, completion: answer}."
_SPLIT = "Split of a Hugging Face dataset; a slice such as train[:1000] too."
_SUBSET = "Subset (configuration) of a Hugging Face dataset that has several."


class StreamingConfig(Block):
    """Data that is tokenized while training."""

    chunk: Size = Field(10_000, description="Records tokenized and packed together.")
    shuffle_buffer: Size = Field(
        50_000, description="Records whose sequences are shuffled together, rounded up to whole chunks."
    )


class MixingConfig(Block):
    """How several sources are mixed."""

    by: Literal["tokens", "examples"] = Field(
        "tokens", description="Whether weights are shares of the tokens or of the examples."
    )
    when_exhausted: Literal["repeat", "end"] = Field(
        "repeat",
        description="A source that runs out starts again (an epoch lasts until each has been read), or ends (an epoch "
        "has every example once).",
    )


class DataBlockConfig(Block):
    """One source of a mixture. What is left out is as in `data`."""

    source: SourceName = Field("auto", description="The kind of file.")
    path: str | Texts | None = Field(None, description=f"{_PATH}.")
    split: str | None = Field(None, description=_SPLIT)
    subset: str | None = Field(None, description=_SUBSET)
    format: RecordFormat | None = Field(None, description="Format of the records.")
    columns: dict[str, str] | None = Field(None, description=_COLUMNS)
    train_on: TrainOn | None = Field(None, description="Which tokens count in the loss.")
    weight: Positive = Field(1.0, description="Share of this source, relative to the other weights.")


class DataConfig(Block):
    """The training data."""

    source: SourceName | Annotated[tuple[DataBlockConfig, ...], Strict(False)] = Field(
        "auto",
        description="The kind of file (auto: by its name), or a list of blocks with source, path, format and weight.",
    )
    path: str | Texts | None = Field(None, description=f"{_PATH}; source chess without a path generates games.")
    split: str = Field("train", description=_SPLIT)
    subset: str | None = Field(None, description=_SUBSET)
    token_dtype: Literal["auto", "uint16", "uint32", "int32", "int64"] = Field(
        "auto", description="Data type of a .bin file without a header, for source tokens; auto: by the vocabulary."
    )
    games: Size = Field(12_000, description="Number of games to generate, for source chess without a path.")
    plies: Size = Field(42, description="Maximum length of a generated game in plies (moves of one side).")
    player: Literal["quick", "stockfish"] = Field(
        "quick",
        description="Player of generated games. quick: one ply deep, hundreds of games per second; stockfish: much "
        "stronger, about forty times slower, must be installed.",
    )
    format: RecordFormat = Field(
        "auto", description="Format of the records; auto: chosen by the keys of the first record."
    )
    columns: dict[str, str] = Field({}, description=_COLUMNS)
    max_length: Annotated[int, Ge(2), Le(MOST_IN_SIZE)] = Field(2048, description="Maximum sequence length in tokens.")
    long_documents: Literal["auto", "truncate", "split", "drop"] = Field(
        "auto", description="Documents longer than max_length; auto: instructions are truncated, texts are split."
    )
    pack: bool | Literal["auto"] = Field(
        "auto",
        description="Pack documents into full sequences: instructions do not attend to each other, plain text is one "
        "continuous stream. auto: instructions only for models that keep them apart (docs/models.md); for encoders, "
        "one example per sequence.",
    )
    document_mask: bool = Field(
        False, description="Confine attention to documents in a continuous stream of plain text too."
    )
    train_on: TrainOn = Field(
        "answers", description="Which tokens count in the loss: all, the answers, or the last answer of a chat."
    )
    chat_template: str | None = Field(
        None,
        description="Chat template to use instead of the tokenizer's own: chatml, llama3, mistral, zephyr, gemma, or a "
        "Jinja file.",
    )
    label: str | None = Field(
        None,
        description="Field of the records that names the class of an example, for train.objective classify; of cells, "
        "a column of obs.",
    )
    cells: CellsConfig = Field(CellsConfig(), description="How cells become tokens, for data.source cells.")
    validation: ShareBelowOne | str = Field(
        0.02,
        description="Validation data: the fraction to hold out (0: none), a path, or for hf another split.",
    )
    mixing: MixingConfig = Field(MixingConfig(), description="How several sources are mixed.")
    streaming: bool | StreamingConfig = Field(
        False, description="Read and tokenize while training instead of before it; a block sets chunk and buffer."
    )
    workers: Annotated[int, Ge(0), Le(1024)] = Field(
        2, description="Threads per device that prefetch batches; 0: batches are prepared in the training loop."
    )
    on_error: Literal["stop", "skip"] = Field("stop", description="What to do with a record that cannot be read.")

    @model_validator(mode="after")
    def _blocks_have_their_own_paths(self) -> "DataConfig":
        if not isinstance(self.source, str):
            if not self.source:
                raise contradiction("data.source is an empty list: name at least one block.", "source")
            if self.path is not None:
                raise contradiction(
                    "data.path contradicts a list in data.source: give each block its own path.", "path", "source"
                )
            for number, block in enumerate(self.source):
                if block.path is None and block.source != "chess":  # which generates games
                    raise contradiction(f"data.source[{number}] has no path: give each block its own.", "source")
        return self

    @model_validator(mode="before")
    @classmethod
    def _a_stream_holds_nothing_out(cls, given: Any) -> Any:
        """The default is a share of the sequences, and nobody knows how many a stream has."""
        if isinstance(given, dict) and given.get("streaming") and "validation" not in given:
            return {**given, "validation": 0.0}
        return given

    @model_validator(mode="after")
    def _a_stream_has_no_known_length(self) -> "DataConfig":
        if self.streaming and not isinstance(self.validation, str) and self.validation:
            raise contradiction(
                "data.validation is a fraction of the sequences, and data.streaming does not know how many there are: "
                "give a path, or 0.",
                "validation",
                "streaming",
            )
        if self.streaming and self.mixing.when_exhausted == "end" and not isinstance(self.source, str):
            raise contradiction(
                "data.mixing.when_exhausted end needs the number of sequences, which data.streaming does not know: "
                "use repeat.",
                "mixing",
                "streaming",
            )
        return self

    @property
    def kinds(self) -> "frozenset[str | None]":
        """The sources as far as names tell: None for one whose files have to be looked at."""
        return frozenset(_kind(block) for block, _ in self.blocks())

    def blocks(self) -> "list[tuple[DataConfig, float]]":
        """Each source as a block of its own with its weight: what a block of a mixture leaves out is as here."""
        if isinstance(self.source, str):
            return [(self, 1.0)]
        found = []
        for block in self.source:
            given: dict[str, Any] = {
                key: value for key in DataBlockConfig.model_fields if (value := getattr(block, key)) is not None
            }
            weight = given.pop("weight")
            found.append((self.model_copy(update={"path": None, **given}), weight))
        return found


def _kind(block: DataConfig) -> str | None:
    if block.source != "auto":
        return str(block.source)
    entries = (block.path,) if isinstance(block.path, str) else block.path
    return source_of_name(entries[0]) if entries else None
