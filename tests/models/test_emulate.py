"""Emulated low-precision matmuls: inputs cast, accumulation in fp32, the result cast, forward and backward."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from shoal.mistakes import UserMistake
from shoal.models import emulate
from shoal.models.anatomy import read_anatomy
from shoal.models.emulate import LOW_PRECISION, EmulatedForward, emulated_dtypes, emulated_matmuls, slow_dtypes
from shoal.parallel.patch import patch

OPERATIONS: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "linear": (F.linear, [(2, 3, 8), (5, 8)]),
    "linear with a bias": (F.linear, [(2, 3, 8), (5, 8), (5,)]),
    "linear by keyword": (lambda x, w, b: F.linear(x, weight=w, bias=b), [(3, 8), (5, 8), (5,)]),
    "@": (lambda left, right: left @ right, [(3, 8), (8, 5)]),
    "matmul with a matrix": (torch.matmul, [(2, 4, 3, 8), (8, 5)]),
    "matmul of batches": (torch.matmul, [(2, 4, 3, 8), (2, 4, 8, 5)]),
    "matmul that broadcasts": (torch.matmul, [(2, 4, 3, 8), (4, 8, 5)]),
    "matmul with a vector": (torch.matmul, [(3, 8), (8,)]),
    "bmm": (torch.bmm, [(4, 3, 8), (4, 8, 5)]),
    "addmm": (torch.addmm, [(5,), (3, 8), (8, 5)]),
    "addmm of a matrix": (torch.addmm, [(3, 5), (3, 8), (8, 5)]),
    "addmm, scaled": (lambda *given: torch.addmm(*given, beta=0.5, alpha=2.0), [(5,), (3, 8), (8, 5)]),
    "baddbmm": (torch.baddbmm, [(4, 3, 5), (4, 3, 8), (4, 8, 5)]),
    "einsum": (lambda left, right: torch.einsum("bqc,bkc->bqk", left, right), [(2, 3, 8), (2, 4, 8)]),
    "attention": (
        lambda query, key, value: F.scaled_dot_product_attention(query, key, value, is_causal=True),
        [(1, 2, 6, 8)] * 3,
    ),
    "conv1d": (lambda x, w: F.conv1d(x, w, padding=1), [(2, 4, 6), (3, 4, 3)]),
}


def tensors(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def with_gradients(operation: Callable[..., Tensor], given: list[Tensor]) -> list[Tensor]:
    result = operation(*given)
    outer = torch.arange(result.numel()).remainder(7).sub(3).view(result.shape).to(result.dtype)  # exact in any dtype
    return [result, *torch.autograd.grad(result, given, outer)]


@pytest.mark.parametrize("dtype", LOW_PRECISION, ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_results_and_gradients_are_computed_in_fp32_from_cast_inputs_and_cast_back(name, dtype):
    operation, shapes = OPERATIONS[name]
    given = tensors(shapes, dtype)
    native = with_gradients(operation, given)
    wide = with_gradients(operation, [one.detach().float().requires_grad_() for one in given])
    with emulated_matmuls([dtype]):
        found = with_gradients(operation, given)
    for one, exact, before in zip(found, wide, native, strict=True):
        assert one.dtype == dtype
        # The order of summation over a batch may differ from the fp32 operation: rarely the last bit.
        assert torch.allclose(one.float(), exact.to(dtype).float(), rtol=torch.finfo(dtype).eps, atol=1e-6)
        assert torch.allclose(one.float(), before.float(), rtol=0.02, atol=0.02)


def test_under_autocast_inputs_of_any_dtype_are_cast_first():
    inputs, weight = torch.full((1, 4), 1.001), torch.eye(4, dtype=torch.bfloat16)
    with emulated_matmuls([torch.bfloat16]), torch.autocast("cpu", torch.bfloat16):
        found = F.linear(inputs, weight)
        assert torch.is_autocast_enabled("cpu")
    assert found.dtype == torch.bfloat16
    assert found.eq(1.0).all()  # 1.001 rounds to 1 in bf16


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_other_dtypes_are_unchanged(dtype):
    left, right = tensors([(3, 8), (8, 5)], dtype)
    with emulated_matmuls(LOW_PRECISION):
        assert torch.equal(left @ right, torch.mm(left, right))
        assert (left @ right).dtype == dtype


def test_the_out_argument_is_supported():
    left, right = (one.detach() for one in tensors([(3, 8), (8, 5)], torch.bfloat16))
    out = torch.zeros(3, 5, dtype=torch.bfloat16)
    with emulated_matmuls([torch.bfloat16]):
        assert torch.matmul(left, right, out=out) is out
    assert torch.equal(out, (left.float() @ right.float()).bfloat16())


@pytest.mark.parametrize("name", ["linear", "matmul of batches", "addmm"])
def test_saved_tensors_are_in_low_precision(name):
    operation, shapes = OPERATIONS[name]
    kept: list[torch.dtype] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.dtype)
        return tensor

    given = tensors(shapes, torch.bfloat16)
    with emulated_matmuls([torch.bfloat16]), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        operation(*given)
    assert kept == [torch.bfloat16] * 2


def test_only_a_cpu_that_is_slow_emulates(monkeypatch: pytest.MonkeyPatch):
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    seconds = {torch.float32: 1.0, torch.bfloat16: 0.9, torch.float16: 80.0}
    monkeypatch.setattr(emulate, "_matmul_seconds", seconds.__getitem__)
    with fresh_measurement():
        assert emulated_dtypes(cpu, torch.float32, *LOW_PRECISION) == {torch.float16}
        assert emulated_dtypes(gpu, *LOW_PRECISION) == frozenset()
    seconds |= {torch.bfloat16: 4.0}
    with fresh_measurement():
        assert emulated_dtypes(cpu, torch.bfloat16) == {torch.bfloat16}


def test_the_environment_variable_overrides_the_measurement(monkeypatch: pytest.MonkeyPatch):
    for said, emulated in (("emulated", set(LOW_PRECISION)), ("native", set())):
        monkeypatch.setenv(emulate.VARIABLE, said)
        with fresh_measurement():
            assert slow_dtypes() == emulated
    monkeypatch.setenv(emulate.VARIABLE, "perhaps")
    with fresh_measurement(), pytest.raises(UserMistake, match="set it to emulated or native"):
        slow_dtypes()


class fresh_measurement:
    def __enter__(self) -> None:
        slow_dtypes.cache_clear()

    def __exit__(self, *_: Any) -> None:
        slow_dtypes.cache_clear()


class LowPrecisionMatmuls(TorchDispatchMode):
    """Names of the matmuls that reach torch's kernels in low precision."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(name in str(func) for name in ("mm.", "mv.", "dot", "attention", "conv")):
            self.seen += 1
            if any(isinstance(one, Tensor) and one.dtype in LOW_PRECISION for one in args):
                self.found.add(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "mixtral"])
def test_no_matmul_of_a_model_is_in_low_precision(family, attention, checkpointing):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = AutoConfig.for_model(family, vocab_size=64, num_key_value_heads=2, **sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=attention)
    if checkpointing:
        for block in model.get_submodule(read_anatomy(model).backbone).modules():
            if isinstance(block, GradientCheckpointingLayer):
                patch(block, EmulatedForward, emulated=frozenset(LOW_PRECISION))
        model.gradient_checkpointing_enable({"use_reentrant": False})
    patch(model, EmulatedForward, emulated=frozenset(LOW_PRECISION))
    tokens = torch.arange(32).view(2, 16)
    with LowPrecisionMatmuls() as kernels:
        model.train()(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    assert kernels.seen > 20
    assert kernels.found == set()
