"""Optimizers that take turns: two ranks are one process, a resumed run is the uninterrupted one, and mistakes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.config.schema import Config
from shoal.mistakes import UserMistake
from tests.checkpoint.cut import cut, hold_bitwise
from tests.custom.loops import settings
from tests.harness import lines, run_ranks, slow, weights

STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"parallel__strategy": "ddp"},
    "zero1": {"parallel__strategy": "zero1"},
    "zero2": {"parallel__strategy": "zero2"},
    "fsdp": {"parallel__strategy": "fsdp", "parallel__wrap": {"classes": ["Linear"]}},
    "bf16": {"parallel__strategy": "ddp", "train__precision": "bf16-mixed"},
}


class Adversaries:
    """A generator and a critic with their optimizers and schedules, and what each of them learns."""

    def __init__(self) -> None:
        self.generator = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
        self.critic = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1))
        self.critics = torch.optim.Adam(self.critic.parameters(), lr=1e-1)
        self.generators = torch.optim.AdamW(self.generator.parameters(), lr=1e-2)
        self.schedule = StepLR(self.critics, 1, 0.5)

    def prepare(self, run: Any) -> Any:
        drawn = torch.Generator().manual_seed(3)
        points = TensorDataset(torch.randn(32, 2, generator=drawn), torch.randn(32, 4, generator=drawn))
        networks = {"generator": self.generator, "critic": self.critic}
        optimizers = {"critic": self.critics, "generator": self.generators}
        return run.prepare(networks, optimizers, DataLoader(points, batch_size=8), {"critic": self.schedule})[2]

    def critic_loss(self, real: Tensor, noise: Tensor) -> Tensor:
        with torch.no_grad():
            made = self.generator(noise)
        return F.softplus(-self.critic(real)).mean() + F.softplus(self.critic(made)).mean()

    def generator_loss(self, noise: Tensor) -> Tensor:
        return F.softplus(-self.critic(self.generator(noise))).mean()


def by_step(run: Any, both: Adversaries, real: Tensor, noise: Tensor) -> None:
    """Two steps of the critic, then one of the generator."""
    if run.step_number % 3 < 2:
        run.backward(both.critic_loss(real, noise))
        run.step(both.critics, both.schedule)
    else:
        run.backward(both.generator_loss(noise))
        run.step(both.generators)


def in_each_step(run: Any, both: Adversaries, real: Tensor, noise: Tensor) -> None:
    """The critic on every batch, twice, and the generator after it on every second one."""
    for _ in range(2):
        run.backward(both.critic_loss(real, noise))
        run.step(both.critics, both.schedule)
    if run.step_number % 2 == 0:
        run.backward(both.generator_loss(noise))
        run.step(both.generators)


def together(run: Any, both: Adversaries, real: Tensor, noise: Tensor) -> None:
    """One backward pass, two optimizers."""
    run.backward(both.critic_loss(real, noise) + both.generator_loss(noise))
    run.step(both.critics, both.schedule)
    run.step(both.generators)


Body = Callable[[Any, Adversaries, Tensor, Tensor], None]


def play(body: Body, runs: Path, **given: Any) -> None:
    resume = given.pop("resume", False)
    with shoal.init(
        run_dir=str(runs), resume=resume, **settings(**{"train__steps": 4, "train__clip": 0.1, **given})
    ) as run:
        both = Adversaries()
        for real, noise in run.steps(both.prepare(run)):
            body(run, both, real, noise)


def play_on(world_size: int, body: Body, runs: Path, **given: Any) -> Path:
    run_ranks(world_size, lambda: play(body, runs, **given))
    return runs / "run"


def by_hand(body: Body) -> dict[str, Tensor]:
    """The weights after the same loop in plain torch."""
    torch.manual_seed(Config.model_fields["seed"].default)
    both = Adversaries()

    class Plain:
        step_number = batch = 0  # a step counts from its first update on

        def prepare(self, *parts: Any) -> Any:
            return parts

        def backward(self, loss: Tensor) -> None:
            both.critic.zero_grad()
            both.generator.zero_grad()
            loss.backward()

        def step(self, optimizer: Any, schedule: Any = None) -> None:
            nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.1)
            optimizer.step()
            if schedule is not None:
                schedule.step()
            self.step_number = self.batch

    run = Plain()
    for real, noise in both.prepare(run):
        run.batch += 1
        body(run, both, real, noise)
    networks = nn.ModuleDict({"generator": both.generator, "critic": both.critic})
    return {name: one.detach() for name, one in networks.named_parameters()}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[Body, Path]:
    """One process with the micro-batches of two ranks, where a step may have two, else with the whole batch."""
    split = {by_step: {"train__micro_batch": 4}}
    bodies: tuple[Body, ...] = (by_step, in_each_step, together)
    return {body: play_on(1, body, tmp_path_factory.mktemp(body.__name__), **split.get(body, {})) for body in bodies}


@pytest.mark.parametrize("body", [by_step, in_each_step, together], ids=lambda body: body.__name__)
def test_it_is_the_loop_in_plain_torch(body: Body, one: dict[Body, Path]) -> None:
    found, expected = weights(one[body]), by_hand(body)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("ddp", by_step),
        ("fsdp", in_each_step),
        slow("fsdp", by_step),
        slow("ddp", in_each_step),
        slow("zero1", in_each_step),
        slow("zero2", in_each_step),
        slow("zero1", together),
        slow("fsdp", together),
    ],
)
def test_two_ranks_are_one_process(name: str, body: Body, one: dict[Body, Path], tmp_path: Path) -> None:
    two = play_on(2, body, tmp_path, **STRATEGIES[name])
    found_lines, before_lines = (
        [{key: one for key, one in line.items() if key.startswith(("loss", "grad_norm", "lr"))} for line in lines(run)]
        for run in (two, one[body])
    )
    assert found_lines == [pytest.approx(line, rel=1e-5) for line in before_lines]
    assert "lr_critic" in found_lines[0]
    assert "grad_norm_generator" in found_lines[-1]
    found, before = weights(two), weights(one[body])
    for key, tensor in before.items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-5, atol=1e-6)
    if body is by_step:  # the same micro-batches
        assert [line["loss"] for line in lines(two)] == [line["loss"] for line in lines(one[body])]
        assert [key for key in before if not torch.equal(found[key], before[key])] == []


@pytest.mark.slow
def test_low_precision_and_accumulation_take_turns_too(one: dict[Body, Path], tmp_path: Path) -> None:
    two = play_on(2, by_step, tmp_path, train__micro_batch=2, **STRATEGIES["bf16"])
    expected = [line["loss"] for line in lines(one[by_step])]
    assert [line["loss"] for line in lines(two)] == pytest.approx(expected, rel=2e-2)


@pytest.mark.parametrize(("name", "body"), [("fsdp", by_step), slow("zero1", in_each_step), slow("ddp", together)])
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(name: str, body: Body, tmp_path: Path) -> None:
    run = play_on(2, body, tmp_path / "whole", **STRATEGIES[name])
    copy = cut(run, 2, tmp_path / "cut")
    play_on(2, body, tmp_path / "cut", resume=True, **STRATEGIES[name])
    hold_bitwise(copy, run, counted="samples")
    last = [lines(each)[-1] for each in (copy, run)]
    assert last[0]["loss_critic"] == last[1]["loss_critic"]


def two_turns(run: Any, both: Adversaries, real: Tensor, noise: Tensor) -> None:
    in_each_step(run, both, real, noise)


def by_batch(run: Any, both: Adversaries, real: Tensor, noise: Tensor) -> None:
    run.backward(both.critic_loss(real, noise) + both.generator_loss(noise))
    both.turns = not getattr(both, "turns", False)  # type: ignore[attr-defined]
    run.step(both.critics, both.schedule) if both.turns else run.step(both.generators)  # type: ignore[attr-defined]


def again(run: Any, both: Adversaries, real: Tensor, noise: Tensor) -> None:
    run.backward(both.generator_loss(noise))
    run.step(both.generators)
    run.step(both.generators)


def unknown(run: Any, both: Adversaries, real: Tensor, noise: Tensor) -> None:
    run.backward(both.generator_loss(noise))
    run.step(torch.optim.SGD(both.generator.parameters()))


MISTAKES = [
    (two_turns, {"train__micro_batch": 4}, "With gradient accumulation a step has one turn"),
    (by_batch, {"train__micro_batch": 4}, "The micro-batches of a step had turns of different optimizers"),
    (again, {}, "run.step was called twice for one backward pass"),
    (unknown, {}, "run.step takes one of the optimizers that run.prepare returned"),
    (together, {"train__precision": "16-mixed"}, "With train.precision 16-mixed each optimizer needs a run.backward"),
    (together, {"parallel__compress": "bf16"}, "parallel.compress bf16 is for one model with one optimizer"),
]


def test_a_mistake_in_a_turn_is_one_sentence(tmp_path: Path) -> None:
    def sentence(number: int) -> str:
        body, changes, _ = MISTAKES[number]
        try:
            play(body, tmp_path, name=str(number), **changes)
        except UserMistake as mistake:
            return str(mistake)
        return "no mistake was found"

    found = run_ranks(1, lambda: [sentence(number) for number in range(len(MISTAKES))])[0]
    for said, (_, _, expected) in zip(found, MISTAKES, strict=True):
        assert expected in said
        assert "\n" not in said
