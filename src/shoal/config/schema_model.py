"""What is trained and on what: the blocks `model`, `adapter` and `data`."""

import re
from typing import Annotated, Literal

from annotated_types import Ge
from pydantic import Field, Strict, model_validator

from shoal.catalogue.shapes import ModelShape, find_shape, shape_from_sizes
from shoal.config.schema_base import (
    Block,
    Count,
    CountOrZero,
    Positive,
    ShareBelowOne,
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
RowFormat = Literal["auto", "alpaca", "chat", "completion", "text"]


class ShapeConfig(Block):
    """Explicit sizes of a model that starts from random weights."""

    family: str = Field(
        "llama", description="The architecture: llama, mistral, qwen2, qwen3, neox (Pythia), gpt2 or bert."
    )
    hidden: Count = Field(256, description="Width of the hidden state.")
    layers: Count = Field(4, description="Number of transformer blocks.")
    heads: Count = Field(8, description="Number of attention heads; divides hidden.")
    kv_heads: Count | None = Field(
        None, description="Number of key and value heads; divides heads; default: as many as heads."
    )
    ffn: Count | None = Field(
        None,
        description="Width of the feed-forward layer; default: 4 times hidden, or where it is gated 8/3 of hidden, "
        "rounded up to a multiple of 64.",
    )
    vocab: Count = Field(512, description="Number of tokens in the vocabulary.")
    positions: Count = Field(1024, description="Longest sequence the model can take.")
    tied: bool = Field(True, description="Whether the output head shares its weights with the embedding.")

    @model_validator(mode="after")
    def _sizes_agree(self) -> "ShapeConfig":
        try:
            self.named()
        except UserMistake as mistake:
            raise contradiction(f"model.shape: {mistake}", *self._blamed(str(mistake))) from None
        return self

    def named(self) -> ModelShape:
        """The same sizes as the catalogue holds them."""
        sizes = self.model_dump()
        return shape_from_sizes(sizes.pop("family"), **sizes)

    def _blamed(self, sentence: str) -> list[str]:
        """The keys that a sentence speaks of, for its line number."""
        named = [key for key in ("kv_heads", "heads", "hidden", "family") if re.search(rf"\b{key}\b", sentence)]
        return [key for key in named if key in self.model_fields_set] or named


class ModelConfig(Block):
    """Which model is trained."""

    from_: str | None = Field(
        None,
        alias="from",
        description="Weights and tokenizer to start from: a folder, or an id that is in the local Hugging Face cache.",
    )
    shape: str | ShapeConfig | None = Field(
        None, description="Instead of from: random weights, from a named shape or from explicit sizes."
    )
    tokenizer: str | None = Field(
        None, description="A folder, a cached id, or bytes or chess (both built in); default: the model's own."
    )
    attention: Attention = Field(
        "auto", description="How attention is computed; auto takes the fastest that works here."
    )
    freeze: Texts = Field((), description="Patterns of parameter names that are not trained.")
    add_tokens: Texts = Field((), description="Tokens added to the vocabulary; the embeddings grow with them.")

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
    """Small trained additions to a frozen model (LoRA and its kin)."""

    kind: Literal["none", "lora", "qlora"] = Field(
        "none", description="none trains the model itself; lora trains an adapter; qlora also quantizes the model."
    )
    rank: Count = Field(8, description="Inner width of the adapter.")
    alpha: Positive = Field(16.0, description="Scale of the adapter's output, before division by the rank.")
    dropout: ShareBelowOne = Field(0.0, description="Share of the adapter's inputs dropped while training.")
    targets: Literal["auto"] | Texts = Field(
        "auto", description="Names of the linear layers that get an adapter; auto: all of those in the blocks."
    )
    quantize: Quantization = Field("nf4", description="How qlora stores the frozen weights.")
    dora: bool = Field(False, description="Also train the magnitude of each weight column (DoRA).")
    rslora: bool = Field(False, description="Divide by the square root of the rank instead of the rank.")
    train_also: Texts = Field((), description="Patterns of parameters outside the adapter that are trained as well.")


class StreamingConfig(Block):
    """How data is read when it is not tokenized ahead."""

    chunk: Count = Field(10_000, description="Rows read and tokenized at a time.")
    shuffle_buffer: Count = Field(50_000, description="Rows held in memory to draw from at random.")


class DataBlockConfig(Block):
    """One of several sources that are mixed."""

    source: SourceName = Field("json", description="The kind of file.")
    path: str | None = Field(None, description="File, folder or pattern to read.")
    format: RowFormat = Field("auto", description="What a row looks like.")
    weight: Positive = Field(1.0, description="How often rows of this source are drawn, relative to the others.")


class DataConfig(Block):
    """What the model is trained on."""

    source: SourceName | Annotated[tuple[DataBlockConfig, ...], Strict(False)] = Field(
        "json", description="The kind of file, or a list of blocks with source, path, format and weight."
    )
    path: str | Texts | None = Field(
        None,
        description="File, folder or pattern to read, or a list of these; chess without one plays its own games.",
    )
    games: Count = Field(12_000, description="How many games are played for source chess without a path.")
    plies: Count = Field(42, description="After how many plies (moves of one side) a game that is played is cut.")
    player: Literal["quick", "stockfish"] = Field(
        "quick",
        description="Who plays: quick looks one move ahead, hundreds of games a second; stockfish, where installed, "
        "plays far better and about forty times slower.",
    )
    format: RowFormat = Field("auto", description="What a row looks like; auto looks at the first row.")
    max_length: Annotated[int, Ge(2)] = Field(2048, description="Tokens in a row; longer texts are cut.")
    pack: bool = Field(
        True,
        description="Fill rows: instructions share a row and do not see each other; plain text runs on over row ends.",
    )
    train_on: Literal["all", "answers", "last"] = Field(
        "answers", description="Which tokens count in the loss: all, the answers, or the last answer of a chat."
    )
    chat_template: str | None = Field(None, description="A Jinja chat template to use instead of the tokenizer's own.")
    validation: ShareBelowOne | str = Field(
        0.02, description="What is held out for evaluation: a share of the data (0 for none), or a path."
    )
    streaming: bool | StreamingConfig = Field(
        False, description="Read and tokenize while training instead of before it; a block sets chunk and buffer."
    )
    workers: CountOrZero = Field(
        2, description="Threads that prepare batches ahead, for each device; 0: the training loop does."
    )
    on_error: Literal["stop", "skip"] = Field("stop", description="What happens at a row that cannot be read.")

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
