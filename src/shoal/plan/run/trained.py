"""What of a model is trained: adapters on frozen layers, or shares of its parameters."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Adapter:
    """LoRA adapters on frozen linear layers."""

    rank: int
    targets: tuple[str, ...]  # names of linear layers of a block, as `blocks.linears` calls them
    quantize: str | None = None  # nf4, fp4, int8, gptq: how the frozen matrices are stored
    double_quantized: bool = False  # the scales of the 4-bit blocks are quantized to 8 bits
    dora: bool = False
    dropout: bool = False  # on the adapters' inputs
    # Everything that is not quantized is upcast to fp32 (PEFT's prepare_model_for_kbit_training), and so is the
    # residual stream.
    upcasts: bool = False


@dataclass(frozen=True)
class Trained:
    """Shares of the model's parameters that are trained."""

    embedding: float = 1.0
    blocks: float = 1.0
    head: float = 1.0
    # Share of the blocks below the first trained parameter: no gradient is computed in them, and nothing saved.
    below: float = 0.0

    @property
    def passed(self) -> float:
        """Share of the blocks that the backward pass goes through."""
        return 1.0 - self.below


EVERYTHING, FROZEN = Trained(), Trained(0.0, 0.0, 0.0)
