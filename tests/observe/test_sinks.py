"""Metric sinks: the same names everywhere, one curve after a resume, and no sink that fails or hangs stops training."""

import csv
import json
import struct
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.mistakes import UserMistake
from shoal.observe import background
from shoal.observe import sinks as module
from shoal.observe.background import LINES, Background, SinkFailed
from shoal.observe.metrics import About
from shoal.observe.sinks import Sinks, TensorBoard, check_packages
from tests.harness import lines, settings, train_again_on, train_on


def about(run: Path, step: int = 0) -> About:
    return About(run, "run", {"train": {"lr": 0.1}}, {"steps": 4}, step, {}, {})


def line(step: int, loss: float = 1.0, **more: float) -> dict[str, Any]:
    return {"step": step, "attempt": 0, "time": 1e9 + step, "loss": loss, "mfu": None, **more}


class Broken:
    """A sink that raises in one of its methods."""

    name = "csv"

    def __init__(self, where: str) -> None:
        self.where = where
        self.fail("open")

    def fail(self, here: str) -> None:
        if here == self.where:
            raise ValueError(f"cannot {here}")

    def write(self, line: Any) -> None:
        self.fail("write")

    def close(self) -> None:
        self.fail("close")


@pytest.mark.parametrize("threaded", [False, True])
@pytest.mark.parametrize("where", ["open", "write", "close"])
def test_a_sink_that_raises_is_warned_of_once_and_the_others_go_on(
    where: str, threaded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_sink(_: About) -> Any:
        return Background("csv", lambda: Broken(where)) if threaded else Broken(where)

    warned: list[str] = []
    monkeypatch.setitem(module.OPENERS, "csv", open_sink)
    found = Sinks(["csv"], about(tmp_path), warned.append)
    for step in range(1, 4):
        found.write(line(step))
        time.sleep(0.02 * threaded)
    found.close()
    assert len(warned) == 1
    assert f"cannot {where}" in warned[0]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_a_sink_that_hangs_costs_neither_a_step_nor_the_end(tmp_path: Path) -> None:
    never = threading.Event()

    class Hangs(Broken):
        def write(self, line: Any) -> None:
            never.wait()

    sink = Background("wandb", lambda: Hangs(""), patience=0.05)
    began = time.thread_time()
    sink.write(line(1))
    assert time.thread_time() - began < 0.1
    with pytest.raises(SinkFailed, match=r"was not done after 0\.05 s"):
        sink.close()
    while not sink._lines.full():
        sink.write(line(2))
    with pytest.raises(SinkFailed, match=f"{LINES} lines behind"):
        sink.write(line(3))
    never.set()


def test_a_server_of_wandb_that_does_not_answer_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class CommError(Exception):
        pass

    def refuse(**_: Any) -> None:
        raise CommError("context deadline exceeded\nand more")

    fake = SimpleNamespace(init=refuse, Settings=dict, errors=SimpleNamespace(CommError=CommError))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    warned: list[str] = []
    found = Sinks(["wandb"], about(tmp_path), warned.append)
    found.write(line(1))
    found.close()
    assert len(warned) == 1
    assert "http://127.0.0.1:9 does not answer; log.wandb.mode=offline writes to files" in warned[0]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), purge_orphaned_data=True).Reload()
    return {tag: [(one.step, one.value) for one in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_tensorboard_shows_one_curve_after_a_resume_and_after_a_rollback(tmp_path: Path) -> None:
    sink = TensorBoard(about(tmp_path))
    for step in (1, 2, 3, 4):
        sink.write(line(step, loss=step))
    for step in (3, 4, 5):  # rolled back to step 2
        sink.write(line(step, loss=10 + step))
    sink.close()
    sink = TensorBoard(about(tmp_path, step=4))  # resumed from step 4
    sink.write(line(5, loss=25, eval_loss=3.0))
    sink.close()
    found = scalars(tmp_path / "logs" / "tensorboard")
    assert found["loss"] == [(1, 1), (2, 2), (3, 13), (4, 14), (5, 25)]
    assert found["eval_loss"] == [(5, 3.0)]
    assert set(found) == {"loss", "eval_loss"}  # the names of metrics.jsonl


def test_a_csv_of_a_run_that_began_without_a_column_gets_it(tmp_path: Path) -> None:
    for more in ({}, {"power_watts": 300.0}):
        found = Sinks(["csv"], about(tmp_path), pytest.fail)
        found.write(line(len(more) + 1, **more))
        found.close()
    with (tmp_path / "metrics.csv").open(newline="") as file:
        first, second = csv.DictReader(file)
    assert (first["loss"], first["power_watts"], second["loss"], second["power_watts"]) == ("1.0", "", "1.0", "300.0")


def test_a_sink_whose_package_is_missing_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module.PACKAGES, "wandb", "a_package_that_nobody_has")
    with pytest.raises(UserMistake, match=r"pip install 'shoal\[wandb\]'"):
        check_packages(["csv", "wandb"])
    check_packages(["csv", "tensorboard"])


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the first database of mlflow takes longer than a user would wait."""
    monkeypatch.setattr(background, "PATIENCE", 300.0)


def resumed_run(text: Path, runs: Path, name: str, **log: Any) -> Path:
    """A run that is resumed from the checkpoint before its last step: step 3 is computed twice."""
    config = settings(text, train__steps=3, checkpoint__every=2, checkpoint__at_end=False, log__to=[name])
    config["log"].update(log)
    train_again_on(1, config, runs)
    config["train"]["steps"] = 5
    run = train_on(1, config, runs, resume=True)
    attempts = [json.loads(one)["step"] for one in (run / "metrics.jsonl").read_text().splitlines()]
    assert attempts == [1, 2, 3, 3, 4, 5]
    return run


def records(path: Path) -> list[Any]:
    """What an offline run of wandb holds: protobuf records in the log format of LevelDB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, found, whole, position = path.read_bytes(), [], b"", 7
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        length, kind = struct.unpack_from("<HB", data, position + 4)
        whole += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # complete
            record = Record()
            record.ParseFromString(whole)
            found.append(record)
            whole = b""
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("patient")
def test_wandb_continues_the_same_run_with_the_same_names(text: Path, tmp_path: Path) -> None:
    run = resumed_run(text, tmp_path, "wandb", wandb={"mode": "offline", "project": "waters"})
    files = sorted((run / "logs" / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2
    identifier = json.loads((run / "wandb.json").read_text())["id"]
    seen: list[tuple[int, float]] = []
    for file in files:
        for record in records(file):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                assert (record.run.run_id, record.run.project) == (identifier, "waters")
                config = {item.key: json.loads(item.value_json) for item in record.run.config.update}
                assert config["train"]["lr"] == 3e-3
                assert config["plan"]["steps"] in (3, 5)
            elif kind == "history":
                items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
                seen.append((items["step"], items["loss"]))
                expected = next(one for one in lines(run) if one["step"] == items["step"])
                assert {name for name, value in expected.items() if value is not None} - {"time"} <= set(items)
    assert seen == [(one["step"], one["loss"]) for one in lines(run)]  # each step once
    assert "sentry" not in "".join(path.read_text() for path in run.rglob("debug-internal.log")).lower()


@pytest.mark.slow
@pytest.mark.usefixtures("patient")
def test_mlflow_continues_the_same_run_with_the_same_names(text: Path, tmp_path: Path) -> None:
    run = resumed_run(text, tmp_path, "mlflow", mlflow={"experiment": "waters"})
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    (found,) = client.search_runs([client.get_experiment_by_name("waters").experiment_id])
    assert found.info.run_id == json.loads((run / "mlflow.json").read_text())["id"]
    assert found.info.status == "FINISHED"
    assert found.data.params["train.lr"] == "0.003"
    assert {one.path for one in client.list_artifacts(found.info.run_id)} == {"config.json", "plan.json"}
    history = [(one.step, one.value) for one in client.get_metric_history(found.info.run_id, "loss")]
    assert history == [(one["step"], one["loss"]) for one in lines(run)]
    expected = {name for name, value in lines(run)[0].items() if value is not None} - {"step", "time"}
    assert set(found.data.metrics) == expected
