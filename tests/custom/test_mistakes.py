"""The mistakes that people make in loops of their own are impossible, or named in one sentence."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.parallel import DataParallel
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import shoal
from shoal.mistakes import UserMistake
from tests.custom.loops import BATCH, SAMPLES, Network, Noisy, make, settings
from tests.harness import lines, run_ranks


class Endless(IterableDataset[int]):
    def __iter__(self) -> Any:
        yield 1


def others_optimizer(parts: list[Any]) -> None:
    parts[1] = torch.optim.SGD(Network().parameters())
    parts[3] = None


def distributed_sampler(parts: list[Any]) -> None:
    parts[2] = DataLoader(Noisy(), batch_size=BATCH, sampler=DistributedSampler(Noisy(), 2, 0))


def replacement(parts: list[Any]) -> None:
    parts[2] = DataLoader(Noisy(), batch_size=BATCH, sampler=RandomSampler(Noisy(), replacement=True))


def no_length(parts: list[Any]) -> None:
    parts[2] = DataLoader(Endless())


def a_list(parts: list[Any]) -> None:
    parts[2] = [1, 2]


def wrapped(parts: list[Any]) -> None:
    parts[0] = DataParallel(parts[0])


def frozen(parts: list[Any]) -> None:
    parts[0].requires_grad_(False)


def stepped(parts: list[Any]) -> None:
    parts[0](torch.zeros(1, 2, 6)).sum().backward()
    parts[1].step()


def with_state(parts: list[Any]) -> None:
    parts[1] = torch.optim.Adagrad(parts[0].parameters())


def others_schedule(parts: list[Any]) -> None:
    parts[3] = make()[3]


def on_meta(parts: list[Any]) -> None:
    with torch.device("meta"):
        parts[0] = Network()


def two_networks(parts: list[Any]) -> None:
    other = Network()
    other.head = parts[0].head
    parts[0] = (parts[0], other)


def two_optimizers(parts: list[Any]) -> None:
    parts[1] = [parts[1], torch.optim.SGD(parts[0].parameters())]


def one_parameter_twice(parts: list[Any]) -> None:
    parts[1], parts[3] = [parts[1], torch.optim.SGD(parts[0].parameters())], None


def not_a_network(parts: list[Any]) -> None:
    parts[0] = [parts[0], "critic"]


BEFORE = {
    two_networks: "The networks '0' and '1' share a parameter; make them parts of one module",
    two_optimizers: "There are 2 optimizers and 1 schedules; give one for each",
    one_parameter_twice: "stem.weight is in two optimizers, '0' and '1'",
    not_a_network: "'1' of the networks is a str, not a torch nn.Module.",
    others_optimizer: "The optimizer has 16 parameters that the model does not have",
    distributed_sampler: "The loader has a DistributedSampler of its own; leave it out",
    replacement: "The loader has a RandomSampler of its own",
    no_length: "has no length and no index",
    a_list: "run.prepare takes a torch DataLoader, not a list.",
    wrapped: "The model is already wrapped by DataParallel",
    frozen: "The model has no parameter that is trained",
    stepped: "The optimizer was stepped before run.prepare",
    with_state: "Adagrad has state before its first step",
    others_schedule: "The schedule belongs to another optimizer",
    on_meta: "The model is on the meta device",
}

Body = Callable[[Any, Any, Any, Any, Any], None]


def forgotten_step(run: Any, loss: Any, model: Any, optimizer: Any, schedule: Any) -> None:
    run.backward(loss)


def own_backward(run: Any, loss: Any, model: Any, optimizer: Any, schedule: Any) -> None:
    loss.backward()
    run.step(optimizer, schedule)


def nothing(run: Any, loss: Any, model: Any, optimizer: Any, schedule: Any) -> None:
    pass


def twice(run: Any, loss: Any, model: Any, optimizer: Any, schedule: Any) -> None:
    run.backward(loss * 0.5)
    run.backward(loss * 0.5)


def not_a_mean(run: Any, loss: Any, model: Any, optimizer: Any, schedule: Any) -> None:
    run.backward(loss.expand(8))


def detached(run: Any, loss: Any, model: Any, optimizer: Any, schedule: Any) -> None:
    run.backward(loss.detach())


def step_twice(run: Any, loss: Any, model: Any, optimizer: Any, schedule: Any) -> None:
    run.backward(loss)
    run.step(optimizer, schedule)
    run.step(optimizer, schedule)


def without_the_schedule(run: Any, loss: Any, model: Any, optimizer: Any, schedule: Any) -> None:
    run.backward(loss)
    run.step(optimizer)


def prepared_twice(run: Any, loss: Any, model: Any, optimizer: Any, schedule: Any) -> None:
    run.prepare(*make())


def many_weights(run: Any, loss: Any, model: Any, optimizer: Any, schedule: Any) -> None:
    run.backward(loss, weight=torch.ones(2))


INSIDE: dict[Body, str] = {
    many_weights: "The weight has shape (2,); run.backward takes what the loss is the mean over, a single number.",
    forgotten_step: "run.step(optimizer) was not called for a batch of run.steps; call it once for each: gradients are",
    own_backward: "run.step was called before run.backward(loss), which replaces loss.backward().",
    nothing: "run.backward(loss) was not called for a batch of run.steps",
    twice: "run.backward was called twice for one micro-batch; add the losses, and call it once.",
    not_a_mean: "The loss has shape (8,); run.backward takes the mean over the micro-batch",
    detached: "The loss has no gradient; was it detached",
    step_twice: "run.step was called twice for one micro-batch.",
    without_the_schedule: "run.step takes the schedule that was given to run.prepare",
    prepared_twice: "run.prepare was called already",
}

CONFIGS: dict[str, dict[str, Any]] = {
    "parallel.engine deepspeed is for shoal train; use native in a custom loop": {"parallel__engine": "deepspeed"},
    "parallel.tp 2 needs a language model": {"parallel__tp": 2, "parallel__strategy": "ddp"},
    "train.global_batch is 16, but the loader's batch_size is 8": {"train__global_batch": 16},
    "train.micro_batch 3 does not divide the 8 samples": {"train__micro_batch": 3},
    "train.micro_batch 2 × train.grad_accum 3 is not the 8 samples": {"train__micro_batch": 2, "train__grad_accum": 3},
    "train.tokens counts the tokens of language models": {"train__steps": None, "train__tokens": 9},
    "no module of Network is a Blok. Did you mean Block?": {
        "parallel__wrap": {"classes": ["Blok"]},
        "train__recompute": "full",
    },
    "train.precision fp8 is for the blocks of language models": {"train__precision": "fp8"},
}


def sentence(act: Callable[[], None]) -> str:
    try:
        act()
    except UserMistake as mistake:
        return str(mistake)
    return "no mistake was found"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What is said of each mistake. All in one rank: none of them leaves anything behind."""
    runs = tmp_path_factory.mktemp("runs")

    def before(change: Callable[[list[Any]], None]) -> None:
        with shoal.init(run_dir=str(runs), **settings(name=change.__name__)) as run:
            parts = list(make())
            change(parts)
            run.prepare(*parts)

    def inside(body: Body) -> None:
        with shoal.init(run_dir=str(runs), **settings(name=body.__name__)) as run:
            model, optimizer, loader, schedule = run.prepare(*make())
            for images, labels in run.steps(loader):
                body(run, nn.functional.cross_entropy(model(images), labels), model, optimizer, schedule)

    def configured(changes: dict[str, Any]) -> None:
        with shoal.init(run_dir=str(runs), overwrite=True, **settings(name="configured", **changes)) as run:
            run.prepare(*make())

    def outside() -> None:
        with shoal.init(run_dir=str(runs), **settings(name="outside")) as run:
            loader = run.prepare(*make())[2]
            next(iter(loader))

    def again() -> None:
        for _ in range(2):
            with shoal.init(run_dir=str(runs), **settings(name="again", train__steps=1)) as run:
                model, optimizer, loader, schedule = run.prepare(*make())
                for images, labels in run.steps(loader):
                    run.backward(nn.functional.cross_entropy(model(images), labels))
                    run.step(optimizer, schedule)

    def look() -> dict[str, str]:
        answers = {change.__name__: sentence(lambda change=change: before(change)) for change in BEFORE}
        answers |= {body.__name__: sentence(lambda body=body: inside(body)) for body in INSIDE}
        answers |= {said: sentence(lambda changes=changes: configured(changes)) for said, changes in CONFIGS.items()}
        return {**answers, "outside": sentence(outside), "again": sentence(again)}

    return run_ranks(1, look)[0]


@pytest.mark.parametrize("case", [*BEFORE, *INSIDE], ids=lambda case: case.__name__)
def test_a_mistake_is_one_sentence(case: Any, found: dict[str, str]) -> None:
    expected = BEFORE.get(case) or INSIDE[case]
    assert expected in found[case.__name__]
    assert "\n" not in found[case.__name__]


@pytest.mark.parametrize("said", CONFIGS)
def test_a_config_that_does_not_fit_is_one_sentence(said: str, found: dict[str, str]) -> None:
    assert said in found[said]


def test_a_prepared_loader_is_read_by_steps_only(found: dict[str, str]) -> None:
    assert found["outside"] == "The loader is prepared: iterate over run.steps(loader), not over the loader itself."


def test_an_existing_run_is_not_overwritten(found: dict[str, str]) -> None:
    assert "already holds a run; add resume=True to continue it, overwrite=True to delete it" in found["again"]


def test_a_zero_grad_left_in_the_loop_discards_nothing_and_a_copy_of_the_model_is_a_plain_one(tmp_path: Path) -> None:
    def train(name: str, *, extra: bool) -> list[float]:
        with shoal.init(run_dir=str(tmp_path), **settings(name=name, train__micro_batch=2, train__steps=2)) as run:
            model, optimizer, loader, schedule = run.prepare(*make())
            for images, labels in run.steps(loader):
                if extra:
                    optimizer.zero_grad()
                run.backward(nn.functional.cross_entropy(model(images), labels))
                run.step(optimizer, schedule)
            average = copy.deepcopy(model)
            image = torch.ones(1, 2, 6)
            assert torch.equal(average(image), model(image))
            return [float(one.sum()) for one in model.parameters()]

    def both() -> None:
        assert train("with", extra=True) == train("without", extra=False)

    run_ranks(1, both)


class Tied(nn.Module):
    """Two names for one weight, and a buffer of a dtype that gloo does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.register_buffer("counted", torch.zeros(2, dtype=torch.int16))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(image)).sum(1)[:, :3]


def test_a_loop_that_is_left_says_so_and_its_weights_load_into_a_plain_model(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def leave() -> None:
        with shoal.init(run_dir=str(tmp_path), **settings(train__steps=6, checkpoint__every=100)) as run:
            model = Tied()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model, optimizer, loader = run.prepare(model, optimizer, make()[2])
            model.counted += run.rank + 1
            for images, labels in run.steps(loader):
                loss = nn.functional.cross_entropy(model(images), labels)
                run.backward(loss, weight=torch.tensor([float(len(images))]))
                run.step(optimizer)
                if run.step_number == 2:
                    break
            run.evaluate(lambda batch: nn.functional.cross_entropy(model(batch[0]), batch[1]), make()[2])
            run.save_weights(tmp_path / "weights.safetensors")
            assert model.counted.tolist() == [1, 1]

    run_ranks(2, leave)
    assert "the loop was left after step 2 of 6" in capfd.readouterr().err
    assert json.loads((tmp_path / "run" / "outcome.json").read_text())["state"] == "stopped"
    plain = Tied()
    plain.load_state_dict(load_file(tmp_path / "weights.safetensors"))
    assert plain.counted.tolist() == [1, 1]
    assert not list(tmp_path.glob(".weights*"))


def test_weights_that_cannot_be_written_are_one_sentence_on_every_rank(tmp_path: Path) -> None:
    def save() -> str:
        with shoal.init(run_dir=str(tmp_path), **settings()) as run:
            run.prepare(*make())
            return sentence(lambda: run.save_weights(tmp_path / "none" / "weights.safetensors"))

    first, second = run_ranks(2, save)
    assert first.startswith("The weights could not be written to")
    assert second.startswith("Rank 0 could not write")


def test_a_cell_of_a_notebook_may_run_again_without_closing_the_run(tmp_path: Path) -> None:
    def cell() -> int:
        run = shoal.init(settings(train__steps=1), run_dir=str(tmp_path), overwrite=True)
        model, optimizer, loader, schedule = run.prepare(*make())
        for images, labels in run.steps(loader):
            run.backward(nn.functional.cross_entropy(model(images), labels))
            run.step(optimizer, schedule)
        return run.step_number

    assert run_ranks(1, lambda: [cell(), cell()])[0] == [1, 1]


def test_the_learning_rate_follows_the_global_batch_if_asked(tmp_path: Path) -> None:
    def rates() -> list[float]:
        found: list[float] = []
        scaled = settings(train__lr_scaling="linear", train__base_batch=2, train__steps=2)
        with shoal.init(run_dir=str(tmp_path), **scaled) as run:
            model = nn.Linear(1, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            loader = DataLoader(TensorDataset(torch.ones(8, 1)), batch_size=8)
            model, optimizer, loader = run.prepare(model, optimizer, loader)
            for (inputs,) in run.steps(loader):
                before = float(model.bias.detach())
                run.backward(model(inputs).mean() * 0 + model.bias.sum())
                run.step(optimizer)
                found.append(before - float(model.bias.detach()))
        return found

    assert run_ranks(1, rates)[0] == pytest.approx([2.0, 2.0], rel=1e-5)  # 0.5 × 8 / 2, and a gradient of one


def test_a_schedule_may_advance_after_every_epoch_also_where_the_run_was_resumed(tmp_path: Path) -> None:
    def train(steps: int, resume: bool) -> None:
        with shoal.init(run_dir=str(tmp_path), resume=resume, **settings(train__steps=steps)) as run:
            model, optimizer, loader, _ = make()
            halved = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            model, optimizer, loader, halved = run.prepare(model, optimizer, loader, halved, schedule_per="epoch")
            for images, labels in run.steps(loader):
                assert run.epoch == run.step_number // len(loader)
                run.backward(nn.functional.cross_entropy(model(images), labels))
                run.step(optimizer, halved)

    run_ranks(1, lambda: train(7, False))
    run_ranks(1, lambda: train(11, True))
    per_epoch = SAMPLES // BATCH
    assert [line["lr"] for line in lines(tmp_path / "run")] == [1e-2 * 0.5 ** (step // per_epoch) for step in range(11)]
