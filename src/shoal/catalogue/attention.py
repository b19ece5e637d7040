"""Which of torch's attention kernels runs where, as facts: training selects by them and the forecast counts by them.

Fused kernels compute the scores tile by tile and store none. Flash attention and cuDNN support half precision, grouped
keys and dropout, but no mask that they skip tiles by; flash attention supports a sliding window. The memory-efficient
kernel supports fp32 and dense masks, but not grouped keys, which must be repeated for it. Flex attention skips tiles in
which everything is masked, but has no dropout and must be compiled. Where none of them runs, SDPA materializes the
scores of every pair of tokens, as eager attention does. From `sdp_utils.cpp` of torch 2.11 and 2.13; the speeds are in
benchmarks/gpu/attention_h200.
"""

from dataclasses import dataclass
from typing import Literal

from shoal.catalogue.causal_models import MASKED, PACKED

# `fused`: without a mask. `window`: flash attention with a sliding window. `tiles`: flex attention. `bands`: parts of
# the sequence with the keys within their reach. `dense mask`: fused, but reads an element for each pair of tokens.
# `scores`: these are materialized.
Path = Literal["fused", "window", "tiles", "bands", "dense mask", "scores"]

# The head dimensions that flex attention's CUDA kernels support, from this one on; up to the second one they are faster
# than flash attention with a window.
NARROWEST, FASTEST = 16, 128
# The largest one that flash attention supports.
WIDEST = 256
# Flash attention and cuDNN need this compute capability.
AMPERE = (8, 0)
# Sequences from this length on are long enough for a warning: below, scores are no larger than other activations.
LONG = 1024
# Types that transformers implements without SDPA; and types that call SDPA themselves, not through its registry.
EAGER = frozenset({
    "big_bird", "bigbird_pegasus", "bloom", "codegen", "deepseek_v4", "flint", "gemma2", "git", "gpt_neo",
    "gpt_neox_japanese", "gpt_oss", "gptj", "granite_swa", "granitemoe_swa", "hy_v4", "inkling2_text", "megatron-bert",
    "mimo_v2_flash",
    "mpt", "mvp", "openai-gpt", "rembert", "roformer", "trocr", "vaultgemma", "xglm", "xlm", "xlnet",
})  # fmt: skip
DIRECT = frozenset({"biogpt", "falcon", "stablelm", "whisper"})
# Types that pass the sliding window of each layer to the attention function, as the mask of transformers applies it.
WINDOWED = frozenset({
    "afmoe", "beam", "cohere2", "cohere2_moe", "cohere_compass_text", "cwm", "dots1", "exaone4", "exaone_moe",
    "gemma3_text", "gemma3n_text", "gemma4_text", "gemma4_unified_text", "kolibri1", "laguna", "mellum", "ministral",
    "ministral3", "mistral", "mixtral", "modernbert-decoder", "olmo3", "phi3", "phi4_multimodal", "qwen2", "qwen3",
    "qwen3_moe", "smollm3", "starcoder2",
})  # fmt: skip
# Speeds relative to causal attention without a mask in half precision, per pair of tokens that is not masked. Measured
# on an H200, where SDPA selects cuDNN. Before Hopper it selects flash attention, which is no faster than with a window.
SPEED: dict[Path, float] = {"fused": 1.0, "window": 0.54, "tiles": 0.69, "bands": 0.7, "dense mask": 0.31}
HOPPER = (9, 0)
DROPOUT_SPEED = 0.75
SHORTER = "use train.recompute full, which keeps them for one block at a time, or a shorter data.max_length"


def is_maskless(model_type: str, *, windowed: bool) -> bool:
    """Whether a type is trained with our attention function and without masks of transformers. `windowed`: some layers
    have a sliding window that is shorter than the sequences."""
    return model_type in PACKED - MASKED - EAGER - DIRECT and (not windowed or model_type in WINDOWED)


def attention_speed(path: Path, *, dropout: bool, capability: tuple[int, int] | None) -> float:
    """The speed of a kernel relative to causal attention without a mask and dropout."""
    speed = SPEED[path]
    if path in ("window", "tiles") and (capability is None or capability < HOPPER):
        speed = 1.0
    return speed * (DROPOUT_SPEED if dropout else 1.0)


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
    def flash_window(self) -> bool:
        """Whether flash attention's own operator runs, which has a sliding window and does not pad heads."""
        return self.flash and self.width % 8 == 0

    @property
    def efficient(self) -> bool:
        """Whether the memory-efficient kernel runs, with keys and values repeated for every head of the queries."""
        if self.capability is None:
            return False
        tensor_cores = self.capability >= AMPERE or (self.capability >= (7, 0) and self.itemsize == 2)
        aligned = 16 // self.itemsize if tensor_cores else 1
        return self.width % aligned == 0 and self.value_width % aligned == 0

    @property
    def flex(self) -> bool:
        """Whether compiled flex attention runs."""
        return not self.dropout and min(self.width, self.value_width) >= NARROWEST

    @property
    def flex_window(self) -> bool:
        """Whether compiled flex attention is the fastest kernel with a sliding window. In fp32 it is very slow."""
        return self.flex and self.itemsize == 2 and max(self.width, self.value_width) <= FASTEST


@dataclass(frozen=True)
class Attention:
    """How attention is computed in a run; the layers with a sliding window, if any have."""

    path: Path
    because: str = ""
    remedy: str = ""

    def warning(self, length: int) -> str | None:
        """A sentence if memory grows with the square of the sequence although another config would avoid it."""
        if length < LONG or not self.because:
            return None
        what = {
            "dense mask": "Attention reads a dense mask, with an element for each pair of tokens, in slower kernels",
            "scores": "Attention stores the scores of each pair of tokens in every block",
        }[self.path]
        return f"{what}: {self.because}; {self.remedy}."


def choose_attention_path(
    heads: Heads,
    model_type: str,
    *,
    cpu: bool = False,
    grouped: bool = False,
    compiled: bool = True,
    eager: bool = False,
    windowed: bool = False,
    documents: bool = False,
    sharded: bool = False,
) -> Attention:
    """How attention is computed in the layers of a model. `grouped`: with fewer heads of keys than of queries.
    `compiled`: to kernels of the device. `eager`: as the config asks. `windowed`: with a sliding window shorter than
    the sequences. `documents`: in packed sequences, whose documents are kept apart. `sharded`: over context-parallel
    ranks. On GPUs of other vendors, every kernel is taken to be fused."""
    if eager:
        return Attention("scores", "model.attention is eager", "leave model.attention at auto")
    if model_type in EAGER:
        return Attention("scores", f"transformers has only eager attention for {model_type}", SHORTER)
    if cpu and heads.dropout:
        return Attention("scores", "a CPU has no fused attention with dropout", "set model.dropout to 0")
    ours = is_maskless(model_type, windowed=windowed)
    if documents:
        return _with_documents(heads, model_type, cpu=cpu, ours=ours, compiled=compiled, sharded=sharded)
    if windowed and not ours:
        return Attention(
            "dense mask",
            f"transformers gives {model_type} its sliding window as one",
            "use a data.max_length within the window",
        )
    if cpu:
        return Attention("bands" if windowed else "fused")
    other = heads.capability is None
    if windowed and compiled and heads.flex_window:
        return Attention("tiles")
    if windowed and heads.flash_window:
        return Attention("window")
    if not (heads.flash or heads.efficient or other):
        return Attention("scores", f"no kernel supports heads of {heads.width} in {_dtype(heads)} here", SHORTER)
    if grouped and not ours and not heads.flash and not other:
        return Attention(
            "scores", f"in {_dtype(heads)} transformers' {model_type} has no other", "use train.precision bf16-mixed"
        )
    return Attention("bands" if windowed else "fused")


def _with_documents(
    heads: Heads, model_type: str, *, cpu: bool, ours: bool, compiled: bool, sharded: bool
) -> Attention:
    """Packed documents need flex attention, or else a dense mask."""
    if cpu:
        return Attention("dense mask")  # a CPU has no other, and little to lose
    if ours and compiled and not sharded and heads.flex:
        return Attention("tiles")
    because, remedy = "packed documents need flex attention, which must be compiled", "set train.compile to true"
    if not ours:
        because, remedy = f"{model_type} has no flex attention for packed documents", "set data.pack to false"
    elif sharded:
        because, remedy = "parallel.cp has no flex attention for packed documents", "set data.pack to false"
    elif heads.dropout:
        because = "packed documents need flex attention, which has no dropout"
        remedy = "set model.dropout to 0, or data.pack to false"
    elif not heads.flex:
        because, remedy = f"heads of {heads.width} are too small for flex attention", "set data.pack to false"
    return Attention("dense mask" if heads.efficient or heads.capability is None else "scores", because, remedy)


def _dtype(heads: Heads) -> str:
    return "fp32" if heads.itemsize == 4 else "half precision"
