"""Hooks see every event of a run, on every rank, and end with it."""

import json
from pathlib import Path
from typing import Any

import pytest

from shoal import api
from shoal.mistakes import UserMistake
from shoal.train.hooks import Fault, Hook
from tests.harness import run_ranks, settings


class Recorder(Hook):
    """The names of the events in order, and what came with some of them."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.lines: list[dict[str, Any]] = []
        self.shared: list[list[list[float]]] = []
        self.ended: list[str | None] = []

    def on_run_start(self, start: Any) -> None:
        self.rank = start.ranks.rank
        self.events.append(f"start at {start.step} of {start.steps}")

    def on_step_end(self, end: Any) -> None:
        self.events.append(f"step {end.step}")

    def on_metrics(self, line: Any, interval: Any) -> None:
        self.lines.append(dict(line))

    def on_evaluation(self, line: Any) -> None:
        self.events.append(f"evaluation at {line['step']}")
        self.lines.append(dict(line))

    def on_save(self, saved: Any) -> None:
        self.events.append(f"saved {saved.step}")

    def on_stop(self, step: int, reason: str) -> None:
        self.events.append(f"{reason} at {step}")

    def on_fault(self, fault: Fault) -> None:
        self.events.append(f"fault after {fault.step}: {fault.sentence}")

    def on_run_end(self, error: BaseException | None) -> None:
        self.events.append("end")
        self.ended.append(None if error is None else type(error).__name__)

    def share(self) -> list[float]:
        return [100.0 + self.rank, float(len(self.shared))]

    def on_shared(self, values: Any) -> None:
        self.shared.append([list(one) for one in values])


def train_with(hooks: list[Hook], config: dict[str, Any], runs: Path, **options: Any) -> None:
    api.train(api.config_from_mapping(config), runs=runs, hooks=hooks, **options)


@pytest.mark.parametrize("world_size", [1, 2])
def test_every_rank_sees_the_events_in_order(world_size: int, instructions: Path, tmp_path: Path) -> None:
    config = settings(
        instructions, train__steps=4, eval__every=2, data__validation=0.1, checkpoint__every=2, checkpoint__async=False
    )

    def be() -> tuple[list[str], list[dict[str, Any]], list[Any]]:
        recorder = Recorder()
        train_with([recorder], config, tmp_path)
        return recorder.events, recorder.lines, recorder.shared

    found = run_ranks(world_size, be)
    for events, lines, shared in found:
        assert events == [
            "start at 0 of 4", "step 1", "step 2", "evaluation at 2", "step 3", "saved 2", "step 4", "evaluation at 4",
            "saved 4", "end",
        ]  # fmt: skip
        # With several ranks one step late, and what a rank shared is not mixed up with what other hooks shared.
        expected = [[100.0 + rank for rank in range(world_size)]] * 4
        assert [[one[0] for one in each] for each in shared] == (expected if world_size == 1 else expected[1:])
        # Times differ between ranks.
        assert [line.get("loss") for line in lines] == [line.get("loss") for line in found[0][1]]
    written = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert written == found[0][1]


def test_an_early_stop_is_an_event(instructions: Path, tmp_path: Path) -> None:
    recorder = Recorder()
    config = settings(instructions, train__steps=9, train__lr=1e-30, eval__every=1, data__validation=0.1)
    config["train"]["early_stop"] = {"patience": 1}

    def be() -> list[str]:
        train_with([recorder], config, tmp_path)
        return recorder.events

    (events,) = run_ranks(1, be)
    assert "early_stop at 2" in events
    assert events[-1] == "end"


class Failing(Hook):
    def on_step_end(self, end: Any) -> None:
        if end.step == 2:
            raise RuntimeError("this hook fails")

    def on_run_end(self, error: BaseException | None) -> None:
        raise RuntimeError("and it fails at the end, too")


def test_a_failure_is_a_fault_and_every_hook_ends(instructions: Path, tmp_path: Path) -> None:
    def be() -> tuple[list[str], list[str | None]]:
        first, last = Recorder(), Recorder()
        with pytest.raises(RuntimeError, match="this hook fails"):
            train_with([first, Failing(), last], settings(instructions, train__steps=3), tmp_path)
        assert last.events[-2:] == first.events[-2:]
        return first.events, first.ended

    ((events, ended),) = run_ranks(1, be)
    assert events[-2:] == ["fault after 2: this hook fails", "end"]
    assert ended == ["RuntimeError"]


def test_hooks_are_refused_where_other_processes_train(instructions: Path, tmp_path: Path) -> None:
    config = settings(instructions, hardware__devices=2)
    with pytest.raises(UserMistake, match="start the program with torchrun"):
        train_with([Recorder()], config, tmp_path)
    assert not (tmp_path / "run").exists()
