"""Model shapes, with those of published models. Data only; functions are in `shapes`, families in `families`."""

from dataclasses import dataclass

from shoal.catalogue.families import FAMILIES, Family


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's scaling of the rotary frequencies for sequences longer than in pretraining."""

    factor: float
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_positions: int = 8192


@dataclass(frozen=True)
class ModelShape:
    """All sizes of a model. `head_size` 0 means hidden divided by heads, and is replaced by it."""

    family: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    positions: int
    tied: bool
    head_size: int = 0
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rotary_share: float = 1.0  # of each head's channels, the first ones
    rope_scaling: RopeScaling | None = None
    parallel_residual: bool = True  # attention and MLP read the same input, in families that can
    sliding_window: int | None = None
    sliding_share: float = 1.0  # of the blocks: the others attend to the whole sequence
    initializer_range: float = 0.02
    others: int = 0  # further parameters per block, such as inactive experts
    # None if no tokenizer is known yet: building the model takes them from the tokenizer.
    bos: int | None = None
    eos: int | None = None
    model_type: str = ""  # in transformers, if it is not that of the family

    def __post_init__(self) -> None:
        if not self.model_type:
            object.__setattr__(self, "model_type", FAMILIES[self.family].model_type)
        if not self.head_size:
            object.__setattr__(self, "head_size", self.hidden // self.heads)

    @property
    def traits(self) -> Family:
        """The traits of the family: gating, biases, norms and positions."""
        return FAMILIES[self.family]

    @property
    def query_width(self) -> int:
        """Channels of all query heads together; differs from `hidden` where the head size is set by hand."""
        return self.heads * self.head_size

    @property
    def kv_width(self) -> int:
        """Channels of all key heads together; the values have as many."""
        return self.kv_heads * self.head_size


def _llama(
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    vocab: int,
    positions: int,
    *,
    tied: bool = False,
    rope_theta: float = 10_000.0,
    rope_scaling: RopeScaling | None = None,
    initializer_range: float = 0.02,
    bos: int = 1,
    eos: int = 2,
) -> ModelShape:
    return ModelShape(
        family="llama",
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        vocab=vocab,
        positions=positions,
        tied=tied,
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        initializer_range=initializer_range,
        bos=bos,
        eos=eos,
    )


def _llama3(
    hidden: int,
    layers: int,
    heads: int,
    ffn: int,
    *,
    positions: int = 131_072,
    tied: bool = False,
    stretch: float | None = None,
) -> ModelShape:
    """Llama 3 and after: 8 key-value heads, one vocabulary, and from 3.1 on stretched rotary frequencies."""
    return _llama(
        hidden,
        layers,
        heads,
        8,
        ffn,
        128_256,
        positions,
        tied=tied,
        rope_theta=500_000.0,
        rope_scaling=RopeScaling(stretch) if stretch else None,
        bos=128_000,
        eos=128_001,
    )


def _pythia(hidden: int, layers: int, heads: int, vocab: int = 50_304) -> ModelShape:
    """Pythia: the vocabulary is padded for the tensor-parallel ranks of its training, so 6.9b has more."""
    return ModelShape(
        "neox", hidden, layers, heads, heads, 4 * hidden, vocab, 2048, tied=False, rotary_share=0.25, bos=0, eos=0
    )


def _qwen(
    family: str,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    vocab: int,
    positions: int,
    *,
    tied: bool = False,
    head_size: int = 0,
    norm_eps: float = 1e-6,
    eos: int = 151_643,
) -> ModelShape:
    return ModelShape(
        family,
        hidden,
        layers,
        heads,
        kv_heads,
        ffn,
        vocab,
        positions,
        tied=tied,
        head_size=head_size,
        norm_eps=norm_eps,
        rope_theta=1e6,
        bos=151_643,
        eos=eos,
    )


def _mpt(hidden: int, layers: int, heads: int) -> ModelShape:
    return ModelShape("mpt", hidden, layers, heads, heads, 4 * hidden, 50_368, 2048, tied=True, bos=0, eos=0)


def _starcoder2(hidden: int, layers: int, heads: int, kv_heads: int, *, tied: bool = True) -> ModelShape:
    return ModelShape(
        "starcoder2",
        hidden,
        layers,
        heads,
        kv_heads,
        4 * hidden,
        49_152,
        16_384,
        tied=tied,
        sliding_window=4096,
        bos=0,
        eos=0,
    )


# The base models' config.json on the Hugging Face hub; mpt: llm-foundry's pretraining YAMLs.
NAMED: dict[str, ModelShape] = {
    "gpt2": ModelShape("gpt2", 768, 12, 12, 12, 3072, 50_257, 1024, tied=True, bos=50_256, eos=50_256),
    "pythia-160m": _pythia(768, 12, 12),
    "pythia-410m": _pythia(1024, 24, 16),
    "pythia-1b": _pythia(2048, 16, 8),
    "pythia-2.8b": _pythia(2560, 32, 32),
    "pythia-6.9b": _pythia(4096, 32, 32, vocab=50_432),
    "tinyllama-1.1b": _llama(2048, 22, 32, 4, 5632, 32_000, 2048),
    "smollm2-135m": _llama(
        576, 30, 9, 3, 1536, 49_152, 8192, tied=True, rope_theta=100_000.0, initializer_range=1 / 24, bos=0, eos=0
    ),
    "llama2-7b": _llama(4096, 32, 32, 32, 11_008, 32_000, 4096),
    "llama2-13b": _llama(5120, 40, 40, 40, 13_824, 32_000, 4096),
    "llama2-70b": _llama(8192, 80, 64, 8, 28_672, 32_000, 4096),
    "codellama-7b": _llama(4096, 32, 32, 32, 11_008, 32_016, 16_384, rope_theta=1e6),
    # The 34b has no infilling, hence Llama 2's own vocabulary.
    "codellama-34b": _llama(8192, 48, 64, 8, 22_016, 32_000, 16_384, rope_theta=1e6),
    "llama3-8b": _llama3(4096, 32, 32, 14_336, positions=8192),
    "llama3-70b": _llama3(8192, 80, 64, 28_672, positions=8192),
    "llama3.1-405b": _llama3(16_384, 126, 128, 53_248, stretch=8.0),
    "llama3.2-1b": _llama3(2048, 16, 32, 8192, tied=True, stretch=32.0),
    "llama3.2-3b": _llama3(3072, 28, 24, 8192, tied=True, stretch=32.0),
    # Version 0.1, the one with the sliding window.
    "mistral-7b": ModelShape(
        "mistral", 4096, 32, 32, 8, 14_336, 32_000, 32_768, tied=False, sliding_window=4096, bos=1, eos=2
    ),
    "qwen2.5-0.5b": _qwen("qwen2", 896, 24, 14, 2, 4864, 151_936, 32_768, tied=True),
    "qwen2.5-7b": _qwen("qwen2", 3584, 28, 28, 4, 18_944, 152_064, 131_072),
    "qwen2.5-72b": _qwen("qwen2", 8192, 80, 64, 8, 29_568, 152_064, 131_072, norm_eps=1e-5),
    "qwen3-8b": _qwen("qwen3", 4096, 36, 32, 8, 12_288, 151_936, 40_960, head_size=128, eos=151_645),
    "qwen3-32b": _qwen("qwen3", 5120, 64, 64, 8, 25_600, 151_936, 40_960, head_size=128, eos=151_645),
    "starcoder2-3b": _starcoder2(3072, 30, 24, 2),
    "starcoder2-7b": _starcoder2(4608, 32, 36, 4),
    "starcoder2-15b": _starcoder2(6144, 40, 48, 4, tied=False),
    "mpt-125m": _mpt(768, 12, 12),
    "mpt-350m": _mpt(1024, 24, 16),
    "mpt-760m": _mpt(1536, 24, 12),
    "mpt-1b": _mpt(2048, 24, 16),
    "mpt-3b": _mpt(2560, 32, 20),
    "mpt-7b": _mpt(4096, 32, 32),
    "mpt-13b": _mpt(5120, 40, 40),
    "mpt-30b": _mpt(7168, 48, 56),
    "mpt-70b": _mpt(8192, 80, 64),
}
