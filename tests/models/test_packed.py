"""Packed projections compute what separate linear layers do, and a model that uses them trains the same parameters."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from shoal.config import config_from_mapping
from shoal.data.loader import MicroBatch
from shoal.models.packed import gated_linear, rotated_projections
from shoal.models.prepare import blueprint, prepare_model
from shoal.parallel import apply
from shoal.parallel.precision import ComputeCopies
from tests.harness import NEEDS_TRITON, compared_in_interpreter, parallelized

COMPILED = pytest.mark.parametrize("compiled", [False, True])


def assert_same(found, expected, leaves, whole):
    """Results and gradients; `whole` is the packed matrix in place of all leaves but the first."""
    incoming = [torch.randn_like(one) for one in expected]
    reference = torch.autograd.grad(expected, leaves, incoming)
    of_input, of_whole = torch.autograd.grad(found, [leaves[0], whole], incoming)
    together = [*found, of_input, *of_whole.split([len(one) for one in leaves[1:]])]
    for one, other in zip(together, [*expected, *reference], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@COMPILED
def test_gate_and_up_together_are_both_layers(compiled):
    leaves = [torch.randn(shape, requires_grad=True) for shape in ((2, 7, 12), (32, 12), (32, 12))]
    inputs, gate, up = leaves
    whole = torch.cat([gate, up]).detach().requires_grad_()
    function = torch.compile(gated_linear, backend="aot_eager", fullgraph=True) if compiled else gated_linear
    assert_same([function(inputs, whole)], [F.silu(inputs @ gate.T) * (inputs @ up.T)], leaves, whole)


@COMPILED
@pytest.mark.parametrize("angles", [1, 2], ids=["the same positions", "positions of each sequence"])
def test_queries_keys_and_values_together_are_the_three_layers(compiled, angles):
    batch, length, width, heads, keys = 2, 7, 8, 3, 1
    shapes = [(batch, length, 12), *((count * width, 12) for count in (heads, keys, keys))]
    leaves = [torch.randn(shape, requires_grad=True) for shape in shapes]
    turns = torch.randn(angles, length, width // 2)
    cos, sin = torch.cat([turns, turns], dim=-1).cos(), torch.cat([turns, turns], dim=-1).sin()
    query, key, value = ((leaves[0] @ one.T).view(batch, length, -1, width).transpose(1, 2) for one in leaves[1:])
    expected = [*apply_rotary_pos_emb(query, key, cos, sin), value]
    whole = torch.cat(leaves[1:]).detach().requires_grad_()
    function = rotated_projections
    if compiled:
        function = torch.compile(rotated_projections, backend="aot_eager", fullgraph=True)
    found = function(leaves[0], whole, cos, sin, heads)
    # torch 2.11 loses the gradients of views that a compiled graph returns from one operator.
    assert len({one.untyped_storage().data_ptr() for one in found}) == 3
    assert_same(list(found), expected, leaves, whole)


def gradients(family, accumulates, packs, monkeypatch):
    """Loss and gradients of a micro-batch, and the number of packed matrices."""
    monkeypatch.setattr(apply, "packs_weights", lambda recipe: packs)
    shape = {"family": family, "hidden": 128, "layers": 2, "heads": 4, "vocab": 64, "positions": 16}
    config = config_from_mapping(
        {
            "model": {"shape": shape if family == "gpt2" else {**shape, "kv_heads": 2}, "tokenizer": "bytes"},
            "data": {"source": "text", "path": str(Path(__file__)), "max_length": 16},
            "train": {"precision": "bf16-mixed"},
        }
    )
    prepared = prepare_model(blueprint(config.model), longest=16)
    model = parallelized(prepared, config, micro_batch=2, grad_accum_steps=2 if accumulates else 1)
    (copies,) = (one for one in model.modules[0].modules() if isinstance(one, ComputeCopies))
    if not accumulates:
        copies.keep_low_precision_gradients()
    tokens = torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(0))
    batch = MicroBatch(tokens[:, :-1], tokens[:, 1:])
    sums = model.backward([batch] * (2 if accumulates else 1), 1.0)
    copies.uninstall()
    assert {id(one) for one in model.parameters.values()} == {id(one) for one in copies.inner.parameters()}
    found = {name: one.grad for name, one in model.parameters.items()}
    return sums, found, sum(len(one.weights) > 1 for one in copies.installed)


@pytest.mark.parametrize(
    ("family", "expected"), [("llama", 4), ("mistral", 4), ("qwen2", 2), ("qwen3", 2), ("gpt2", 0)]
)
@pytest.mark.parametrize("accumulates", [False, True])
def test_a_model_with_packed_weights_has_the_gradients_of_one_without(family, expected, accumulates, monkeypatch):
    loss, plain, none = gradients(family, accumulates, False, monkeypatch)
    found, packed, count = gradients(family, accumulates, True, monkeypatch)
    assert (none, count) == (0, expected)
    torch.testing.assert_close(found, loss, rtol=1e-3, atol=1e-3)
    for name, expected_gradient in plain.items():
        assert packed[name].dtype == expected_gradient.dtype
        scale = expected_gradient.abs().max().item()
        torch.testing.assert_close(packed[name], expected_gradient, rtol=0.0, atol=0.02 * scale, msg=name)


@NEEDS_TRITON
def test_the_kernels_in_tritons_interpreter_match_the_cpu():
    assert compared_in_interpreter(Path(__file__).with_name("packed_interpreted.py")) == 8
