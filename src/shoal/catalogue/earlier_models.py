"""Further model shapes by name: models before Llama 3 and beside it, many of which published runs are of.

From their config.json on the Hugging Face hub, GPT-3's and Nemotron-4's from the tables of their papers.
"""

from shoal.catalogue.model_shape import ModelShape
from shoal.catalogue.series import like_llama, llama, pythia, qwen


def gpt(hidden: int, layers: int, heads: int, positions: int) -> ModelShape:
    """GPT-2 and GPT-3, whose alternate layers with sparse attention are counted as dense ones."""
    return ModelShape(
        "gpt2", hidden, layers, heads, heads, 4 * hidden, 50_257, positions, tied=True, bos=50_256, eos=50_256
    )


def mistral(
    hidden: int,
    layers: int,
    ffn: int,
    vocab: int,
    positions: int,
    *,
    rope_theta: float = 1e6,
) -> ModelShape:
    """Mistral after version 0.1: 32 heads of 128 channels whatever the hidden size."""
    return ModelShape(
        "mistral",
        hidden,
        layers,
        32,
        8,
        ffn,
        vocab,
        positions,
        tied=False,
        head_size=128,
        rope_theta=rope_theta,
        bos=1,
        eos=2,
    )


def decoder(
    family: str, hidden: int, layers: int, heads: int, vocab: int, *, kv_heads: int = 0, positions: int = 2048
) -> ModelShape:
    """Decoders whose MLP has four times the hidden size and whose embeddings are tied."""
    return ModelShape(family, hidden, layers, heads, kv_heads or heads, 4 * hidden, vocab, positions, tied=True)


def gated(
    family: str,
    hidden: int,
    layers: int,
    heads: int,
    ffn: int,
    vocab: int,
    positions: int = 4096,
    *,
    kv_heads: int = 0,
    norm_eps: float = 1e-6,
    rope_theta: float = 10_000.0,
) -> ModelShape:
    """Decoders like Llama by layers of other names: Qwen, Baichuan 2, InternLM 2, StableLM."""
    return ModelShape(
        family,
        hidden,
        layers,
        heads,
        kv_heads or heads,
        ffn,
        vocab,
        positions,
        tied=False,
        norm_eps=norm_eps,
        rope_theta=rope_theta,
    )


def phi(hidden: int, layers: int, rotary_share: float) -> ModelShape:
    return ModelShape("phi", hidden, layers, 32, 32, 4 * hidden, 51_200, 2048, tied=False, rotary_share=rotary_share)


def nemotron(hidden: int, layers: int, heads: int) -> ModelShape:
    return ModelShape("nemotron", hidden, layers, heads, 8, 4 * hidden, 256_000, 4096, tied=False, rotary_share=0.5)


def gemma(hidden: int, layers: int, heads: int, kv_heads: int, ffn: int) -> ModelShape:
    """Gemma 1, which is a Llama with wide heads and another activation function."""
    return ModelShape(
        "llama",
        hidden,
        layers,
        heads,
        kv_heads,
        ffn,
        256_000,
        8192,
        tied=True,
        head_size=256,
        norm_eps=1e-6,
        model_type="gemma",
    )


def encoder(
    family: str,
    hidden: int,
    layers: int,
    heads: int,
    vocab: int,
    *,
    positions: int = 514,
    model_type: str = "",
    outside: int = 0,
) -> ModelShape:
    return ModelShape(
        family,
        hidden,
        layers,
        heads,
        heads,
        4 * hidden,
        vocab,
        positions,
        tied=True,
        outside=outside,
        model_type=model_type,
    )


def esm2(hidden: int, layers: int, heads: int) -> ModelShape:
    """ESM-2: its second head, which predicts contacts, has a weight for every head of every layer."""
    return encoder("esm", hidden, layers, heads, 33, positions=1026, outside=layers * heads + 1)


EARLIER: dict[str, ModelShape] = {
    "gpt2-medium": gpt(1024, 24, 16, 1024),
    "gpt2-large": gpt(1280, 36, 20, 1024),
    "gpt2-xl": gpt(1600, 48, 25, 1024),
    # As in table 2.1 of the paper, but for the 1.3b's 24 heads of 128 channels and the 13b's width of 5140, which are
    # not possible together with its other sizes: 16 heads and 5120, as in all models after it.
    "gpt3-125m": gpt(768, 12, 12, 2048),
    "gpt3-350m": gpt(1024, 24, 16, 2048),
    "gpt3-760m": gpt(1536, 24, 16, 2048),
    "gpt3-1.3b": gpt(2048, 24, 16, 2048),
    "gpt3-2.7b": gpt(2560, 32, 32, 2048),
    "gpt3-6.7b": gpt(4096, 32, 32, 2048),
    "gpt3-13b": gpt(5120, 40, 40, 2048),
    "gpt3-175b": gpt(12_288, 96, 96, 2048),
    "gpt-neo-1.3b": decoder("gpt_neo", 2048, 24, 16, 50_257),
    "gpt-neo-2.7b": decoder("gpt_neo", 2560, 32, 20, 50_257),
    "gpt-j-6b": ModelShape("gptj", 4096, 28, 16, 16, 16_384, 50_400, 2048, tied=False, rotary_share=0.25),
    "gpt-neox-20b": pythia(6144, 44, 64, vocab=50_432),
    "pythia-70m": pythia(512, 6, 8),
    "pythia-1.4b": pythia(2048, 24, 16),
    "pythia-12b": pythia(5120, 36, 40, vocab=50_688),
    # Without the 350m, whose embeddings are narrower than its blocks.
    "opt-125m": decoder("opt", 768, 12, 12, 50_272),
    "opt-1.3b": decoder("opt", 2048, 24, 32, 50_272),
    "opt-2.7b": decoder("opt", 2560, 32, 32, 50_272),
    "opt-6.7b": decoder("opt", 4096, 32, 32, 50_272),
    "opt-13b": decoder("opt", 5120, 40, 40, 50_272),
    "opt-30b": decoder("opt", 7168, 48, 56, 50_272),
    "opt-66b": decoder("opt", 9216, 64, 72, 50_272),
    "bloom-560m": decoder("bloom", 1024, 24, 16, 250_880),
    "bloom-1b1": decoder("bloom", 1536, 24, 16, 250_880),
    "bloom-1b7": decoder("bloom", 2048, 24, 16, 250_880),
    "bloom-3b": decoder("bloom", 2560, 30, 32, 250_880),
    "bloom-7b1": decoder("bloom", 4096, 30, 32, 250_880),
    "bloom-176b": decoder("bloom", 14_336, 70, 112, 250_880),
    "falcon-7b": decoder("falcon", 4544, 32, 71, 65_024, kv_heads=1),
    "falcon-40b": ModelShape("falcon", 8192, 60, 128, 8, 32_768, 65_024, 2048, tied=True, shared_norm=False),
    "llama-7b": llama(4096, 32, 32, 32, 11_008, 32_000, 2048),
    "llama-13b": llama(5120, 40, 40, 40, 13_824, 32_000, 2048),
    "llama-30b": llama(6656, 60, 52, 52, 17_920, 32_000, 2048),
    "llama-65b": llama(8192, 80, 64, 64, 22_016, 32_000, 2048),
    "open-llama-3b": llama(3200, 26, 32, 32, 8640, 32_000, 2048),
    "codellama-13b": llama(5120, 40, 40, 40, 13_824, 32_016, 16_384, rope_theta=1e6),
    "codellama-70b": llama(8192, 80, 64, 8, 28_672, 32_016, 16_384, rope_theta=1e6),
    "mistral-7b-v0.3": mistral(4096, 32, 14_336, 32_768, 32_768),
    "mistral-nemo-12b": mistral(5120, 40, 14_336, 131_072, 131_072),
    "mistral-small-24b": mistral(5120, 40, 32_768, 131_072, 32_768, rope_theta=1e8),
    "ministral-8b": mistral(4096, 36, 12_288, 131_072, 32_768, rope_theta=1e8),
    "yi-6b": llama(4096, 32, 32, 4, 11_008, 64_000, 4096, rope_theta=5e6),
    "yi-34b": llama(7168, 60, 56, 8, 20_480, 64_000, 4096, rope_theta=5e6),
    "qwen-1.8b": gated("qwen", 2048, 24, 16, 5504, 151_936, 8192),
    "qwen-7b": gated("qwen", 4096, 32, 32, 11_008, 151_936, 8192),
    "qwen-14b": gated("qwen", 5120, 40, 40, 13_696, 152_064, 8192),
    "qwen-72b": gated("qwen", 8192, 80, 64, 24_576, 152_064, 32_768, rope_theta=1e6),
    "qwen2-0.5b": qwen("qwen2", 896, 24, 14, 2, 4864, 151_936, 131_072, tied=True),
    "qwen2-1.5b": qwen("qwen2", 1536, 28, 12, 2, 8960, 151_936, 131_072, tied=True),
    "qwen2-7b": qwen("qwen2", 3584, 28, 28, 4, 18_944, 152_064, 131_072),
    "qwen2-72b": qwen("qwen2", 8192, 80, 64, 8, 29_568, 152_064, 131_072),
    "gemma-2b": gemma(2048, 18, 8, 1, 16_384),
    "gemma-7b": gemma(3072, 28, 16, 16, 24_576),
    "phi-1.5": phi(2048, 24, 0.5),
    "phi-2": phi(2560, 32, 0.4),
    "stablelm-3b": gated("stablelm", 2560, 32, 32, 6912, 50_304, norm_eps=1e-5),
    "starcoder-15b": decoder("gpt_bigcode", 6144, 40, 48, 49_152, kv_heads=1, positions=8192),
    "santacoder": decoder("gpt_bigcode", 2048, 24, 16, 49_280, kv_heads=1),
    "smollm2-360m": llama(960, 32, 15, 5, 2560, 49_152, 8192, tied=True, rope_theta=100_000.0, bos=0, eos=0),
    "smollm2-1.7b": llama(2048, 24, 32, 32, 8192, 49_152, 8192, tied=True, rope_theta=130_000.0, bos=0, eos=0),
    "internlm2-7b": gated("internlm2", 4096, 32, 32, 14_336, 92_544, 32_768, kv_heads=8, norm_eps=1e-5, rope_theta=1e6),
    "internlm2-20b": gated(
        "internlm2", 6144, 48, 48, 16_384, 92_544, 32_768, kv_heads=8, norm_eps=1e-5, rope_theta=1e6
    ),
    # The 13b has ALiBi in place of rotary embeddings, and is forecast with these.
    "baichuan2-7b": gated("baichuan", 4096, 32, 32, 11_008, 125_696),
    "baichuan2-13b": gated("baichuan", 5120, 40, 40, 13_696, 125_696),
    "deepseek-llm-7b": like_llama("llama", 4096, 30, 32, 32, 11_008, 102_400, 4096, norm_eps=1e-6),
    "deepseek-llm-67b": like_llama("llama", 8192, 95, 64, 8, 22_016, 102_400, 4096, norm_eps=1e-6),
    # Without the linear scaling of their rotary embeddings to four times 4096 positions.
    "deepseek-coder-1.3b": like_llama(
        "llama", 2048, 24, 16, 16, 5504, 32_256, 16_384, norm_eps=1e-6, rope_theta=100_000.0
    ),
    "deepseek-coder-6.7b": like_llama(
        "llama", 4096, 32, 32, 32, 11_008, 32_256, 16_384, norm_eps=1e-6, rope_theta=100_000.0
    ),
    "deepseek-coder-33b": like_llama(
        "llama", 7168, 62, 56, 8, 19_200, 32_256, 16_384, norm_eps=1e-6, rope_theta=100_000.0
    ),
    "nemotron4-15b": nemotron(6144, 32, 48),
    "nemotron4-340b": nemotron(18_432, 96, 96),
    "distilbert-base": encoder("distilbert", 768, 6, 12, 30_522, positions=512),
    "roberta-base": encoder("roberta", 768, 12, 12, 50_265),
    "roberta-large": encoder("roberta", 1024, 24, 16, 50_265),
    "xlm-roberta-base": encoder("roberta", 768, 12, 12, 250_002, model_type="xlm-roberta"),
    "xlm-roberta-large": encoder("roberta", 1024, 24, 16, 250_002, model_type="xlm-roberta"),
    "esm2-150m": esm2(640, 30, 20),
    "esm2-650m": esm2(1280, 33, 20),
    "esm2-3b": esm2(2560, 36, 40),
}
