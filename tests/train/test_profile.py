"""`shoal train --profile`: what it writes, and that the run is the same with it."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from shoal import api
from shoal.config.load import config_from_mapping
from shoal.observe.profile.classify import TERMS
from shoal.observe.profile.summary import profile_text
from shoal.plan.decide import choose
from shoal.plan.machine import read_machine
from shoal.plan.models import read_shape
from shoal.plan.resolved import ResolvedRun
from shoal.train.profile_advice import FORECAST, REPEATED, find_bottleneck, forecast_terms
from tests.harness import lines, reference_run, settings, slow, train_on
from tests.launch.command import forked_shoal, write_config


def sharded(text: Path, strategy: str = "fsdp") -> dict[str, Any]:
    return settings(text, train__steps=7, parallel__strategy=strategy, data__workers=1)


@pytest.mark.parametrize("strategy", ["fsdp", slow("ddp")])
def test_two_ranks_are_profiled_and_train_the_same(strategy: str, text: Path, tmp_path: Path) -> None:
    run = train_on(2, sharded(text, strategy), tmp_path, profile=2)
    found = api.read_profile(run)
    assert found is not None
    assert (found["steps"], found["world_size"], found["device"]) == (2, 2, "cpu")
    for one in (found, *found["ranks"]):
        assert sum(one["terms"][term] for term in TERMS) == pytest.approx(found["step_seconds"], rel=0.5)
    assert sum(found["terms"].values()) == pytest.approx(found["step_seconds"])
    assert min(found["terms"][term] for term in ("matmul", "attention", "elementwise", "optimizer")) > 0
    assert all(one["terms"]["communication"] > 0 for one in found["ranks"]), "gloo's collectives are exposed here"
    assert set(found["forecast"]["terms"]) == set(TERMS)
    assert found["bottleneck"]["sentence"].endswith(".")
    assert found["bottleneck"]["sentence"] in profile_text(found)
    assert found["memory"]["peak_gib"] > found["memory"]["lowest_gib"] >= 0
    for rank in range(2):
        with gzip.open(run / "profile" / f"rank-{rank}.trace.json.gz", "rt") as file:
            names = {event["name"] for event in json.load(file)["traceEvents"]}
        assert {"aten::mm", "shoal.data", "shoal.optimizer"} <= names

    before = lines(reference_run(sharded(text, strategy), 2))
    assert [(one["loss"], one["grad_norm"]) for one in lines(run)] == [
        (one["loss"], one["grad_norm"]) for one in before
    ]
    assert not any("profiled" in one for one in before)
    # The first step warms up, four are recorded, and in the next one ranks wait for each other's files.
    assert [one["step"] for one in lines(run) if one.get("profiled")] == [3, 4, 5, 6, 7]


@pytest.mark.slow
def test_the_command_prints_the_table_and_says_so_if_there_are_too_few_steps(text: Path, tmp_path: Path) -> None:
    write_config(tmp_path, settings(text, train__steps=6, checkpoint__at_end=False))
    done = forked_shoal(tmp_path, "train", "run.yaml", "--profile", "2", "--json")
    assert done.status == 0, done.err
    found = json.loads(done.out)["profile"]
    assert found == json.loads((tmp_path / "runs/run/profile/summary.json").read_text())
    assert (found["steps"], found["profiled"]) == (2, [4, 5])

    short = forked_shoal(tmp_path, "train", "run.yaml", "--overwrite", "--profile", "train.steps=3", "--json")
    assert short.status == 0, short.err
    assert json.loads(short.out)["profile"] is None
    assert "no step is profiled: 3 steps are left, and a profile needs 4 or more." in short.err


def planned(**changes: Any) -> ResolvedRun:
    config = config_from_mapping(
        {
            "name": "plan",
            "model": {"shape": "llama3-8b"},
            "data": {"path": "data.json", "max_length": 4096, **changes.pop("data", {})},
            "train": {"global_batch": 64, "micro_batch": 1, "recompute": "full", **changes.pop("train", {})},
            "hardware": {"gpu": "h100-80gb", "devices": 8},
            "parallel": {"strategy": "fsdp", **changes.pop("parallel", {})},
            "checkpoint": changes.pop("checkpoint", {}),
        }
    )
    assert not changes
    return choose(config, read_shape(config.model), read_machine(config.hardware))


@pytest.mark.parametrize(
    ("train", "parallel"),
    [
        ({}, {}),
        ({"recompute": "selective", "precision": "fp8"}, {"tp": 2, "cp": 2}),
        ({"recompute": "offload"}, {"offload": "optimizer"}),
        ({}, {"strategy": "zero1"}),
        ({}, {"pp": 2, "strategy": "ddp"}),
    ],
)
def test_every_term_of_the_forecast_has_its_place_in_the_table(train: Any, parallel: Any) -> None:
    resolved = planned(train=train, parallel=parallel)
    found = forecast_terms(resolved)
    assert {leaf.name for leaf in resolved.speed.step.leaves()} <= {*FORECAST, *REPEATED}
    assert sum(found.values()) == pytest.approx(resolved.speed.step_seconds)
    assert min(found["matmul"], found["attention"], found["elementwise"], found["optimizer"]) > 0


@pytest.mark.parametrize(
    ("takes", "key"),
    [
        ({"data": 0.1}, "data.workers"),  # of one worker
        ({"communication": 0.3, "matmul": 0.6}, "train.micro_batch"),
        ({"idle": 0.4, "matmul": 0.6}, "train.micro_batch"),
        ({"matmul": 0.8}, "train.recompute"),
    ],
)
def test_the_bottleneck_comes_with_a_key_to_try(takes: dict[str, float], key: str) -> None:
    terms = dict.fromkeys(TERMS, 0.0) | {"matmul": 0.7} | takes
    found = find_bottleneck(terms, planned(data={"workers": 1}))
    assert found.term == next(iter(takes))
    assert found.settings is not None
    assert list(found.settings) == [key]
    assert f"try {key}={found.settings[key]}" in found.sentence


def test_a_setting_that_the_run_has_is_not_what_to_try() -> None:
    terms = dict.fromkeys(TERMS, 0.0) | {"matmul": 0.7, "data": 0.1}
    found = find_bottleneck(terms, planned(data={"workers": os.cpu_count() or 2}))
    assert found.settings is None
    assert found.sentence.endswith("is waiting for data; put the prepared data on a faster disk (SHOAL_CACHE=FOLDER).")


@pytest.mark.parametrize(("saved", "tries"), [(2, "checkpoint.every=4"), (500, "eval.every=400")])
def test_the_more_frequent_of_saves_and_evaluations_is_made_rarer(saved: int, tries: str) -> None:
    terms = dict.fromkeys(TERMS, 0.0) | {"matmul": 0.7, "evaluation and checkpoints": 0.2}
    found = find_bottleneck(terms, planned(checkpoint={"every": saved}))
    assert found.sentence.endswith(f"is evaluation and checkpoints; try {tries}.")


def test_ranks_that_wait_for_a_slow_one_are_told_which() -> None:
    fast = dict.fromkeys(TERMS, 0.0) | {"matmul": 0.6, "communication": 0.4}
    ranks = [{"terms": fast}, {"terms": fast | {"matmul": 0.95, "communication": 0.05}}]
    found = find_bottleneck(fast, planned(), ranks)
    assert "wait for rank 1: it computes 58% longer" in found.sentence
