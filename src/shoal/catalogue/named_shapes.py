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
class LatentAttention:
    """DeepSeek's attention: queries, and keys with values, are projected down to a vector of low rank and up again."""

    query_rank: int  # 0: queries are one matrix
    kv_rank: int
    plain: int  # channels of each head's queries and keys without rotary positions
    rotated: int  # and with them; all heads share those of the keys
    value: int  # channels of each head's values

    @property
    def head_size(self) -> int:
        """The mean of the channels of keys and values: what attention computes with."""
        return (self.plain + self.rotated + self.value) // 2


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
    latent: LatentAttention | None = None  # in place of the matrices that the heads' sizes imply
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
    def is_family(self) -> bool:
        """Whether it is exactly of its family: others are only forecast, as one of the family with further parts."""
        return self.model_type == self.traits.model_type

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


def experts(
    hidden: int,
    width: int,
    count: int,
    active: int,
    *,
    shared: int = 0,
    layers: int = 1,
    dense_layers: int = 0,
    dense_width: int = 0,
) -> tuple[int, int]:
    """(width of the MLP that one token passes through, further parameters per block) of a mixture of experts.

    Each expert has three matrices; a router chooses `active` of `count`, and `shared` is the width of those that every
    token passes through. In `dense_layers` there is an MLP of `dense_width` instead.
    """
    everything = (layers - dense_layers) * hidden * (3 * (count * width + shared) + count)
    everything += dense_layers * hidden * 3 * dense_width
    # Not more than there is, if most layers have an MLP that is narrower than the active experts.
    ffn = min(active * width + shared, everything // (layers * hidden * 3))
    return ffn, everything // layers - hidden * 3 * ffn


def _mixture(
    family: str,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    width: int,
    count: int,
    active: int,
    vocab: int,
    positions: int,
    *,
    model_type: str,
    head_size: int = 0,
    norm_eps: float = 1e-6,
    rope_theta: float = 1e6,
) -> ModelShape:
    ffn, others = experts(hidden, width, count, active)
    return ModelShape(
        family,
        hidden,
        layers,
        heads,
        kv_heads,
        ffn,
        vocab,
        positions,
        tied=False,
        head_size=head_size,
        norm_eps=norm_eps,
        rope_theta=rope_theta,
        others=others,
        model_type=model_type,
    )


def _gemma(
    version: int, hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, head_size: int, window: int
) -> ModelShape:
    """Gemma 2 and 3: four norms per block; every second or all but every sixth layer has a sliding window."""
    head_norms = 2 * head_size if version == 3 else 0
    small = version == 3 and hidden < 2048
    return ModelShape(
        "llama",
        hidden,
        layers,
        heads,
        kv_heads,
        ffn,
        256_000 if version == 2 else 262_144 if small else 262_208,
        8192 if version == 2 else 32_768 if small else 131_072,
        tied=True,
        head_size=head_size,
        norm_eps=1e-6,
        rope_theta=10_000.0 if version == 2 else 1e6,
        sliding_window=window,
        sliding_share=(layers - layers // (2 if version == 2 else 6)) / layers,
        others=2 * hidden + head_norms,
        bos=2,
        eos=1,
        model_type="gemma2" if version == 2 else "gemma3_text",
    )


def _like_llama(
    model_type: str,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    vocab: int,
    positions: int,
    *,
    tied: bool = False,
    norm_eps: float = 1e-5,
    rope_theta: float = 10_000.0,
    rotary_share: float = 1.0,
    others: int = 0,
) -> ModelShape:
    return ModelShape(
        "llama",
        hidden,
        layers,
        heads,
        kv_heads,
        ffn,
        vocab,
        positions,
        tied=tied,
        norm_eps=norm_eps,
        rope_theta=rope_theta,
        rotary_share=rotary_share,
        others=others,
        model_type=model_type,
    )


def _olmo2(hidden: int, layers: int, heads: int, kv_heads: int, ffn: int) -> ModelShape:
    """OLMo 2: one norm for the queries of all heads together, and one for the keys."""
    norms = hidden + hidden // heads * kv_heads
    return _like_llama(
        "olmo2", hidden, layers, heads, kv_heads, ffn, 100_352, 4096, norm_eps=1e-6, rope_theta=500_000.0, others=norms
    )


def _deepseek_v3() -> ModelShape:
    latent = LatentAttention(query_rank=1536, kv_rank=512, plain=128, rotated=64, value=128)
    ffn, others = experts(7168, 2048, 256, 8, shared=2048, layers=61, dense_layers=3, dense_width=18_432)
    return ModelShape(
        "llama",
        7168,
        61,
        128,
        128,
        ffn,
        129_280,
        163_840,
        tied=False,
        head_size=latent.head_size,
        norm_eps=1e-6,
        others=others,
        latent=latent,
        bos=0,
        eos=1,
        model_type="deepseek_v3",
    )


def _bert(hidden: int, layers: int, heads: int) -> ModelShape:
    return ModelShape("bert", hidden, layers, heads, heads, 4 * hidden, 30_522, 512, tied=True, norm_eps=1e-12)


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
    "llama3.1-8b": _llama3(4096, 32, 32, 14_336, stretch=8.0),
    "llama3.1-70b": _llama3(8192, 80, 64, 28_672, stretch=8.0),
    "llama3.1-405b": _llama3(16_384, 126, 128, 53_248, stretch=8.0),
    "llama3.2-1b": _llama3(2048, 16, 32, 8192, tied=True, stretch=32.0),
    "llama3.2-3b": _llama3(3072, 28, 24, 8192, tied=True, stretch=32.0),
    "llama3.3-70b": _llama3(8192, 80, 64, 28_672, stretch=8.0),
    # Version 0.1, the one with the sliding window.
    "mistral-7b": ModelShape(
        "mistral", 4096, 32, 32, 8, 14_336, 32_000, 32_768, tied=False, sliding_window=4096, bos=1, eos=2
    ),
    "qwen2.5-0.5b": _qwen("qwen2", 896, 24, 14, 2, 4864, 151_936, 32_768, tied=True),
    "qwen2.5-1.5b": _qwen("qwen2", 1536, 28, 12, 2, 8960, 151_936, 131_072, tied=True),
    "qwen2.5-3b": _qwen("qwen2", 2048, 36, 16, 2, 11_008, 151_936, 32_768, tied=True),
    "qwen2.5-7b": _qwen("qwen2", 3584, 28, 28, 4, 18_944, 152_064, 131_072),
    "qwen2.5-14b": _qwen("qwen2", 5120, 48, 40, 8, 13_824, 152_064, 131_072, norm_eps=1e-5),
    "qwen2.5-32b": _qwen("qwen2", 5120, 64, 40, 8, 27_648, 152_064, 131_072, norm_eps=1e-5),
    "qwen2.5-72b": _qwen("qwen2", 8192, 80, 64, 8, 29_568, 152_064, 131_072, norm_eps=1e-5),
    "qwen3-0.6b": _qwen("qwen3", 1024, 28, 16, 8, 3072, 151_936, 40_960, tied=True, head_size=128, eos=151_645),
    "qwen3-1.7b": _qwen("qwen3", 2048, 28, 16, 8, 6144, 151_936, 40_960, tied=True, head_size=128, eos=151_645),
    "qwen3-4b": _qwen("qwen3", 2560, 36, 32, 8, 9728, 151_936, 40_960, tied=True, head_size=128, eos=151_645),
    "qwen3-8b": _qwen("qwen3", 4096, 36, 32, 8, 12_288, 151_936, 40_960, head_size=128, eos=151_645),
    "qwen3-14b": _qwen("qwen3", 5120, 40, 40, 8, 17_408, 151_936, 40_960, head_size=128, eos=151_645),
    "qwen3-32b": _qwen("qwen3", 5120, 64, 64, 8, 25_600, 151_936, 40_960, head_size=128, eos=151_645),
    # Mixtures of experts and the models below are only forecast by name; training takes them from a folder.
    "qwen3-30b-a3b": _mixture(
        "qwen3", 2048, 48, 32, 4, 768, 128, 8, 151_936, 40_960, model_type="qwen3_moe", head_size=128
    ),
    "qwen3-235b-a22b": _mixture(
        "qwen3", 4096, 94, 64, 4, 1536, 128, 8, 151_936, 40_960, model_type="qwen3_moe", head_size=128
    ),
    "mixtral-8x7b": _mixture(
        "llama", 4096, 32, 32, 8, 14_336, 8, 2, 32_000, 32_768, model_type="mixtral", norm_eps=1e-5
    ),
    "mixtral-8x22b": _mixture(
        "llama", 6144, 56, 48, 8, 16_384, 8, 2, 32_000, 65_536, model_type="mixtral", norm_eps=1e-5
    ),
    "deepseek-v3": _deepseek_v3(),
    "gemma2-2b": _gemma(2, 2304, 26, 8, 4, 9216, 256, 4096),
    "gemma2-9b": _gemma(2, 3584, 42, 16, 8, 14_336, 256, 4096),
    "gemma2-27b": _gemma(2, 4608, 46, 32, 16, 36_864, 128, 4096),
    # Without the vision tower of the larger ones.
    "gemma3-270m": _gemma(3, 640, 18, 4, 1, 2048, 256, 512),
    "gemma3-1b": _gemma(3, 1152, 26, 4, 1, 6912, 256, 512),
    "gemma3-4b": _gemma(3, 2560, 34, 8, 4, 10_240, 256, 1024),
    "gemma3-12b": _gemma(3, 3840, 48, 16, 8, 15_360, 256, 1024),
    "gemma3-27b": _gemma(3, 5376, 62, 32, 16, 21_504, 128, 1024),
    "phi3-mini": _like_llama("phi3", 3072, 32, 32, 32, 8192, 32_064, 4096),
    "phi3-medium": _like_llama("phi3", 5120, 40, 40, 10, 17_920, 32_064, 4096),
    "phi4": _like_llama("phi3", 5120, 40, 40, 10, 17_920, 100_352, 16_384, rope_theta=250_000.0),
    "phi4-mini": _like_llama("phi3", 3072, 32, 24, 8, 8192, 200_064, 131_072, tied=True, rotary_share=0.75),
    "olmo2-1b": _olmo2(2048, 16, 16, 16, 8192),
    "olmo2-7b": _olmo2(4096, 32, 32, 32, 11_008),
    "olmo2-13b": _olmo2(5120, 40, 40, 40, 13_824),
    "olmo2-32b": _olmo2(5120, 64, 40, 8, 27_648),
    "smollm3-3b": _like_llama(
        "smollm3", 2048, 36, 16, 4, 11_008, 128_256, 65_536, tied=True, norm_eps=1e-6, rope_theta=5e6
    ),
    "bert-tiny": _bert(128, 2, 2),
    "bert-small": _bert(512, 4, 8),
    "bert-base": _bert(768, 12, 12),
    "bert-large": _bert(1024, 24, 16),
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
