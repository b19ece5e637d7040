"""Compute copies: a block's gradients reach the master weights, and DDP, as soon as its backward pass is done."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from shoal.config import config_from_mapping
from shoal.data.loader import MicroBatch
from shoal.models.prepare import blueprint, prepare_model
from shoal.parallel.precision import ComputeCopies, read_precision
from tests.harness import parallelized


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "neox"])
def test_gradients_do_not_wait_for_the_backward_pass_of_earlier_blocks(family, recompute):
    shape = {"family": family, "hidden": 32, "layers": 3, "heads": 2, "vocab": 64, "positions": 16}
    config = config_from_mapping(
        {
            "model": {"shape": {**shape, "tied": False}, "tokenizer": "bytes"},
            "data": {"source": "text", "path": str(Path(__file__)), "max_length": 16},
            "train": {"precision": "bf16-mixed", "recompute": recompute, "loss_impl": "chunked"},
        }
    )
    model = parallelized(prepare_model(blueprint(config.model), longest=16), config, micro_batch=2)
    parts = [model.anatomy.head, *reversed(model.anatomy.blocks)]
    weights = {part: [name for name in model.parameters if name.startswith(f"{part}.")] for part in parts}
    events: list[str] = []
    for part in parts:
        if part in model.anatomy.blocks:
            module = model.modules[0].inner.model.get_submodule(part)
            module.register_full_backward_hook(lambda *_, part=part: events.append(part))
        for name in weights[part]:
            model.parameters[name].register_post_accumulate_grad_hook(lambda _, name=name: events.append(name))
    tokens = torch.randint(0, 64, (2, 17))
    model.backward([MicroBatch(tokens[:, :-1], tokens[:, 1:])], 1.0)
    for part, before in pairwise(parts):
        assert max(events.index(name) for name in weights[part]) < events.index(before)


def test_a_matrix_shared_by_two_blocks_is_the_newest_copy_in_both():
    shared = torch.nn.Linear(8, 8, bias=False)
    first, second = torch.nn.Sequential(shared), torch.nn.Sequential(shared)
    copies = ComputeCopies(
        torch.nn.Sequential(first, second), read_precision("bf16-mixed", "fp32"), [[first], [second]]
    )
    (weight,) = copies.parameters()
    inputs = torch.randn(3, 8).bfloat16()
    for _ in range(2):
        low_precision = weight.detach().bfloat16().requires_grad_()
        (inputs @ low_precision.T @ low_precision.T).sum().backward()
        weight.grad = None
        copies(inputs).sum().backward()
        assert torch.equal(weight.grad, low_precision.grad.float())
        weight.data += 1
        copies.refresh()
