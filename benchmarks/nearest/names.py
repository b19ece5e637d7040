"""The name that `--like` has for what a source ran, where the traits of `nearest` say more about it."""

from shoal.plan.systems.like import NAMES

# By how the names of `nearest` begin; the first that matches.
BEGINNINGS = {
    "huggingface-2024-loop": "transformers",
    "infra-bench": "transformers",
    "transformers": "transformers",
    "plain-loop": "transformers",
    "automodel": "nemo-automodel",
    "atorch": "transformers",
    "llama-recipes": "transformers",
    "yafsdp": "huggingface",
    "huggingface-wide-base": "trl",
    "huggingface": "huggingface",
    "optimum": "huggingface",
    "fms-": "huggingface",
    "gpt-bigcode": "huggingface",
    "oumi": "huggingface",
    "qwen": "huggingface",
    "whynlp-deepspeed": "deepspeed",
    "whynlp": "huggingface",
    "trl": "trl",
    "unsloth": "unsloth",
    "axolotl": "axolotl",
    "xtuner-deepspeed": "deepspeed",
    "deepspeed": "deepspeed",
    "colossal": "colossalai",
    "megatron-deepspeed": "megatron-deepspeed",
    "megatron-zero3": "megatron-deepspeed",
    "megatron": "megatron",
    "flagscale": "megatron",
    "aleph": "megatron",
    "primus": "megatron",
    "lumen": "megatron",
    "fast-llm": "megatron",
    "llama3": "megatron",
    "flash-attention": "megatron",
    "bridge": "megatron-bridge",
    "nemo": "nemo",
    "neox": "gpt-neox",
    "pax": "maxtext",
    "tensorflow": "tensorflow",
    "bert-apex": "nvidia-bert",
    "oneflow": "nvidia-bert",
    "llm.q": "llm.c",
    "olmo-core": "olmo-core",
    "torchtitan": "torchtitan",
    "prime-rl": "torchtitan",
    "benchmark-tp": "torchtitan",
    "lightning-2d": "torchtitan",
    "xtuner": "torchtitan",
    "bionemo": "torchtitan",
    "fms": "torchtitan",
    "idris-fsdp2": "torchtitan",
    "mistral-finetune": "torchtune",
    "lit-gpt": "litgpt",
    "thunder": "litgpt",
    "nanogpt": "nanogpt",
    "nanochat": "nanogpt",
    "modded-nanogpt": "nanogpt",
    "lsai": "pytorch",
    "delta-attention": "transformers",
    "fire-nanogpt-eager": "pytorch",
    "fire-nanogpt": "nanogpt",
    "gollem-plain": "pytorch",
    "gollem": "nanogpt",
    "smol-llama": "nanogpt",
    "compiled-torch": "nanogpt",
}


# Where rows of a system are described by another one's.
OF_SOURCES = {("llama-factory-wiki", "huggingface-2024-03"): "llama-factory"}


def name_of(system: str, source: str = "") -> str:
    """The system that one would ask `--like` for; a loop by hand is `pytorch`."""
    if (source, system) in OF_SOURCES:
        return OF_SOURCES[source, system]
    if (name := system.partition("@")[0]) in NAMES:
        return name
    return next((name for beginning, name in BEGINNINGS.items() if system.startswith(beginning)), "pytorch")
