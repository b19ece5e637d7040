"""What a kernel or an operator does, by its name: tables of patterns, the first that matches counts."""

import re
from collections.abc import Sequence
from functools import lru_cache

MATMUL, ATTENTION, ELEMENTWISE, OPTIMIZER = "matmul", "attention", "elementwise", "optimizer"
COMMUNICATION, COPY, DATA, OTHER, IDLE = "communication", "copy", "data", "evaluation and checkpoints", "idle"

# The terms of a step. They add up to its time; communication counts here where nothing else runs meanwhile.
TERMS = (MATMUL, ATTENTION, ELEMENTWISE, OPTIMIZER, COMMUNICATION, COPY, DATA, OTHER, IDLE)
# Of these, what the device computes.
COMPUTE = (MATMUL, ATTENTION, ELEMENTWISE, OPTIMIZER)


def _table(*rows: tuple[str, str]) -> list[tuple[re.Pattern[str], str]]:
    return [(re.compile(pattern), kind) for pattern, kind in rows]


# Names of CUDA kernels and copies, demangled as CUPTI reports them. Attention stands before matmul: FlashAttention 3
# and the memory-efficient kernels are templates of CUTLASS.
KERNELS = _table(
    # Inductor's pointwise and reduction kernels, whose names list what they are fused from: also "attention" or "mm".
    (r"^triton_(poi|red|per|for|spl)_", ELEMENTWISE),
    (r"nccl|nvshmem|msccl", COMMUNICATION),
    (r"(one|two)_shot_all_reduce|multimem_(all|one_shot|reduce)|Memcpy PtoP", COMMUNICATION),
    (r"flash_?(attn|fwd|bwd|fprop|bprop)|flash::|Flash(Attn|Fwd|Bwd)|[Ff]lash_?[Aa]ttention", ATTENTION),
    (r"fmha|sdpa|flex_attention|flex_decoding|MemEffAttention|AttentionKernel|attention_kernel", ATTENTION),
    (r"adam|_lion\b|^_lion|lamb_|FusedSgd|Fused(Adam|Lion|Optimizer)|newton_schulz", OPTIMIZER),
    (r"^Mem(cpy|set)", COPY),
    # cuBLAS (nvjet, xmma, splitK), CUTLASS, cuDNN's convolutions, and the matmul templates of Inductor.
    (r"nvjet|gemm|GEMM|Gemm|gemv|cutlass|xmma|cublas|cublasLt|splitK|scaled_mm|matmul", MATMUL),
    (r"^triton_(tem|mm|bmm|addmm)_", MATMUL),
    (r"convolve|(wgrad|dgrad|fprop)_(implicit|engine)|implicit_conv|winograd", MATMUL),
    (r"", ELEMENTWISE),
)

# Names of operators on the CPU. What matches nothing is a wrapper: the operators that it calls count, and what it takes
# itself is dispatch, as is Python.
OPERATORS = _table(
    (r"^(c10d|_c10d_functional|gloo|mpi|ucc)(::|:)|^_c10d_functional", COMMUNICATION),
    (r"scaled_dot_product|flash_attention|efficient_attention|fused_attention|flex_attention", ATTENTION),
    (r"^aten::_fused_(adam|adamw|sgd|adagrad)", OPTIMIZER),
    (r"^aten::(linear|matmul|mm|addmm|bmm|baddbmm|addbmm|addmv|mv|dot|vdot|einsum|_scaled_mm|_int_mm)(_|\b)", MATMUL),
    (r"^aten::(_?convolution|conv\d?d|mkldnn_|_thnn_conv|slow_conv|_addmm_activation)|^(mkl|mkldnn|onednn)", MATMUL),
    (r"^(aten|fsdp|prims|torchao|bitsandbytes|quantized|inductor)::", ELEMENTWISE),
    (r"^torch::distributed::reducer|^torch\.distributed\.ddp\.reducer", ELEMENTWISE),
    (r"^Torch-Compiled Region|CompiledFunction|CompiledFxGraph|_cpp_fused_", ELEMENTWISE),
)


@lru_cache(maxsize=65536)
def kernel_kind(name: str) -> str:
    """The term of a CUDA kernel."""
    found = _first(KERNELS, name)
    assert found is not None
    return found


@lru_cache(maxsize=65536)
def operator_kind(name: str) -> str | None:
    """The term of a CPU operator; None for a wrapper."""
    return _first(OPERATORS, name)


def _first(table: Sequence[tuple[re.Pattern[str], str]], name: str) -> str | None:
    return next((kind for pattern, kind in table if pattern.search(name)), None)
