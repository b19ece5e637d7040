"""The blocks `model`, `adapter` and `data`."""

import re
from typing import Annotated, Literal

from annotated_types import Ge, Le
from pydantic import Field, Strict, model_validator

from shoal.catalogue.families import BUILDABLE, FAMILIES, listed
from shoal.catalogue.shapes import ModelShape, find_shape, shape_from_sizes
from shoal.config.schema_base import (
    MOST_IN_SIZE,
    Block,
    Layers,
    Positive,
    ShareBelowOne,
    Size,
    Texts,
    contradiction,
    spelled,
)
from shoal.mistakes import UserMistake

Attention = Annotated[
    Literal["auto", "sdpa", "flex", "flash", "eager"],
    spelled(
        ("auto", "sdpa", "flex", "flash", "eager"),
        {"flash_attention_2": "flash", "flash_attention_3": "flash", "flex_attention": "flex"},
    ),
]
Quantization = Annotated[
    Literal["nf4", "fp4", "int8"],
    spelled(("nf4", "fp4", "int8"), {"bnb.nf4": "nf4", "bnb.fp4": "fp4", "bnb.int8": "int8"}),
]
SourceName = Annotated[
    Literal["json", "text", "parquet", "csv", "hf", "tokens", "chess", "cells"],
    spelled(
        ("json", "text", "parquet", "csv", "hf", "tokens", "chess", "cells"),
        {"jsonl": "json", "txt": "text", "huggingface": "hf"},
    ),
]
RecordFormat = Literal["auto", "alpaca", "chat", "completion", "text"]


_DESCRIBED = [f"{name} ({models})" if (models := FAMILIES[name].models) else name for name in BUILDABLE]


class ShapeConfig(Block):
    """Explicit dimensions of a randomly initialized model."""

    family: str = Field("llama", description=f"Architecture: {listed(_DESCRIBED)}.")
    hidden: Size = Field(256, description="Hidden size.")
    layers: Layers = Field(4, description="Number of transformer layers.")
    heads: Size = Field(8, description="Number of attention heads; must divide hidden.")
    kv_heads: Size | None = Field(None, description="Number of key/value heads; must divide heads; default: heads.")
    ffn: Size | None = Field(
        None,
        description="Intermediate size of the feed-forward layers; default: 4 × hidden, or 8/3 × hidden rounded up "
        "to a multiple of 64 where they are gated.",
    )
    vocab: Size = Field(512, description="Vocabulary size.")
    positions: Size = Field(1024, description="Maximum sequence length of the model.")
    tied: bool = Field(True, description="Whether the head (lm_head) shares its weights with the embedding.")

    @model_validator(mode="after")
    def _sizes_agree(self) -> "ShapeConfig":
        try:
            self.named()
        except UserMistake as mistake:
            raise contradiction(f"model.shape: {mistake}", *self._blamed(str(mistake))) from None
        return self

    def named(self) -> ModelShape:
        """The same dimensions as a catalogue entry."""
        sizes = self.model_dump()
        return shape_from_sizes(sizes.pop("family"), **sizes)

    def _blamed(self, sentence: str) -> list[str]:
        """The keys named in a sentence, for its line number."""
        named = [key for key in ("kv_heads", "heads", "hidden", "family") if re.search(rf"\b{key}\b", sentence)]
        return [key for key in named if key in self.model_fields_set] or named


class ModelConfig(Block):
    """The model to train."""

    from_: str | None = Field(
        None,
        alias="from",
        description="Weights and tokenizer to start from: a folder, or an id in the local Hugging Face cache.",
    )
    shape: str | ShapeConfig | None = Field(
        None, description="Instead of from: random weights of a named shape or of explicit dimensions."
    )
    tokenizer: str | None = Field(
        None, description="A folder, a cached id, or bytes or chess (both built in); default: the model's own."
    )
    attention: Attention = Field("auto", description="Attention implementation; auto: the fastest that is available.")
    dropout: ShareBelowOne | None = Field(
        None, description="Dropout probability of every dropout the model has; null: as in its config."
    )
    freeze: Texts = Field((), description="Patterns of parameter names to freeze.")
    add_tokens: Texts = Field((), description="Tokens to add to the vocabulary; the embedding is resized.")

    @model_validator(mode="after")
    def _the_shape_is_known(self) -> "ModelConfig":
        if isinstance(self.shape, str):
            try:
                find_shape(self.shape)
            except UserMistake as mistake:
                raise contradiction(str(mistake), "shape") from None
        return self

    @model_validator(mode="after")
    def _not_two_origins(self) -> "ModelConfig":
        if self.from_ is not None and self.shape is not None:
            raise contradiction(
                "model.from and model.shape contradict each other: set one of them to null.", "shape", "from"
            )
        return self


class AdapterConfig(Block):
    """Low-rank adapters on a frozen model (LoRA and its variants)."""

    kind: Literal["none", "lora", "qlora"] = Field(
        "none",
        description="none: train the model itself; lora: train an adapter; qlora: the same on a quantized model.",
    )
    rank: Size = Field(8, description="Rank of the adapter.")
    alpha: Positive = Field(16.0, description="Scaling factor of the adapter's output, divided by the rank.")
    dropout: ShareBelowOne = Field(0.0, description="Dropout on the adapter's inputs.")
    targets: Literal["auto"] | Texts = Field(
        "auto", description="Linear layers that get an adapter, by name; auto: all in the transformer layers."
    )
    quantize: Quantization = Field("nf4", description="Data type of qlora's frozen weights.")
    dora: bool = Field(False, description="Also train the magnitude of each weight column (DoRA).")
    rslora: bool = Field(False, description="Divide alpha by the square root of the rank (rsLoRA).")
    train_also: Texts = Field((), description="Patterns of parameters outside the adapter to train as well.")


class StreamingConfig(Block):
    """Reading data that is not tokenized before training."""

    chunk: Size = Field(10_000, description="Records read and tokenized at a time.")
    shuffle_buffer: Size = Field(50_000, description="Records in the shuffle buffer.")


class DataBlockConfig(Block):
    """One source of a mixture."""

    source: SourceName = Field("json", description="The kind of file.")
    path: str | None = Field(None, description="File, folder or pattern to read.")
    format: RecordFormat = Field("auto", description="Format of the records.")
    weight: Positive = Field(1.0, description="Sampling weight of this source, relative to the others.")


class DataConfig(Block):
    """The training data."""

    source: SourceName | Annotated[tuple[DataBlockConfig, ...], Strict(False)] = Field(
        "json", description="The kind of file, or a list of blocks with source, path, format and weight."
    )
    path: str | Texts | None = Field(
        None,
        description="File, folder or pattern to read, or a list of these; source chess without a path generates games.",
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
    max_length: Annotated[int, Ge(2), Le(MOST_IN_SIZE)] = Field(
        2048, description="Maximum sequence length in tokens; longer instructions are truncated, longer texts split."
    )
    pack: bool | Literal["auto"] = Field(
        "auto",
        description="Pack documents into full sequences: instructions do not attend to each other, plain text is one "
        "continuous stream. auto: instructions only for models that keep them apart (docs/models.md).",
    )
    train_on: Literal["all", "answers", "last"] = Field(
        "answers", description="Which tokens count in the loss: all, the answers, or the last answer of a chat."
    )
    chat_template: str | None = Field(None, description="A Jinja chat template to use instead of the tokenizer's own.")
    validation: ShareBelowOne | str = Field(
        0.02, description="Validation data: the fraction of sequences to hold out (0: none), or a path."
    )
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
        return self
