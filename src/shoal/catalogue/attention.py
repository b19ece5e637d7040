"""Which of torch's attention kernels runs where, as facts: training selects by them and the forecast counts by them.

Fused kernels compute the scores tile by tile and store none. Flash attention and cuDNN support half precision, grouped
keys and dropout, and no mask; flash attention also a sliding window. The memory-efficient kernel supports fp32, dense
masks and a sliding window too, but not grouped keys, which must be repeated for it. Flex attention skips tiles in which
everything is masked, but has no dropout and must be compiled. Where none of them runs, SDPA materializes the scores of
every pair of tokens, as eager attention does. From torch 2.11 and 2.13, `aten/…/transformers/cuda/sdp_utils.cpp`.
"""

from dataclasses import dataclass
from typing import Literal

# `fused`: no mask. `window`: fused, with a sliding window. `tiles`: flex attention. `dense mask`: fused, but reads an
# element for each pair of tokens. `scores`: these are materialized too.
Path = Literal["fused", "window", "tiles", "dense mask", "scores"]

# The smallest head dimension that flex attention's CUDA kernels support.
NARROWEST = 16
# The largest one that flash attention does.
WIDEST = 256
# Flash attention and cuDNN need this compute capability.
AMPERE = (8, 0)
# Types that transformers implements without SDPA.
EAGER = frozenset({
    "big_bird", "bigbird_pegasus", "bloom", "codegen", "deepseek_v4", "flint", "gemma2", "git", "gpt_neo",
    "gpt_neox_japanese", "gpt_oss", "gptj", "granite_swa", "granitemoe_swa", "hy_v4", "megatron-bert", "mimo_v2_flash",
    "mpt", "mvp", "openai-gpt", "rembert", "roformer", "trocr", "vaultgemma", "xglm", "xlm", "xlnet",
})  # fmt: skip
# Types that pass the sliding window of each layer to the attention function, as the mask of transformers applies it.
WINDOWED = frozenset({
    "afmoe", "beam", "cohere2", "cohere2_moe", "cohere_compass_text", "cwm", "dots1", "exaone4", "exaone_moe",
    "gemma3_text", "gemma3n_text", "gemma4_text", "gemma4_unified_text", "kolibri1",
    "laguna", "mellum", "ministral", "ministral3", "mistral", "mixtral", "modernbert-decoder", "olmo3", "phi3",
    "phi4_multimodal", "qwen2", "qwen3", "qwen3_moe", "smollm3", "starcoder2",
})  # fmt: skip


@dataclass(frozen=True)
class Heads:
    """What a kernel must support: queries, keys and values of one layer in training."""

    itemsize: int  # bytes per element
    width: int  # of a head of the queries and keys
    value_width: int
    dropout: bool = False
    capability: tuple[int, int] | None = None  # of an NVIDIA GPU; None: another device

    @property
    def flash(self) -> bool:
        """Whether flash attention runs. cuDNN does not run where it does not, but for heads of 192 and 128."""
        if self.capability is None or self.capability < AMPERE or self.itemsize != 2:
            return False
        if self.width != self.value_width or self.width > WIDEST:
            return False
        # Its backward pass needs more shared memory than these parts have.
        small = (8, 6) <= self.capability <= (8, 9) or self.capability >= (12, 0)
        return not small or self.width <= 192 or (self.width > 224 and not self.dropout)

    @property
    def efficient(self) -> bool:
        """Whether the memory-efficient kernel runs, with keys and values repeated for every head of the queries."""
        if self.capability is None:
            return False
        tensor_cores = self.capability >= AMPERE or (self.capability >= (7, 0) and self.itemsize == 2)
        aligned = 16 // self.itemsize if tensor_cores else 1
        return self.width % aligned == 0 and self.value_width % aligned == 0

    @property
    def windows(self) -> Literal["flash", "efficient"] | None:
        """The kernel that applies a sliding window without a mask."""
        if self.flash and self.width % 8 == 0:
            return "flash"
        return "efficient" if self.efficient else None


def choose_path(
    heads: Heads, *, cpu: bool, compiled: bool, windowed: bool = False, documents: bool = False, eager: bool = False
) -> Path:
    """How attention is computed: with a sliding window shorter than the sequence, with packed documents, or `eager`.
    `compiled`: flex attention is available. On devices other than NVIDIA GPUs and CPUs, half precision is fused."""
    if eager:
        return "scores"
    if cpu:
        return "scores" if heads.dropout else "dense mask" if documents or windowed else "fused"
    if documents and compiled and not heads.dropout and min(heads.width, heads.value_width) >= NARROWEST:
        return "tiles"
    other = heads.capability is None
    if documents or (windowed and heads.windows is None):
        return "dense mask" if heads.efficient or other else "scores"
    if windowed:
        return "window"
    return "fused" if heads.flash or heads.efficient or other else "scores"
