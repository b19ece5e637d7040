"""A custom loop trains the same under every strategy as in one process, and resumes exactly."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.checkpoint.cut import cut, hold_bitwise
from tests.custom.loops import train_on
from tests.harness import lines, slow, weights

STRATEGIES = {
    "ddp": {"parallel__strategy": "ddp"},
    "zero1": {"parallel__strategy": "zero1"},
    "full_shard": {"parallel__sharding": "FULL_SHARD"},
    "shard_grad_op": {"parallel__sharding": "SHARD_GRAD_OP"},
    "zero3": {"parallel__strategy": "zero3"},
    "wrapped by size": {"parallel__strategy": "fsdp", "parallel__wrap": {"min_params": 500}},
    "wrapped by class": {"parallel__strategy": "fsdp", "parallel__wrap": {"classes": ["Block"]}},
    "offload": {"parallel__strategy": "fsdp", "parallel__offload": "cpu"},
    "offloaded optimizer": {"parallel__strategy": "ddp", "parallel__offload": "optimizer"},
    "activation checkpointing": {"parallel__strategy": "fsdp", "train__recompute": "full"},
    "compile": {"parallel__strategy": "ddp", "train__compile": "aot_eager"},
}
QUICK = ("ddp", "full_shard", "shard_grad_op")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run of one process, trained once for each config."""
    found: dict[str, Path] = {}

    def train(**given: Any) -> Path:
        key = json.dumps(given, sort_keys=True)
        if key not in found:
            found[key] = train_on(1, tmp_path_factory.mktemp("one"), **given)
        return found[key]

    return train


@pytest.mark.parametrize("name", [slow("ddp"), "full_shard", slow("bf16")])
def test_an_evaluation_is_the_mean_over_all_samples_on_any_number_of_ranks(name: str, tmp_path: Path) -> None:
    """Batches of 4, 4 and 3 samples on two ranks: one of them has one batch less, and all must call the model alike."""
    torch.manual_seed(7)
    held_out = [(torch.rand(size, 2, 6), torch.randint(0, 3, (size,))) for size in (4, 4, 3)]
    strategies = {**STRATEGIES, "bf16": {"parallel__strategy": "fsdp", "train__precision": "bf16-mixed"}}

    def evaluate(run: Any, model: Any) -> None:
        def compute(batch: Any) -> Any:
            assert not model.training
            assert not torch.is_grad_enabled()
            return functional.cross_entropy(model(batch[0]), batch[1])

        loss = run.evaluate(compute, held_out)
        by_label = run.evaluate(lambda batch: (compute(batch), (batch[1] > 0).sum()), held_out)
        at_once = [tuple(torch.cat(parts) for parts in zip(*held_out, strict=True))]  # fewer batches than ranks
        assert run.evaluate(compute, at_once) == pytest.approx(loss, rel=1e-2 if name == "bf16" else 2e-6)
        assert model.training
        run.log_evaluation(loss, by_label=by_label)

    given = {"dropout": 0.1, **strategies[name]}
    one = train_on(1, tmp_path / "one", each=evaluate, train__steps=1)
    two = train_on(2, tmp_path / "two", each=evaluate, **{**given, "dropout": 0.0, "train__steps": 1})
    found, expected = ([line for line in every_line(run) if "eval_loss" in line] for run in (two, one))
    for key in ("eval_loss", "eval_by_label"):
        assert found[-1][key] == pytest.approx(expected[-1][key], rel=1e-2 if name == "bf16" else 2e-6)
    # It leaves no trace in training: dropout draws the same random numbers.
    with_it = train_on(2, tmp_path / "with", each=evaluate, **given)
    without = train_on(2, tmp_path / "without", **given)
    assert column(with_it, "loss") == column(without, "loss")


def test_an_evaluation_within_a_step_is_not_of_its_time(tmp_path: Path) -> None:
    """Held against the clock of this process, so that it does not matter how long a busy machine takes for a step."""
    clock = tmp_path / "clock.jsonl"

    def evaluate(run: Any, model: Any) -> None:
        began = time.perf_counter()
        run.log_evaluation(run.evaluate(lambda _: time.sleep(0.5) or torch.tensor(1.0), [torch.rand(4)]))
        with clock.open("a") as file:
            file.write(json.dumps([began, time.perf_counter()]) + "\n")

    run = train_on(1, tmp_path, each=evaluate, train__steps=3)
    (_, first_ended), (began, ended), (third_began, _) = map(json.loads, clock.read_text().splitlines())
    third = lines(run)[-1]
    # Step 3 begins when step 2 ends, and both times are between the first evaluation and the third. The second one,
    # of half a second, is within it: if it counted, only a step 2 of half a second would hide that.
    assert third["data_seconds"] < third["seconds"] <= third_began - first_ended - (ended - began) + 1e-6


def every_line(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def column(run: Path, name: str) -> list[float]:
    return [line[name] for line in lines(run)]


@pytest.mark.parametrize("name", [name if name in QUICK else slow(name) for name in STRATEGIES])
def test_two_ranks_equal_one_process_to_the_bit(name: str, reference: Any, tmp_path: Path) -> None:
    one, two = reference(train__micro_batch=4), train_on(2, tmp_path, **STRATEGIES[name])
    for key in ("loss", "grad_norm", "lr", "samples"):
        assert column(two, key) == column(one, key)
    expected, found = weights(one), weights(two)
    assert [key for key in expected if not torch.equal(found[key], expected[key])] == []


@pytest.mark.parametrize("name", ["full_shard", slow("ddp"), slow("shard_grad_op"), slow("zero1")])
def test_accumulation_on_two_ranks_equals_one_process(name: str, reference: Any, tmp_path: Path) -> None:
    one = reference(train__micro_batch=2)
    two = train_on(2, tmp_path, train__micro_batch=2, **STRATEGIES[name])
    assert column(two, "loss") == pytest.approx(column(one, "loss"), rel=2e-6)
    assert column(two, "grad_norm") == pytest.approx(column(one, "grad_norm"), rel=1e-5)


def test_the_split_does_not_change_the_loss_which_is_the_mean_over_the_global_batch(
    reference: Any, tmp_path: Path
) -> None:
    whole = train_on(1, tmp_path)
    assert column(whole, "loss") == pytest.approx(column(reference(train__micro_batch=2), "loss"), rel=2e-6)


@pytest.mark.parametrize("name", ["ddp", slow("full_shard")])
def test_weights_of_unequal_micro_batches_count(name: str, tmp_path: Path) -> None:
    """Each rank has another number of labels that count; the mean is over all of them."""
    whole = train_on(1, tmp_path / "one", weigh=True)
    two = train_on(2, tmp_path / "two", weigh=True, **STRATEGIES[name])
    assert column(two, "loss") == pytest.approx(column(whole, "loss"), rel=2e-6)
    assert column(two, "grad_norm") == pytest.approx(column(whole, "grad_norm"), rel=1e-5)
    unweighted = train_on(1, tmp_path / "unweighted")
    assert column(whole, "loss")[0] != pytest.approx(column(unweighted, "loss")[0], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("name", ["ddp", "full_shard"])
def test_mixed_precision_is_the_same_under_every_strategy(
    name: str, precision: str, reference: Any, tmp_path: Path
) -> None:
    one = reference(train__micro_batch=4, train__precision=precision)
    two = train_on(2, tmp_path, train__precision=precision, **STRATEGIES[name])
    assert column(two, "loss") == pytest.approx(column(one, "loss"), rel=2e-3)
    assert column(one, "loss") != column(reference(train__micro_batch=4), "loss")


@pytest.mark.parametrize(
    ("name", "accumulates"), [("full_shard", True), slow("ddp", False), slow("zero1", False), slow("offload", False)]
)
def test_resume_on_the_same_mesh_is_the_uninterrupted_run_to_the_bit(
    name: str, accumulates: bool, tmp_path: Path
) -> None:
    given = {"dropout": 0.2, **STRATEGIES[name], **({"train__micro_batch": 2} if accumulates else {})}
    run = train_on(2, tmp_path / "whole", **given)
    copy = cut(run, 2, tmp_path / "cut")
    train_on(2, tmp_path / "cut", resume=True, **given)
    hold_bitwise(copy, run, counted="samples")


@pytest.mark.parametrize("world_size", [slow(1), slow(4)])
def test_resume_on_another_world_size_continues_the_run(world_size: int, reference: Any, tmp_path: Path) -> None:
    run = train_on(2, tmp_path / "whole", **STRATEGIES["full_shard"])
    copy = cut(run, 2, tmp_path / "cut")
    train_on(world_size, tmp_path / "cut", resume=True, train__micro_batch=4 if world_size == 1 else 2)
    assert column(copy, "loss") == pytest.approx(column(run, "loss"), rel=2e-6)
    assert column(copy, "lr") == column(run, "lr")
