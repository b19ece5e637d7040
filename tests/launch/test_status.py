"""`shoal status`, `logs` and `cancel` on runs of this machine."""

import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from shoal import api
from shoal.mistakes import UserMistake
from shoal.train.hooks import Hook
from tests.harness import run_ranks, settings, train_again_on, train_on
from tests.launch.command import ForkedCommand, training_lines, write_config


class Breaks(Hook):
    def on_metrics(self, line: Any, interval: Any) -> None:
        if line["step"] == 2:
            raise RuntimeError("the second step is too much")


def test_runs_that_have_ended_say_how(text: Path, tmp_path: Path) -> None:
    train_again_on(1, settings(text, name="whole", train__steps=2), tmp_path)
    broken = api.config_from_mapping(settings(text, name="broken", train__steps=4))
    with pytest.raises(RuntimeError, match="too much"):
        run_ranks(1, lambda: api.train(broken, runs=tmp_path, hooks=[Breaks()]))
    found = {one.name: one for one in api.status_of_all(tmp_path)}
    assert {name: one.state for name, one in found.items()} == {"whole": "finished", "broken": "failed"}
    whole, failed = found["whole"], found["broken"]
    assert (whole.step, whole.steps, whole.checkpoint, whole.detail) == (2, 2, 2, "")
    assert whole.loss == pytest.approx(training_lines(tmp_path / "whole")[2]["loss"])
    assert failed.detail == "the second step is too much"
    shown = list(api.logs("whole", runs=tmp_path))
    assert [line.split("  ")[0] for line in shown if line.startswith("step ")] == ["step 1/2", "step 2/2"]
    (tmp_path / "whole" / "logs" / "rank-0.jsonl").unlink()  # as of a run that has no records
    assert [line.split("  ")[0] for line in api.logs("whole", runs=tmp_path)] == ["step 1/2", "step 2/2"]
    with pytest.raises(UserMistake, match="whole does not run and waits for nothing: it is finished"):
        api.cancel(tmp_path / "whole")
    with pytest.raises(UserMistake, match=r"There is no run whale, .*Did you mean whole\?"):
        api.status("whale", runs=tmp_path)
    with pytest.raises(UserMistake, match="has no log of rank 3"):
        list(api.logs("whole", rank=3, runs=tmp_path))


def test_a_mistaken_second_start_does_not_change_what_is_said_of_the_first(text: Path, tmp_path: Path) -> None:
    config = settings(text, train__steps=1)
    run = train_again_on(1, config, tmp_path)
    before = (run / "outcome.json").read_bytes()
    with pytest.raises(UserMistake, match="already holds a run"):
        train_on(1, config, tmp_path)
    assert (run / "outcome.json").read_bytes() == before


@pytest.mark.slow
def test_a_run_is_followed_and_cancelled_by_its_name_and_one_that_was_killed_is_told(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_config(tmp_path, settings(text, train__steps=100_000, hardware__devices=2))
    run = Path("runs") / "run"
    with ForkedCommand(tmp_path, ["train", "run.yaml"]) as command:
        command.wait_until(lambda: max(training_lines(run), default=0) > 2)
        status = api.status("run")
        assert (status.state, status.process, status.host) == ("running", command.process.pid, socket.gethostname())
        with ForkedCommand(tmp_path, ["logs", "run", "--follow"]) as following:
            following.wait_until(lambda: following.read(0).count("\n") > 3)
            assert api.cancel("run").process == command.process.pid
            ended, followed = command.wait(), following.wait()
    assert ended.status == 75, ended.err
    status = api.status(run)
    assert (status.state, status.checkpoint) == ("stopped", max(training_lines(run)))
    assert followed.status == 0, followed.err
    assert followed.out.splitlines()[-1].startswith(f"step {status.step}/100000  loss ")
    with ForkedCommand(tmp_path, ["train", "run.yaml", "--resume", "hardware.devices=1"]) as command:
        command.wait_until(lambda: max(training_lines(run), default=0) > (status.step or 0) + 2)
        os.kill(command.process.pid, signal.SIGKILL)
        command.wait()
    assert api.status("run").state == "died"
    assert json.loads((run / "plan.json").read_text())["steps"] == 100_000
