"""Attention within a sliding window, and with fewer heads of keys than of queries: the result, and the kernel."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.models import attention_kernels
from shoal.models.attention import attend
from shoal.models.attention_kernels import causal_mask
from shoal.parallel.recompute import recompute_blocks

MODULE = SimpleNamespace(is_causal=True, num_key_value_groups=2)
LENGTH, WINDOW = 200, 71


def tensors(device: str = "cpu", dtype: torch.dtype = torch.float32, width: int = 16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(2, LENGTH, heads, width, generator=generator) for heads in (4, 2, 2)]
    return [one.to(device, dtype).transpose(1, 2).requires_grad_() for one in drawn]


def with_gradients(output: torch.Tensor, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    return [output, *torch.autograd.grad(output.square().sum(), inputs)]


@pytest.mark.parametrize(
    ("window", "band"), [(1, 1), (WINDOW, 1), (30, 7), (5, 64), (LENGTH - 1, 1), (LENGTH, 1), (None, 1)]
)
def test_attention_in_a_window_equals_attention_with_its_dense_mask(window, band, monkeypatch):
    monkeypatch.setattr(attention_kernels, "SHORTEST_BAND", band)
    inputs = tensors()
    found = with_gradients(attend(MODULE, *inputs, None, scaling=0.3, sliding_window=window)[0], inputs)
    exact = F.scaled_dot_product_attention(
        *inputs, attn_mask=causal_mask(LENGTH, window, torch.device("cpu")), scale=0.3, enable_gqa=True
    )
    for one, other in zip(found, with_gradients(exact.transpose(1, 2), inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_mask_contains_the_window():
    inputs, everything = tensors(), torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool)
    found = attend(MODULE, *inputs, everything, sliding_window=WINDOW)[0]
    exact = F.scaled_dot_product_attention(*inputs, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-6)


class Operators(TorchDispatchMode):
    """Records the attention operators that run, with the heads of their keys and their window."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int, int | None]] = []

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        named = named or {}
        name = operation.__name__.removesuffix(".default")
        if "_attention" in name and "backward" not in name:
            window = named.get("window_size_left", named.get("window_size"))
            heads = arguments[1].shape[1 if "dot_product" in name else 2]
            self.seen.append((name, heads, window))
        return operation(*arguments, **named)


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes attention believe that it runs on an NVIDIA GPU with this compute capability."""

    def use(capability: tuple[int, int]) -> None:
        monkeypatch.setattr(attention_kernels, "compute_capability", lambda device: capability)

    return use


def test_repeated_keys_give_what_shared_ones_do(on):
    """In fp32 a GPU has no kernel for fewer heads of keys: SDPA would store the scores."""
    inputs = tensors()
    with Operators() as shared:
        expected = with_gradients(attend(MODULE, *inputs, None, scaling=0.3)[0], inputs)
    on((9, 0))
    with Operators() as repeated:
        found = with_gradients(attend(MODULE, *inputs, None, scaling=0.3)[0], inputs)
    assert [heads for _, heads, _ in shared.seen + repeated.seen] == [2, 4]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("width", [64, 256])
def test_a_gpu_applies_the_window_in_flash_attention_without_a_mask(width, dropout, on):
    """Without data: the operators of a GPU, for shapes alone."""
    on((9, 0))
    inputs = tensors("meta", torch.bfloat16, width)
    with Operators() as used:
        with_gradients(attend(MODULE, *inputs, None, sliding_window=WINDOW, dropout=dropout)[0], inputs)
    assert used.seen == [("_flash_attention_forward", 2, WINDOW - 1)]


class Block(torch.nn.Module):
    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return attend(MODULE, query, key, value, None, sliding_window=WINDOW)[0].square()


def test_selective_checkpointing_saves_the_output_of_this_kernel(on):
    on((9, 0))
    counts: Counter[str] = Counter()
    for how in ("selective", "full"):
        block, inputs = Block(), tensors("meta", torch.bfloat16)
        recompute_blocks([block], how)
        with Operators() as used:
            torch.autograd.grad(block(*inputs).sum(), inputs)
        counts[how] = len(used.seen)
    assert counts == {"selective": 1, "full": 2}


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, WINDOW])
def test_attention_compiles_as_one_graph(window, on):
    """Also where it selects a kernel by the device."""
    on((9, 0))
    inputs = tensors()

    def run(*given: torch.Tensor) -> torch.Tensor:
        return attend(MODULE, *given, None, scaling=0.3, sliding_window=window)[0]

    try:
        found = with_gradients(torch.compile(run, backend="aot_eager", fullgraph=True)(*inputs), inputs)
    finally:
        torch.compiler.reset()
    for one, other in zip(found, with_gradients(run(*inputs), inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
