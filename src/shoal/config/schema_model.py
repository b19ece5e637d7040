"""The blocks `model` and `adapter`."""

import re
from collections import Counter
from typing import Annotated, Literal

from pydantic import Field, model_validator

from shoal.catalogue.families import BUILDABLE, FAMILIES, listed
from shoal.catalogue.shapes import ModelShape, find_shape, shape_from_sizes
from shoal.config.schema_base import (
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
    Literal["nf4", "nf4-dq", "bnb.nf4", "bnb.nf4-dq", "fp4", "fp4-dq", "int8"],
    spelled(("nf4", "nf4-dq", "bnb.nf4", "bnb.nf4-dq", "fp4", "fp4-dq", "int8")),
]
_DESCRIBED = [f"{name} ({models})" if (models := FAMILIES[name].models) else name for name in BUILDABLE]


class ShapeConfig(Block):
    """Explicit dimensions of a randomly initialized model."""

    family: str = Field("llama", description=f"Architecture: {listed(_DESCRIBED)}.")
    hidden: Size = Field(256, description="Hidden size.")
    layers: Layers = Field(4, description="Number of transformer layers.")
    heads: Size = Field(8, description="Number of attention heads; must divide hidden.")
    kv_heads: Size | None = Field(None, description="Number of key/value heads; must divide heads; default: heads.")
    head_size: Size | None = Field(
        None,
        description="Channels of each head, if other than hidden / heads: family llama, mistral or qwen3; default: "
        "hidden / heads.",
    )
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
        named = [
            key for key in ("head_size", "kv_heads", "heads", "hidden", "family") if re.search(rf"\b{key}\b", sentence)
        ]
        return [key for key in named if key in self.model_fields_set] or named


class ModelConfig(Block):
    """The model to train."""

    from_: str | None = Field(
        None,
        alias="from",
        description="Weights and tokenizer to start from: a folder, a run, or an id in the local Hugging Face cache.",
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
    add_tokens: Texts = Field(
        (),
        description="Tokens to add to the vocabulary, such as those of a chat template; embedding and head get a row "
        "for each, which starts as the mean of the others.",
    )

    @model_validator(mode="after")
    def _the_shape_is_known(self) -> "ModelConfig":
        if isinstance(self.shape, str):
            try:
                find_shape(self.shape)
            except UserMistake as mistake:
                raise contradiction(str(mistake), "shape") from None
        return self

    @model_validator(mode="after")
    def _each_token_once(self) -> "ModelConfig":
        if "" in self.add_tokens:
            raise contradiction("model.add_tokens: a token must not be empty; leave it out.", "add_tokens")
        if repeated := [token for token, count in Counter(self.add_tokens).items() if count > 1]:
            raise contradiction(f"model.add_tokens lists {repeated[0]} more than once; list it once.", "add_tokens")
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
    from_: str | None = Field(
        None,
        alias="from",
        description="An adapter in PEFT's format to start from: a folder, or an id in the local Hugging Face cache; "
        "rank, alpha, targets, dora, rslora and train_also are then the file's.",
    )
    rank: Size = Field(8, description="Rank of the adapter.")
    alpha: Positive = Field(16.0, description="Scaling factor of the adapter's output, divided by the rank.")
    dropout: ShareBelowOne = Field(0.0, description="Dropout on the adapter's inputs.")
    targets: Literal["auto", "all-linear"] | Texts = Field(
        "auto",
        description="Linear layers that get an adapter, by name or pattern; auto and all-linear: all in the "
        "transformer layers.",
    )
    quantize: Quantization = Field(
        "nf4",
        description="Data type of qlora's frozen weights; -dq: with double quantization; bnb: with bitsandbytes' "
        "kernels; int8: bitsandbytes' 8-bit layers.",
    )
    dora: bool = Field(False, description="Also train the magnitude of each weight column (DoRA).")
    rslora: bool = Field(False, description="Divide alpha by the square root of the rank (rsLoRA).")
    train_also: Texts = Field(
        (), description="Parameters of the base model to train as well: patterns of their names, or of their modules'."
    )
