"""`checkpoint.every: auto`: the interval is measured once, the same on all ranks, and kept by a resumed run."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal import api
from shoal.plan.goodput import Conditions, best_every
from shoal.train.hooks import LogInterval
from shoal.train.save_interval import SaveInterval
from tests.custom import loops
from tests.harness import settings, train_on

STEPS = 16
# So often interrupted that the best interval is a few steps of this tiny run: every third of a second, with two ranks.
AUTO = {"checkpoint__every": "auto", "checkpoint__keep": 99, "hardware__mtbf_hours": 2e-4, "log__every": 1}


def config_of(data: Path, **changes: Any) -> dict[str, Any]:
    short = {"train__steps": STEPS, "data__max_length": 48, "data__train_on": "all", "data__validation": 0.0}
    return settings(data, **{**short, **AUTO, **changes})


def saved_steps(run: Path) -> list[int]:
    return sorted(int(folder.name.split("-")[-1]) for folder in (run / "checkpoints").glob("step-*"))


def interval(run: Path, step: int) -> dict[str, float]:
    (folder,) = (one for one in (run / "checkpoints").glob("step-*") if int(one.name.split("-")[-1]) == step)
    found: dict[str, float] = json.loads((folder / "progress.json").read_text())["interval"]
    return found


@pytest.fixture(scope="module")
def run(instructions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_on(2, config_of(instructions), tmp_path_factory.mktemp("auto"))


def test_auto_is_measured_agreed_on_and_recorded(run: Path, instructions: Path) -> None:
    last = interval(run, STEPS)
    assert last["world_size"] == 2
    assert last["step_seconds"] > 0
    chosen = json.loads((run / "plan.json").read_text())["chosen"]
    assert chosen["checkpoint_every"] == last["every"]
    config = api.load_config(run / "config.yaml")
    assert config.checkpoint.every == "auto", "the run keeps what was asked for"
    conditions = Conditions(2e-4 * 3600 / 2, 900.0, 0.1, last["written"])
    if last["written"]:
        assert last["every"] == best_every(conditions, last["step_seconds"], config)
    # A longer step means fewer steps; a checkpoint that takes longer to write is not begun before it is complete.
    assert best_every(conditions, 10 * last["step_seconds"], config) < best_every(conditions, 1e-4, config)
    assert best_every(replace(conditions, written=60.0), 0.5, config) == 120


def test_a_resumed_run_goes_on_with_the_interval_unless_the_ranks_changed(
    run: Path, instructions: Path, tmp_path: Path
) -> None:
    before = interval(run, STEPS)
    longer = config_of(instructions, train__steps=STEPS + 2)
    again = train_on(2, longer, run.parent, resume=True)
    after = interval(again, STEPS + 2)
    assert {key: after[key] for key in ("world_size", "every", "step_seconds")} == {
        key: before[key] for key in ("world_size", "every", "step_seconds")
    }
    expected = [step for step in (STEPS + 1, STEPS + 2) if step % before["every"] == 0 or step == STEPS + 2]
    assert [step for step in saved_steps(again) if step > STEPS] == expected
    alone = train_on(1, config_of(instructions, train__steps=STEPS + 4), run.parent, resume=True)
    assert interval(alone, STEPS + 4)["world_size"] == 1
    assert interval(alone, STEPS + 4)["step_seconds"] == 0, "not measured again yet"


class Heard:
    """A rank that hears what rank 0 says."""

    def __init__(self, first: bool, said: list[str]) -> None:
        self.first, self.said, self.world_size = first, said, 2

    def broadcast(self, text: str) -> str:
        if self.first:
            self.said.append(text)
        return self.said[-1]


class Silent:
    def say(self, text: str) -> None:
        return


def test_all_ranks_take_over_what_rank_0_measured() -> None:
    config = api.load_config(None, ["model.shape=gpt2", "checkpoint.every=100", "data.validation=0"])
    conditions, said = Conditions(mtbf=1000.0, restart=60.0, blocked=0.2, written=1.0), []
    intervals = [SaveInterval(config, conditions, Heard(first, said), Silent()) for first in (True, False)]  # type: ignore[arg-type]
    for interval, seconds in zip(intervals, (5.0, 9.0), strict=True):
        # Steps of 0.5 seconds on rank 0, and of 0.9 on rank 1; before that a log interval with the warm-up.
        interval.on_metrics({}, LogInterval(10, 10, 99.0, 0, None, 0.0, None))
        interval.settle(all_saved=False)
        assert interval.every == 100
        interval.on_metrics({}, LogInterval(20, 10, seconds, 0, None, 0.0, None))
        interval.settle(all_saved=False)
    assert [one.every for one in intervals] == [best_every(conditions, 0.5, config)] * 2
    assert [one.state() for one in intervals] == [intervals[0].state()] * 2
    # What has been measured is kept.
    for interval in intervals:
        interval.on_metrics({}, LogInterval(30, 10, 50.0, 0, None, 0.0, None))
        interval.settle(all_saved=False)
    assert intervals[1].step_seconds == 0.5


def test_a_custom_loop_measures_the_interval_too(tmp_path: Path) -> None:
    auto = {"checkpoint__every": "auto", "checkpoint__keep": 99, "hardware__mtbf_hours": 1e-4}
    run = loops.train_on(1, tmp_path, train__steps=12, **auto)
    assert interval(run, 12)["step_seconds"] > 0
    chosen = json.loads((run / "plan.json").read_text())["chosen"]
    assert chosen["checkpoint_every"] == interval(run, 12)["every"] < 200
    loops.train_on(1, tmp_path, train__steps=14, resume=True, **auto)
    assert interval(run, 14)["step_seconds"] == interval(run, 12)["step_seconds"]
