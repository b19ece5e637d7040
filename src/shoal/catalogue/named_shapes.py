"""Model shapes of published models, by name. Data only; functions are in `shapes`, families in `families`."""

from shoal.catalogue.earlier_models import EARLIER
from shoal.catalogue.model_shape import ModelShape
from shoal.catalogue.series import (
    bert,
    deepseek_v3,
    gemma,
    like_llama,
    llama,
    llama3,
    mixture,
    mpt,
    olmo2,
    pythia,
    qwen,
    starcoder2,
)

# The base models' config.json on the Hugging Face hub; mpt: llm-foundry's pretraining YAMLs.
NAMED: dict[str, ModelShape] = {
    "gpt2": ModelShape("gpt2", 768, 12, 12, 12, 3072, 50_257, 1024, tied=True, bos=50_256, eos=50_256),
    "pythia-160m": pythia(768, 12, 12),
    "pythia-410m": pythia(1024, 24, 16),
    "pythia-1b": pythia(2048, 16, 8),
    "pythia-2.8b": pythia(2560, 32, 32),
    "pythia-6.9b": pythia(4096, 32, 32, vocab=50_432),
    "tinyllama-1.1b": llama(2048, 22, 32, 4, 5632, 32_000, 2048),
    "smollm2-135m": llama(
        576, 30, 9, 3, 1536, 49_152, 8192, tied=True, rope_theta=100_000.0, initializer_range=1 / 24, bos=0, eos=0
    ),
    "llama2-7b": llama(4096, 32, 32, 32, 11_008, 32_000, 4096),
    "llama2-13b": llama(5120, 40, 40, 40, 13_824, 32_000, 4096),
    "llama2-70b": llama(8192, 80, 64, 8, 28_672, 32_000, 4096),
    "codellama-7b": llama(4096, 32, 32, 32, 11_008, 32_016, 16_384, rope_theta=1e6),
    # The 34b has no infilling, hence Llama 2's own vocabulary.
    "codellama-34b": llama(8192, 48, 64, 8, 22_016, 32_000, 16_384, rope_theta=1e6),
    "llama3-8b": llama3(4096, 32, 32, 14_336, positions=8192),
    "llama3-70b": llama3(8192, 80, 64, 28_672, positions=8192),
    "llama3.1-8b": llama3(4096, 32, 32, 14_336, stretch=8.0),
    "llama3.1-70b": llama3(8192, 80, 64, 28_672, stretch=8.0),
    "llama3.1-405b": llama3(16_384, 126, 128, 53_248, stretch=8.0),
    "llama3.2-1b": llama3(2048, 16, 32, 8192, tied=True, stretch=32.0),
    "llama3.2-3b": llama3(3072, 28, 24, 8192, tied=True, stretch=32.0),
    "llama3.3-70b": llama3(8192, 80, 64, 28_672, stretch=8.0),
    # Version 0.1, the one with the sliding window.
    "mistral-7b": ModelShape(
        "mistral", 4096, 32, 32, 8, 14_336, 32_000, 32_768, tied=False, sliding_window=4096, bos=1, eos=2
    ),
    "qwen2.5-0.5b": qwen("qwen2", 896, 24, 14, 2, 4864, 151_936, 32_768, tied=True),
    "qwen2.5-1.5b": qwen("qwen2", 1536, 28, 12, 2, 8960, 151_936, 131_072, tied=True),
    "qwen2.5-3b": qwen("qwen2", 2048, 36, 16, 2, 11_008, 151_936, 32_768, tied=True),
    "qwen2.5-7b": qwen("qwen2", 3584, 28, 28, 4, 18_944, 152_064, 131_072),
    "qwen2.5-14b": qwen("qwen2", 5120, 48, 40, 8, 13_824, 152_064, 131_072, norm_eps=1e-5),
    "qwen2.5-32b": qwen("qwen2", 5120, 64, 40, 8, 27_648, 152_064, 131_072, norm_eps=1e-5),
    "qwen2.5-72b": qwen("qwen2", 8192, 80, 64, 8, 29_568, 152_064, 131_072, norm_eps=1e-5),
    "qwen3-0.6b": qwen("qwen3", 1024, 28, 16, 8, 3072, 151_936, 40_960, tied=True, head_size=128, eos=151_645),
    "qwen3-1.7b": qwen("qwen3", 2048, 28, 16, 8, 6144, 151_936, 40_960, tied=True, head_size=128, eos=151_645),
    "qwen3-4b": qwen("qwen3", 2560, 36, 32, 8, 9728, 151_936, 40_960, tied=True, head_size=128, eos=151_645),
    "qwen3-8b": qwen("qwen3", 4096, 36, 32, 8, 12_288, 151_936, 40_960, head_size=128, eos=151_645),
    "qwen3-14b": qwen("qwen3", 5120, 40, 40, 8, 17_408, 151_936, 40_960, head_size=128, eos=151_645),
    "qwen3-32b": qwen("qwen3", 5120, 64, 64, 8, 25_600, 151_936, 40_960, head_size=128, eos=151_645),
    # Mixtures of experts and the models below are only forecast by name; training takes them from a folder.
    "qwen3-30b-a3b": mixture(
        "qwen3", 2048, 48, 32, 4, 768, 128, 8, 151_936, 40_960, model_type="qwen3_moe", head_size=128
    ),
    "qwen3-235b-a22b": mixture(
        "qwen3", 4096, 94, 64, 4, 1536, 128, 8, 151_936, 40_960, model_type="qwen3_moe", head_size=128
    ),
    "mixtral-8x7b": mixture(
        "llama", 4096, 32, 32, 8, 14_336, 8, 2, 32_000, 32_768, model_type="mixtral", norm_eps=1e-5
    ),
    "mixtral-8x22b": mixture(
        "llama", 6144, 56, 48, 8, 16_384, 8, 2, 32_000, 65_536, model_type="mixtral", norm_eps=1e-5
    ),
    "deepseek-v3": deepseek_v3(),
    "gemma2-2b": gemma(2, 2304, 26, 8, 4, 9216, 256, 4096),
    "gemma2-9b": gemma(2, 3584, 42, 16, 8, 14_336, 256, 4096),
    "gemma2-27b": gemma(2, 4608, 46, 32, 16, 36_864, 128, 4096),
    # Without the vision tower of the larger ones.
    "gemma3-270m": gemma(3, 640, 18, 4, 1, 2048, 256, 512),
    "gemma3-1b": gemma(3, 1152, 26, 4, 1, 6912, 256, 512),
    "gemma3-4b": gemma(3, 2560, 34, 8, 4, 10_240, 256, 1024),
    "gemma3-12b": gemma(3, 3840, 48, 16, 8, 15_360, 256, 1024),
    "gemma3-27b": gemma(3, 5376, 62, 32, 16, 21_504, 128, 1024),
    "phi3-mini": like_llama("phi3", 3072, 32, 32, 32, 8192, 32_064, 4096),
    "phi3-medium": like_llama("phi3", 5120, 40, 40, 10, 17_920, 32_064, 4096),
    "phi4": like_llama("phi3", 5120, 40, 40, 10, 17_920, 100_352, 16_384, rope_theta=250_000.0),
    "phi4-mini": like_llama("phi3", 3072, 32, 24, 8, 8192, 200_064, 131_072, tied=True, rotary_share=0.75),
    "olmo2-1b": olmo2(2048, 16, 16, 16, 8192),
    "olmo2-7b": olmo2(4096, 32, 32, 32, 11_008),
    "olmo2-13b": olmo2(5120, 40, 40, 40, 13_824),
    "olmo2-32b": olmo2(5120, 64, 40, 8, 27_648),
    "smollm3-3b": like_llama(
        "smollm3", 2048, 36, 16, 4, 11_008, 128_256, 65_536, tied=True, norm_eps=1e-6, rope_theta=5e6
    ),
    "bert-tiny": bert(128, 2, 2),
    "bert-small": bert(512, 4, 8),
    "bert-base": bert(768, 12, 12),
    "bert-large": bert(1024, 24, 16),
    "starcoder2-3b": starcoder2(3072, 30, 24, 2),
    "starcoder2-7b": starcoder2(4608, 32, 36, 4),
    "starcoder2-15b": starcoder2(6144, 40, 48, 4, tied=False),
    "mpt-125m": mpt(768, 12, 12),
    "mpt-350m": mpt(1024, 24, 16),
    "mpt-760m": mpt(1536, 24, 12),
    "mpt-1b": mpt(2048, 24, 16),
    "mpt-3b": mpt(2560, 32, 20),
    "mpt-7b": mpt(4096, 32, 32),
    "mpt-13b": mpt(5120, 40, 40),
    "mpt-30b": mpt(7168, 48, 56),
    "mpt-70b": mpt(8192, 80, 64),
    **EARLIER,
}
