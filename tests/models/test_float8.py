"""Float8 matmuls are close to exact ones, whatever the scale of a tensor."""

import pytest
import torch

from shoal.models.cross_entropy import (
    IGNORED,
    choose_chunks,
    chunked_cross_entropy,
    chunked_token_losses,
    kept_tokens,
)
from shoal.models.float8 import GRADIENTS, VALUES, cast_and_transpose, float8_linear


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float(((found.float() - exact).norm() / exact.norm()).detach())


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e4])
def test_matmuls_and_gradients_are_close_to_the_exact_ones_whatever_the_scale(size):
    torch.manual_seed(0)
    inputs = (torch.randn(2, 32, 64) * size).bfloat16().requires_grad_()
    weight = (torch.randn(48, 64) * 0.02).bfloat16().requires_grad_()
    bias = torch.randn(48).bfloat16().requires_grad_()
    grad_output = torch.randn(2, 32, 48).bfloat16()
    float8_linear(inputs, weight, bias).backward(grad_output)
    exact_inputs, exact_weight = (one.detach().float().requires_grad_() for one in (inputs, weight))
    exact = torch.nn.functional.linear(exact_inputs, exact_weight, bias.detach().float())
    exact.backward(grad_output.float())
    # e4m3 rounds by up to 1/16, e5m2 by up to 1/8; the errors of a sum's terms are independent.
    assert relative_error(float8_linear(inputs, weight, bias), exact) < 0.05
    assert relative_error(inputs.grad, exact_inputs.grad) < 0.08
    assert relative_error(weight.grad, exact_weight.grad) < 0.08
    assert bias.grad.tolist() == pytest.approx(grad_output.float().sum((0, 1)).tolist(), rel=0.05, abs=0.2)


@pytest.mark.parametrize(("trained", "saved_bytes"), [(True, 64 * 32), (False, 0)])
def test_the_input_of_a_frozen_weight_is_not_saved(trained, saved_bytes):
    """Of a trained one it is saved in 8 bits per element."""
    weight = torch.randn(48, 32).bfloat16().requires_grad_(trained)
    leaf = torch.randn(64, 32).bfloat16().requires_grad_()
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: saved.append(one) or one, lambda one: one):
        float8_linear(leaf, weight)
    assert sum(one.nbytes for one in saved if one is not weight and one.dim()) == saved_bytes


def test_a_frozen_weight_has_the_same_results_and_input_gradients_as_a_trained_one():
    torch.manual_seed(0)
    weight, inputs, grad_output = (torch.randn(*shape).bfloat16() for shape in ((48, 32), (64, 32), (64, 48)))
    found = []
    for trained in (True, False):
        leaf, matrix = inputs.clone().requires_grad_(), weight.clone().requires_grad_(trained)
        output = float8_linear(leaf, matrix)
        output.backward(grad_output)
        found.append((output, leaf.grad))
        assert (matrix.grad is not None) == trained
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_zeros_and_the_largest_value_survive_the_cast():
    values = torch.zeros(16, 32, dtype=torch.bfloat16)
    scale = torch.tensor(2.0)
    values[3, 5], values[7, 9] = 2 * torch.finfo(VALUES).max, -2e6
    row_major, column_major = cast_and_transpose(values, scale, VALUES)
    assert torch.equal(row_major.float().t(), column_major.float())
    assert column_major.is_contiguous()
    assert row_major.float()[3, 5] == torch.finfo(VALUES).max
    assert row_major.float()[7, 9] == -torch.finfo(VALUES).max  # saturates, does not become NaN
    assert row_major.float().count_nonzero() == 2
    nothing = torch.zeros(16, 16, dtype=torch.bfloat16, requires_grad=True)
    float8_linear(nothing, nothing).sum().backward()
    assert nothing.grad.isfinite().all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("shape", [(64, 128), (16, 16), (4096, 2048), (80, 4112)])
@pytest.mark.parametrize("dtype", [VALUES, GRADIENTS])
def test_the_kernel_casts_as_the_cpu_does(shape, dtype):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(shape[0])).bfloat16()
    scale = values.abs().max().float() / torch.finfo(dtype).max
    expected = cast_and_transpose(values, scale, dtype)
    found = cast_and_transpose(values.cuda(), scale.cuda(), dtype)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.cpu().float(), other.float())


@pytest.mark.parametrize(("vocabulary", "kept"), [(64, False), (50, True)])  # 50: padded
def test_a_float8_head_has_nearly_the_losses_and_gradients_of_a_bf16_one(vocabulary, kept):
    torch.manual_seed(0)
    found = []
    for float8 in (False, True):
        generator = torch.Generator().manual_seed(1)
        hidden = torch.randn(96, 32, generator=generator).bfloat16().requires_grad_()
        weight = torch.randn(vocabulary, 32, generator=generator).bfloat16().requires_grad_()
        labels = torch.randint(0, vocabulary, (96,), generator=generator)
        labels[40:] = IGNORED if kept else labels[40:]
        chunks = choose_chunks(weight, None, float8=float8)
        arguments = {"rows": 25, "columns": chunks.columns, "kept": kept_tokens(labels, 40) if kept else None}
        loss = chunked_cross_entropy(hidden, weight, labels, float8=float8, **arguments)
        each = chunked_token_losses(hidden, weight, labels, float8=float8, **arguments)
        (loss * 0.5).backward()
        assert each.sum().item() == pytest.approx(loss.item(), rel=1e-5)
        found.append((loss.detach(), hidden.grad, weight.grad))
    exact, rounded = found
    assert 0 < relative_error(rounded[0], exact[0].float()) < 0.01
    assert 0 < relative_error(rounded[1], exact[1].float()) < 0.08
    assert 0 < relative_error(rounded[2], exact[2].float()) < 0.08
