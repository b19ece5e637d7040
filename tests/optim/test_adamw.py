"""Our AdamW matches torch.optim.AdamW, and each can load the other's state."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from shoal.config.schema import TrainConfig
from shoal.optim.adamw import AdamW
from shoal.optim.lion import Lion
from shoal.optim.optimizer import make_optimizer
from tests.harness import NEEDS_TRITON, compared_in_interpreter

USABLE = torch.tensor(True)


def weights_of(seed: int) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((33, 65), (7,), (1,))]


def give_gradients(step: int, *models: list[nn.Parameter]) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for together in zip(*models, strict=True):
        gradient = torch.randn(together[0].shape, generator=generator)
        for weight in together:
            weight.grad = gradient.clone()


def test_it_matches_torch_and_continues_from_its_state():
    options = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
    ours, theirs = weights_of(0), weights_of(0)
    our, their = AdamW(ours, **options), torch.optim.AdamW(theirs, **options)
    for step in range(6):
        if step == 3:  # each continues from the other's state
            our_state, their_state = ([dict(one.state[w]) for w in ws] for one, ws in ((our, ours), (their, theirs)))
            for weight, state in zip(ours, their_state, strict=True):
                our.state[weight] = {field: value.clone() for field, value in state.items()}
            for weight, state in zip(theirs, our_state, strict=True):
                their.state[weight] = {field: value.clone() for field, value in state.items()}
        give_gradients(step, ours, theirs)
        our.step(USABLE)
        their.step()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
        assert our.state[one]["step"] == their.state[other]["step"] == 6
        assert {field: value.shape for field, value in our.state[one].items()} == {
            field: value.shape for field, value in their.state[other].items()
        }


@pytest.mark.parametrize("make", [AdamW, partial(AdamW, eight_bits=True), Lion], ids=["adamw", "adamw8bit", "lion"])
def test_gradients_are_scaled_by_the_factor_and_compute_copies_are_the_cast_weights(make):
    one, other = weights_of(0)[:1], weights_of(0)[:1]
    copies = {one[0]: torch.zeros(33, 65, dtype=torch.bfloat16)}
    first, second = (make(some, lr=1e-2) for some in (one, other))
    for step in range(3):
        give_gradients(step, one, other)
        factor = torch.tensor(0.25**step)  # a constant one would make no difference to Lion
        first.step(USABLE, factor, copies)
        other[0].grad.mul_(factor)
        second.step(USABLE)
    assert torch.equal(one[0], other[0])
    assert torch.equal(copies[one[0]], one[0].bfloat16())


def test_a_parameter_without_a_gradient_keeps_its_step_count_and_its_moments():
    ours, theirs = weights_of(0), weights_of(0)
    our, their = AdamW(ours, lr=1e-2), torch.optim.AdamW(theirs, lr=1e-2, weight_decay=0.0)
    for step in range(4):
        give_gradients(step, ours, theirs)
        if step in (1, 2):  # a second time without one of the three, but without another
            ours[step - 1].grad = theirs[step - 1].grad = None
        our.step(USABLE)
        their.step()
    assert [float(our.state[weight]["step"]) for weight in ours] == [3, 3, 4]
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["adamw", "adamw8bit", "sgd", "lion"])
def test_a_non_finite_step_changes_neither_weights_nor_state(name):
    weight = nn.Parameter(torch.randn(70, 70))
    copies = {weight: weight.detach().bfloat16()}
    train = TrainConfig.model_validate({"optimizer": {"name": name}})
    optimizer = make_optimizer({"weight": weight}, train, None, copies=copies)  # type: ignore[arg-type]
    weight.grad = torch.randn(70, 70)
    optimizer.step(0.1, USABLE)
    before = {key: value.clone() for key, value in (optimizer.state() | {"weight": weight.detach()}).items()}
    written = copies[weight].clone()
    weight.grad = torch.full((70, 70), torch.nan)
    optimizer.step(0.1, torch.tensor(False), torch.tensor(torch.nan) if optimizer.takes_factor else None)
    after = optimizer.state() | {"weight": weight.detach()}
    assert after.keys() == before.keys()
    assert [key for key in before if not torch.equal(after[key], before[key])] == []
    assert torch.equal(copies[weight], written)


@NEEDS_TRITON
def test_the_kernels_in_tritons_interpreter_match_the_eager_implementations():
    assert compared_in_interpreter(Path(__file__).with_name("kernels_interpreted.py")) == 32
