"""`events.jsonl` and the times in `metrics.jsonl`: what a run's files tell of what happened in it."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from shoal import api
from shoal.mistakes import UserMistake
from shoal.observe.events import EventLog, launcher_events, read_events
from shoal.train.hooks import Hook
from tests.harness import run_ranks, settings, train_on


def kinds(run: Path) -> list[str]:
    return [one["event"] for one in read_events(run)]


@pytest.fixture(scope="module")
def resumed(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """A run on two ranks that saves, evaluates and is resumed with more steps, and when it was started."""
    began, runs = time.time(), tmp_path_factory.mktemp("events")
    config = settings(text, train__steps=2, checkpoint__every=1, eval__every=2, data__validation=0.05)
    train_on(2, config, runs)
    config["train"]["steps"] = 3
    return train_on(2, config, runs, resume=True), began


def test_starts_saves_and_ends_are_events_in_order(resumed: tuple[Path, float]) -> None:
    run, began = resumed
    found = [one for one in read_events(run) if one["event"] != "warning"]
    assert [one["event"] for one in found] == ["start", "save", "save", "end", "start", "save", "end"]
    assert [one["attempt"] for one in found] == [0, 0, 0, 0, 1, 1, 1]
    assert [one["step"] for one in found] == [0, 1, 2, 2, 2, 3, 3]
    times = [one["time"] for one in found]
    assert times == sorted(times)
    assert began - 1 < times[0] <= times[-1] < time.time() + 1
    first, second = (one for one in found if one["event"] == "start")
    assert (first["world_size"], first["from_step"], second["from_step"]) == (2, 0, 2)
    assert first["devices"] == "cpu"
    assert isinstance(first["command"], list)
    for save in (one for one in found if one["event"] == "save"):
        folder = Path(save["path"])
        assert (save["ok"], save["error"], folder.name) == (True, None, f"step-{save['step']:08d}")
        if folder.exists():  # older ones are not kept
            listed = json.loads((folder / "MANIFEST.json").read_text())["files"]
            assert save["bytes"] == sum(file["size"] for file in listed.values())
    assert [one["error"] for one in found if one["event"] == "end"] == [None, None]


def test_lines_have_their_time_and_what_the_loop_waited_for(resumed: tuple[Path, float]) -> None:
    run, began = resumed
    written = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    times = [line["time"] for line in written]
    assert times == sorted(times)
    assert began - 1 < times[0]
    assert any("eval_loss" in line for line in written)
    steps = [line for line in written if "loss" in line]
    assert steps[0]["save_seconds"] == 0  # nothing was saved before the first step
    assert steps[1]["save_seconds"] > 0
    assert all("communication_seconds" in line for line in steps)


class Fails(Hook):
    def on_step_end(self, end: Any) -> None:
        if end.step == 2:
            raise RuntimeError("the second step is too much")


def test_a_failure_is_a_fault_and_an_end_with_its_text(text: Path, tmp_path: Path) -> None:
    config = api.config_from_mapping(settings(text, train__steps=4))
    with pytest.raises(RuntimeError, match="too much"):
        run_ranks(1, lambda: api.train(config, runs=tmp_path, hooks=[Fails()]))
    *_, fault, end = read_events(tmp_path / "run")
    assert (fault["event"], fault["step"], fault["text"]) == ("fault", 2, "the second step is too much")
    assert (end["event"], end["error"]) == ("end", "the second step is too much")


def test_warnings_from_before_the_folder_existed_are_events_too(text: Path, tmp_path: Path) -> None:
    # An option without effect is warned of before anything is written.
    run = train_on(1, settings(text, train__steps=1, parallel__prefetch=3), tmp_path)
    (warning,) = (one for one in read_events(run) if "parallel.prefetch" in one.get("text", ""))
    assert warning["event"] == "warning"
    assert kinds(run).index("warning") < kinds(run).index("start")


def test_a_mistaken_start_writes_nothing_into_the_run_of_the_same_name(text: Path, tmp_path: Path) -> None:
    config = settings(text, train__steps=1, parallel__prefetch=3)
    run = train_on(1, config, tmp_path)
    before = {path.name: path.read_bytes() for path in (run / "events.jsonl", run / "logs" / "rank-0.jsonl")}
    with pytest.raises(UserMistake, match="already holds a run"):
        train_on(1, config, tmp_path)
    assert {path.name: path.read_bytes() for path in (run / "events.jsonl", run / "logs" / "rank-0.jsonl")} == before


def test_a_line_that_was_cut_does_not_spoil_the_next(tmp_path: Path) -> None:
    EventLog(tmp_path, attempt=2, step=7).write("stop", reason="signal")
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"event": "sa')
    log = launcher_events(tmp_path)
    log.write("restart", text="A process died.")
    assert [(one["event"], one["attempt"], one["step"]) for one in read_events(tmp_path)] == [
        ("stop", 2, 7),
        ("restart", 2, 7),
    ]
    EventLog(tmp_path / "gone").write("end", error=None)  # a folder that is not there any more is ignored
    assert read_events(tmp_path / "gone") == []
