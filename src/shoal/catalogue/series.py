"""Shapes of series of published models: what the sizes of one series have in common."""

from shoal.catalogue.model_shape import LatentAttention, ModelShape, RopeScaling, experts


def llama(
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


def llama3(
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
    return llama(
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


def pythia(hidden: int, layers: int, heads: int, vocab: int = 50_304) -> ModelShape:
    """Pythia: the vocabulary is padded for the tensor-parallel ranks of its training, so 6.9b has more."""
    return ModelShape(
        "neox", hidden, layers, heads, heads, 4 * hidden, vocab, 2048, tied=False, rotary_share=0.25, bos=0, eos=0
    )


def qwen(
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


def mixture(
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
        routed=active,
        experts=count,
        model_type=model_type,
    )


def gemma(
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


def like_llama(
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


def olmo2(hidden: int, layers: int, heads: int, kv_heads: int, ffn: int) -> ModelShape:
    """OLMo 2: one norm for the queries of all heads together, and one for the keys."""
    norms = hidden + hidden // heads * kv_heads
    return like_llama(
        "olmo2", hidden, layers, heads, kv_heads, ffn, 100_352, 4096, norm_eps=1e-6, rope_theta=500_000.0, others=norms
    )


def deepseek_v3() -> ModelShape:
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
        routed=8,
        experts=256,
        latent=latent,
        bos=0,
        eos=1,
        model_type="deepseek_v3",
    )


def bert(hidden: int, layers: int, heads: int) -> ModelShape:
    return ModelShape("bert", hidden, layers, heads, heads, 4 * hidden, 30_522, 512, tied=True, norm_eps=1e-12)


def mpt(hidden: int, layers: int, heads: int) -> ModelShape:
    return ModelShape("mpt", hidden, layers, heads, heads, 4 * hidden, 50_368, 2048, tied=True, bos=0, eos=0)


def starcoder2(hidden: int, layers: int, heads: int, kv_heads: int, *, tied: bool = True) -> ModelShape:
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
