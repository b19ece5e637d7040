"""NF4 weights have bitsandbytes' codes, statistics and values, and can be sharded, checkpointed and compiled."""

from pathlib import Path
from statistics import NormalDist

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from shoal.launch.join import joined_within
from shoal.mistakes import UserMistake
from shoal.models import nf4
from shoal.models.nf4 import QUANTIZED, dequantize, is_double, quantize, quantized_shapes
from shoal.models.nf4_linear import nf4_linear, nf4_lora_linear
from tests.harness import NEEDS_TRITON, compared_in_interpreter, run_ranks, slow

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=["fp32", "bf16", "fp16"])
KINDS = pytest.mark.parametrize("kind", QUANTIZED)
OURS = pytest.mark.parametrize("kind", ["nf4", "nf4-dq"])
SHAPES = pytest.mark.parametrize("shape", [(48, 128), (7, 64), (200, 704)], ids=str)


def matrix(shape: tuple[int, int], dtype: torch.dtype = FP32) -> Tensor:
    """Weights of all sizes, with a block of zeros and one of values halfway between two codes."""
    generator = torch.Generator().manual_seed(shape[0])
    weight = torch.randn(shape, generator=generator) * 10 ** torch.empty(shape[0], 1).uniform_(
        -4, 1, generator=generator
    )
    weight[1, :64] = 0
    table = torch.tensor(nf4.VALUES)
    weight[2, :15] = (table[1:] + table[:-1]) / 2
    weight[2, 15:64] = 1
    return weight.to(dtype)


def same(found: Tensor, expected: Tensor) -> bool:
    return found.dtype == expected.dtype and torch.equal(found, expected)


def bitsandbytes_parts(weight: Tensor, double: bool) -> tuple[dict[str, Tensor], Tensor]:
    """bitsandbytes' codes and statistics in our shapes, and what it dequantizes them to."""
    functional = pytest.importorskip("bitsandbytes").functional
    packed, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=double)
    rows, columns = weight.shape
    parts = {"weight": packed.view(rows, columns // 2)}
    if double:
        parts["absmax"] = state.absmax.view(rows, columns // 64)
        parts["nested_absmax"] = state.state2.absmax.view(torch.int32)
        parts["nested_offset"] = state.offset.view(1).view(torch.int32)
    else:
        parts["absmax"] = state.absmax.view(torch.int32).view(rows, columns // 64)
    return parts, functional.dequantize_4bit(packed, state)


def double_quantized_scales(parts: dict[str, Tensor]) -> Tensor:
    values = nf4.dynamic_values(torch.device("cpu"))[parts["absmax"].int()].flatten()
    largest = parts["nested_absmax"].view(FP32).repeat_interleave(256)[: len(values)]
    return (values * largest + parts["nested_offset"].view(FP32)).view(parts["absmax"].shape)


@KINDS
@DTYPES
@SHAPES
def test_codes_statistics_and_values_are_those_of_bitsandbytes(shape, dtype, kind):
    weight = matrix(shape, dtype)
    expected, dequantized = bitsandbytes_parts(weight, is_double(kind))
    parts = quantize(weight, kind)
    assert {name: (tuple(part.shape), part.dtype) for name, part in parts.items()} == quantized_shapes(kind, shape)
    assert same(dequantize(expected, dtype, kind), dequantized)
    if kind == "nf4-dq":
        # On a CPU bitsandbytes rounds scales before it looks for the nearest code, and may miss it by one.
        assert (parts["absmax"].int() - expected["absmax"].int()).abs().max() <= 1
        exact = quantize(weight, "nf4")["absmax"].view(FP32)
        errors = [(double_quantized_scales(one) - exact).abs() for one in (parts, expected)]
        assert (errors[0] <= errors[1] + 1e-6 * exact.max()).all()
        torch.testing.assert_close(*(one["nested_offset"].view(FP32) for one in (parts, expected)), rtol=1e-6, atol=0.0)
        parts, expected = ({"weight": one["weight"]} for one in (parts, expected))
    assert {name: same(part, expected[name]) for name, part in parts.items()} == dict.fromkeys(expected, True)


def test_the_dynamic_data_type_is_that_of_bitsandbytes():
    functional = pytest.importorskip("bitsandbytes").functional
    assert same(nf4.dynamic_values(torch.device("cpu")), functional.create_dynamic_map())


def test_the_16_values_are_quantiles_of_a_normal_distribution():
    outermost = 1 - (1 / 30 + 1 / 32) / 2
    quantile = NormalDist().inv_cdf
    above = [quantile(0.5 + (outermost - 0.5) * step / 8) for step in range(9)]
    below = [-quantile(0.5 + (outermost - 0.5) * step / 7) for step in range(7, 0, -1)]
    assert list(nf4.VALUES) == pytest.approx([value / quantile(outermost) for value in below + above], abs=1e-6)


@OURS
def test_every_weight_gets_the_nearest_value(kind):
    weight = matrix((48, 128))
    largest = weight.view(-1, 64).abs().amax(1, keepdim=True)
    found = dequantize(quantize(weight, kind), FP32, kind).view(-1, 64)
    candidates = torch.tensor(nf4.VALUES) * largest
    best = (weight.view(-1, 64, 1) - candidates.view(-1, 1, 16)).abs().amin(-1)
    # 8-bit scales are rounded by up to a hundredth of the largest scale of 256.
    slack = 0.01 * largest.max() if is_double(kind) else 1e-6 * largest
    assert ((weight.view(-1, 64) - found).abs() <= best + slack).all()


@DTYPES
def test_quantized_rows_are_the_rows_of_the_quantized_matrix(dtype):
    weight = matrix((48, 128), dtype)
    whole, slices = quantize(weight, "nf4"), quantize(weight[5:29], "nf4")
    assert all(same(slices[name], part[5:29]) for name, part in whole.items())
    # Columns too, in whole blocks: the view is not contiguous.
    columns = quantize(weight[:, 64:], "nf4")
    assert same(columns["weight"], whole["weight"][:, 32:])
    sliced = {"weight": whole["weight"][:, 32:], "absmax": whole["absmax"][:, 1:]}
    assert same(dequantize(sliced, dtype, "nf4"), dequantize(whole, dtype, "nf4")[:, 64:])


@OURS
def test_a_matrix_of_any_size_is_processed_in_chunks_of_rows(kind, monkeypatch):
    weight = matrix((48, 128))
    parts = quantize(weight, kind)
    expected = dequantize(parts, BF16, kind)
    largest = Largest()
    monkeypatch.setattr(nf4, "CHUNK", 5 * 128)
    monkeypatch.setattr(nf4, "CPU_CHUNK", 5 * 128)
    with largest:
        again = quantize(weight, kind)
    assert all(same(again[name], part) for name, part in parts.items())
    assert same(dequantize(parts, BF16, kind), expected)
    # The codes are 3072 bytes and scales 384; nothing else is as large as the matrix, which has 24,576.
    assert largest.bytes == 48 * 128 // 2


class Largest(TorchDispatchMode):
    """Records the largest allocation of the operations under it."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        given = {id(tensor.untyped_storage()) for tensor in arguments if isinstance(tensor, Tensor)}
        result = function(*arguments, **(keywords or {}))
        if isinstance(result, Tensor) and not function.is_view and id(result.untyped_storage()) not in given:
            self.bytes = max(self.bytes, result.untyped_storage().nbytes())
        return result


class Linear(nn.Module):
    """A frozen quantized matrix, followed by a trained one."""

    def __init__(self, weight: Tensor, kind: str) -> None:
        super().__init__()
        self.kind = kind
        for name, part in quantize(weight, kind).items():
            self.register_parameter(name, nn.Parameter(part, requires_grad=False))
        self.trained = nn.Parameter(torch.linspace(-1, 1, 16 * len(weight)).view(16, len(weight)))
        self.bias = nn.Parameter(torch.linspace(-1, 1, len(weight)))

    def parts(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in quantized_shapes(self.kind, (1, 64))}

    def forward(self, inputs: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            self.used = {name: part.clone() for name, part in self.parts().items()}
        hidden = nf4_linear(inputs, self.parts(), self.bias, self.kind)
        return hidden @ self.trained.to(hidden.dtype).t()


def gradients(module: nn.Module, inputs: Tensor, run=None) -> list[Tensor]:
    """The output of `run`, or of the module, and the gradients of its inputs and trained parameters."""
    inputs = inputs.detach().requires_grad_()
    module.zero_grad()
    output = (module if run is None else run)(inputs)
    output.float().square().sum().backward()
    return [output, inputs.grad, module.trained.grad, module.bias.grad]


@KINDS
@DTYPES
def test_a_linear_layer_and_its_gradients_are_those_of_the_dequantized_weight(kind, dtype):
    if kind.startswith("bnb."):
        pytest.importorskip("bitsandbytes")
    module = Linear(matrix((48, 128)), kind)
    inputs = torch.randn(2, 5, 128, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight = dequantize(module.parts(), dtype, kind)

    def plain(inputs: Tensor) -> Tensor:
        return (F.linear(inputs, weight) + module.bias.to(dtype)) @ module.trained.to(dtype).t()

    expected = gradients(module, inputs, plain)
    for found, wanted in zip(gradients(module, inputs), expected, strict=True):
        tolerance = {} if dtype == FP32 else {"rtol": 2e-3, "atol": 1e-3 * float(wanted.abs().max())}
        torch.testing.assert_close(found, wanted, **tolerance)
    recomputed = gradients(module, inputs, lambda inputs: checkpoint(module, inputs, use_reentrant=False))
    assert all(same(found, wanted) for found, wanted in zip(recomputed, gradients(module, inputs), strict=True))


class Adapted(nn.Module):
    """A frozen quantized matrix with a LoRA adapter."""

    def __init__(self, weight: Tensor, kind: str) -> None:
        super().__init__()
        self.kind, self.stored = kind, quantize(weight, kind)
        rows, columns = weight.shape
        self.down = nn.Parameter(torch.linspace(-1, 1, 4 * columns).view(4, columns))
        self.up = nn.Parameter(torch.linspace(-1, 1, 4 * rows).view(rows, 4))

    def forward(self, inputs: Tensor) -> Tensor:
        return nf4_lora_linear(inputs, self.stored, self.down, self.up, 0.5, None, self.kind)


@pytest.mark.parametrize("kind", ["nf4", "nf4-dq"])
@DTYPES
def test_a_layer_with_an_adapter_and_its_gradients_are_those_of_the_sum(kind, dtype):
    module = Adapted(matrix((48, 128)), kind)
    weight = dequantize(module.stored, dtype, kind)
    inputs = torch.randn(2, 5, 128, generator=torch.Generator().manual_seed(0)).to(dtype)

    def plain(inputs: Tensor) -> Tensor:
        low = F.linear(inputs, module.down.to(dtype)) * 0.5
        return F.linear(inputs, weight) + F.linear(low, module.up.to(dtype))

    def results(run) -> list[Tensor]:
        given = inputs.detach().requires_grad_()
        module.zero_grad()
        output = run(given)
        output.float().square().sum().backward()
        return [output, given.grad, module.down.grad, module.up.grad]

    found = results(module)
    for one, wanted in zip(found, results(plain), strict=True):
        tolerance = {} if dtype == FP32 else {"rtol": 2e-2, "atol": 1e-2 * float(wanted.abs().max())}
        torch.testing.assert_close(one, wanted, **tolerance)
    recomputed = results(lambda inputs: checkpoint(module, inputs, use_reentrant=False))
    assert all(same(one, wanted) for one, wanted in zip(recomputed, found, strict=True))


def saved_bytes(run, inputs: Tensor) -> int:
    """The bytes that a forward pass saves for the backward pass, without what exists anyway."""
    exists = {parameter.untyped_storage().data_ptr() for parameter in run.parameters()}
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in exists:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = run(inputs)
    del kept
    return sum(found.values())


@pytest.mark.parametrize("kind", [slow("nf4"), "nf4-dq"])
def test_compiled_or_not_the_dequantized_weight_is_not_saved_for_the_backward_pass(kind):
    module = Linear(matrix((256, 512)), kind)
    inputs = torch.randn(2, 3, 512, requires_grad=True)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    expected = gradients(module, inputs)
    assert all(same(found, wanted) for found, wanted in zip(gradients(module, inputs, compiled), expected, strict=True))
    # Only what the trained matrix needs: its inputs.
    assert saved_bytes(module, inputs) == 2 * 3 * 256 * 4
    assert saved_bytes(compiled, inputs) == 2 * 3 * 256 * 4


class Recomputed(Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = checkpoint(super().forward, inputs, use_reentrant=False)
        return found


def test_compiled_activation_checkpointing_saves_the_inputs_only():
    module = Recomputed(matrix((256, 512)), "nf4")
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager_decomp_partition")
    inputs = torch.randn(2, 3, 512, requires_grad=True)
    assert saved_bytes(compiled, inputs) == 2 * 3 * 512 * 4


@OURS
def test_fsdp_gathers_the_parts_bitwise_and_each_of_two_ranks_holds_half(kind):
    weight = matrix((48, 128))
    inputs = torch.randn(4, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)

    def be() -> tuple[dict[str, bool], list[bool], float]:
        with joined_within(60.0):
            whole, module = Linear(weight, kind), Linear(weight, kind)
            replicated = {part for name, part in module.named_parameters() if name.startswith("nested_")}
            mesh = init_device_mesh("cpu", (2,))
            fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=policy, ignored_params=replicated)
            sharded = [name for name, _ in whole.named_parameters() if not name.startswith("nested_")]
            local = sum(getattr(module, name).to_local().untyped_storage().nbytes() for name in sharded)
            share = local / sum(getattr(whole, name).nbytes for name in sharded)
            expected, found = gradients(whole, inputs), gradients(module, inputs)
            found = [one.full_tensor() if isinstance(one, DTensor) else one for one in found]
            gathered = {name: same(module.used[name], part) for name, part in quantize(weight, kind).items()}
            return gathered, [same(*both) for both in zip(found, expected, strict=True)], share

    # torch imports its compiler at the first call of a custom operator: here, so that the ranks have it already.
    dequantize(quantize(weight, kind), BF16, kind)
    for gathered, equal, share in run_ranks(2, be):
        assert gathered == dict.fromkeys(quantized_shapes(kind, (48, 128)), True)
        assert equal == [True] * 4
        assert share == 0.5


def test_mistakes_are_explained(monkeypatch):
    with pytest.raises(UserMistake, match=r"shape 8 × 100 cannot be quantized to nf4.* multiple of 64"):
        quantize(torch.zeros(8, 100), "nf4")
    monkeypatch.setattr(nf4, "find_spec", lambda name: None)
    with pytest.raises(UserMistake, match=r"bnb.nf4-dq needs bitsandbytes.* use nf4-dq, which has the same format"):
        quantize(torch.zeros(8, 64), "bnb.nf4-dq")


@NEEDS_TRITON
def test_the_kernel_in_tritons_interpreter_matches_the_cpu():
    assert compared_in_interpreter(Path(__file__).with_name("nf4_interpreted.py")) == 12


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@OURS
@DTYPES
@SHAPES
def test_the_kernel_dequantizes_as_the_cpu_does(shape, dtype, kind):
    parts = quantize(matrix(shape, dtype), kind)
    found = dequantize({name: part.cuda() for name, part in parts.items()}, dtype, kind)
    assert same(found.cpu(), dequantize(parts, dtype, kind))
