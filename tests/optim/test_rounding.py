"""Stochastic rounding of bf16 weights: right on average, the same on any mesh and after a resume."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.config.schema import TrainConfig
from shoal.models.tensor_slices import SliceMapping, Split, TensorSlice, slice_mappings, whole
from shoal.optim.optimizer import make_optimizer
from shoal.optim.rounding import StochasticRounding, rounding_key
from tests.checkpoint.cut import column, cut, everything, hold_bitwise
from tests.harness import settings, slow, train_again_on, train_on

CPU = torch.device("cpu")
STOCHASTIC = {"name": "adamw", "rounding": "stochastic"}


def rounding_of(shape: tuple[int, ...], seed: int = 0) -> StochasticRounding:
    held = [SliceMapping(whole(shape), whole(shape))]
    return StochasticRounding(rounding_key(seed, "weight"), shape, shape, held, CPU)


def step(number: int) -> Tensor:
    return torch.tensor(float(number))


def test_values_are_rounded_to_one_of_two_neighbours_and_are_right_on_average():
    values = torch.linspace(-3, 3, 601)
    below = ((values.view(torch.int32)) & -65536).view(torch.float32)
    above = torch.where(below == values, values, ((values.view(torch.int32) & -65536) + 65536).view(torch.float32))
    times = 2000
    rounded = rounding_of((times, 601)).round(values.repeat(times, 1), step(7))
    assert bool(((rounded == below) | (rounded == above)).all())
    # The error of a mean in units of its own standard deviation: normally distributed.
    share = ((values - below) / (above - below)).nan_to_num()
    deviation = ((above - below).abs() * (share * (1 - share)).sqrt() / math.sqrt(times)).clamp(min=1e-6)
    errors = (rounded.mean(0) - values) / deviation
    assert float(errors.abs().max()) < 5
    assert abs(float(errors.mean())) < 0.2
    assert float(errors.std()) == pytest.approx(1, abs=0.15)


def test_neighbouring_elements_steps_parameters_and_seeds_are_rounded_independently():
    values = torch.full((100_000,), 1 + 2.0**-8)  # halfway between two values
    one = rounding_of((100_000,))
    other_name = StochasticRounding(rounding_key(0, "other"), one.whole, one.local, one.mappings, CPU)
    ups = [
        (rounding.round(values, step(number)) > 1).double()
        for rounding, number in ((one, 1), (one, 2), (rounding_of((100_000,), seed=1), 1), (other_name, 1))
    ]
    ups.append(ups[0].roll(1))
    for up in ups:
        assert float(up.mean()) == pytest.approx(0.5, abs=0.01)
    agreeing = [float((ups[0] == up).double().mean()) for up in ups[1:]]
    assert agreeing == pytest.approx([0.5] * 4, abs=0.01)


def test_values_that_bf16_has_and_values_that_are_not_finite_stay():
    values = torch.tensor([0.0, -0.0, 1.0, -1.5, 3.3895e38, math.inf, -math.inf, math.nan]).bfloat16().float()
    values[-1] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    for number in range(20):
        rounded = rounding_of((8,)).round(values, step(number))
        assert torch.equal(rounded[:-1], values[:-1])
        assert rounded[-1].isnan()


@pytest.mark.parametrize(
    "split",
    [
        Split(0, 12, ((3, 6),)),
        Split(1, 10, ((5, 5),)),
        Split(0, 12, ((0, 2), (4, 2), (8, 2))),
        Split(1, 10, ((0, 3), (7, 2))),
    ],
    ids=["rows", "columns", "fused rows", "fused columns"],
)
def test_a_part_is_rounded_as_in_the_full_tensor(split):
    values = torch.randn(12, 10)
    wanted = rounding_of((12, 10)).round(values, step(3))
    spans = torch.cat([torch.arange(start, start + length) for start, length in split.spans])
    part = values.index_select(split.dimension, spans)
    held = slice_mappings(part, split)
    local = StochasticRounding(rounding_key(0, "weight"), (12, 10), tuple(part.shape), held, CPU)
    assert torch.equal(local.round(part, step(3)), wanted.index_select(split.dimension, spans))


def test_a_slice_of_experts_is_rounded_as_in_the_full_tensor():
    values = torch.randn(4, 6, 5)
    wanted = rounding_of((4, 6, 5)).round(values, step(3))[1:3, 2:4]
    held = [SliceMapping(TensorSlice((1, 2, 0), (2, 2, 5)), whole((2, 2, 5)))]
    local = StochasticRounding(rounding_key(0, "weight"), (4, 6, 5), (2, 2, 5), held, CPU)
    assert torch.equal(local.round(values[1:3, 2:4].contiguous(), step(3)), wanted)


@pytest.mark.parametrize("name", ["adamw", "adamw8bit"])
def test_updates_smaller_than_the_spacing_of_bf16_are_lost_to_nearest_and_kept_by_stochastic(name):
    """From 1 down by 0.0001 per step, where bf16 values are 0.004 apart."""
    found = {}
    for rounding in ("nearest", "stochastic"):
        weight = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
        train = TrainConfig.model_validate({"optimizer": {"name": name, "rounding": rounding, "weight_decay": 0.0}})
        optimizer = make_optimizer({"weight": weight}, train, None)  # type: ignore[arg-type]
        for _ in range(100):
            weight.grad = torch.ones_like(weight)
            optimizer.step(1e-4, torch.tensor(True))
        found[rounding] = float(weight.detach().double().mean())
    assert found["nearest"] == 1
    assert found["stochastic"] == pytest.approx(0.99, abs=1e-3)


def small(data: Path, name: str, **changes: Any) -> dict[str, Any]:
    batch = {"train__micro_batch": 2, "train__global_batch": 4, "train__steps": 4, "checkpoint__every": 2}
    return settings(data, name=name, train__precision="bf16-true", train__optimizer=STOCHASTIC, **batch, **changes)


@pytest.fixture(scope="module")
def alone(instructions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_again_on(1, small(instructions, "run"), tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", slow("zero1")])
def test_ranks_round_as_one_process_does(strategy, alone, instructions, tmp_path):
    run = train_again_on(2, small(instructions, "run", parallel__strategy=strategy), tmp_path)
    assert column(run, "loss") == column(alone, "loss")
    found, wanted = everything(run), everything(alone)
    trained = [name for name in wanted if name.startswith(("model.", "optimizer."))]
    assert [name for name in trained if not torch.equal(found[name], wanted[name])] == []


def test_a_resumed_run_rounds_as_one_that_was_never_interrupted(alone, instructions, tmp_path):
    resumed = cut(alone, 2, tmp_path)
    train_on(1, small(instructions, "run"), tmp_path, resume=True)
    hold_bitwise(resumed, alone)
