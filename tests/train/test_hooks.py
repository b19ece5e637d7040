"""Hooks see every event of a run, on every rank, and end with it."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from shoal import api
from shoal.config.schema import DataConfig
from shoal.data import StoredSequences
from shoal.mistakes import UserMistake
from shoal.observe.progress import Reporter
from shoal.train.hooks import Fault, Hook, LogInterval, RunStart
from shoal.train.slow_data import SlowDataWarning
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


def test_a_run_that_waits_for_data_is_told_the_remedy_once(instructions: Path, tmp_path: Path) -> None:
    config = settings(instructions, train__steps=24, data__max_length=16, data__train_on="all", data__workers=0)

    def be() -> list[str]:
        read, warned = StoredSequences.__getitem__, []

        def read_slowly(self: StoredSequences, index: int) -> Any:
            time.sleep(0.005)
            return read(self, index)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StoredSequences, "__getitem__", read_slowly)
            patch.setattr(Reporter, "warn", lambda self, text: warned.append(text))
            train_with([], config, tmp_path)
        return [text for text in warned if "waits for data" in text]

    (warned,) = run_ranks(1, be)
    assert len(warned) == 1
    assert "set data.workers: 2, so that batches are prepared in the background" in warned[0]


@pytest.mark.parametrize(("attention", "length", "count"), [("eager", 1024, 1), ("auto", 1024, 0)])
def test_a_run_that_stores_the_scores_of_long_sequences_is_told_the_remedy_once(
    attention: str, length: int, count: int, text: Path, tmp_path: Path
) -> None:
    config = settings(text, train__steps=1, train__global_batch=2, train__micro_batch=1, model__attention=attention)
    config["data"].update(max_length=length, pack=True)
    config["model"]["shape"]["positions"] = 1024

    def be() -> list[str]:
        warned: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Reporter, "warn", lambda self, text: warned.append(text))
            train_with([], config, tmp_path)
        return [text for text in warned if "leave model.attention at auto" in text]

    (warned,) = run_ranks(1, be)
    assert len(warned) == count


def warnings_of(waits: list[float], *, every: int = 1, resumed_at: int = 0, **data: Any) -> list[str]:
    """What the hook says of steps of one second each that wait this long for data."""
    warned: list[str] = []
    hook = SlowDataWarning(DataConfig(**data), warned.append)
    hook.on_run_start(RunStart(Path(), None, None, resumed_at, resumed_at + len(waits)))  # type: ignore[arg-type]
    for first in range(0, len(waits), every):
        window = waits[first : first + every]
        interval = LogInterval(resumed_at + first + len(window), len(window), float(len(window)), 0, None, 0.0, None)
        hook.on_metrics({"data_seconds": sum(window) / len(window)}, interval)
    return warned


@pytest.mark.parametrize("every", [1, 4, 20])
def test_only_lasting_waits_above_five_percent_of_the_step_are_warned_of(every: int) -> None:
    warm = [0.0] * 20  # with one line every 20 steps, the first line has the warmup in it
    assert warnings_of([*warm, *[0.04] * 40], every=every) == []
    assert warnings_of([9.0, 9.0, 9.0, *[0.0] * 57], every=every) == []
    assert warnings_of([9.0, 9.0, 9.0, *[0.0] * 57], every=every, resumed_at=100) == []
    assert warnings_of([*warm, 0.4, *[0.0] * 39], every=every) == []  # one step alone
    assert len(warnings_of([*warm, *[0.06] * 60], every=every)) == 1


def test_the_remedy_is_one_that_is_left() -> None:
    slow = [0.5] * 30
    (few,) = warnings_of(slow, workers=1)
    assert "waits for data 50% of the time (0.5000 s of each step of 1.0000 s): raise data.workers (now 1)" in few
    assert "SHOAL_CACHE" in few
    (many,) = warnings_of(slow, workers=1024)
    assert "workers" not in many
    (streaming,) = warnings_of(slow, workers=1024, streaming=True)
    assert "set data.streaming: false" in streaming
    assert "SHOAL_CACHE" not in streaming
