"""Log records: one file per process, with its rank; the terminal shows rank 0's, and the warnings of others."""

import json
import logging
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shoal import api
from shoal.cli.app import app
from shoal.mistakes import UserMistake
from shoal.observe.logs import RunLog
from shoal.observe.metrics import read_lines
from shoal.train.hooks import Hook, RunStart
from tests.harness import run_ranks, settings

KEYS = ["time", "level", "rank", "host", "logger", "message"]


class Speaks(Hook):
    """What a rank alone, and a library, have to say."""

    def on_run_start(self, start: RunStart) -> None:
        logging.getLogger("shoal.test").warning("the disk of rank %d is slow", start.ranks.rank)
        logging.getLogger("some.library").warning("a library speaks")
        logging.getLogger("shoal.test").debug("a detail")


def trained(text: Path, runs: Path, world_size: int = 2, **changes: Any) -> Path:
    config = api.config_from_mapping(settings(text, train__steps=2, **changes))

    def be() -> None:
        api.train(config, runs=runs, hooks=[Speaks()])

    run_ranks(world_size, be)
    return runs / "run"


def records(run: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "logs" / name).read_text().splitlines()]


def shoal(*arguments: str) -> str:
    found = CliRunner().invoke(app, list(arguments))
    assert found.exit_code == 0, found.output
    return found.output


def test_every_rank_has_its_records_and_warnings_reach_the_terminal(
    text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = trained(text, tmp_path)
    said = capfd.readouterr().err
    assert "\nwarning: the disk of rank 0 is slow\n" in said
    assert "rank 1: warning: the disk of rank 1 is slow\n" in said
    first, second = records(run, "rank-0.jsonl"), records(run, "rank-1.jsonl")
    assert all(list(one) == KEYS for one in first + second)
    assert {one["rank"] for one in first} == {0}
    assert {(one["rank"], one["host"]) for one in second} == {(1, socket.gethostname())}
    assert [one["message"] for one in second] == ["the disk of rank 1 is slow", "a library speaks"]
    assert [one["logger"] for one in second] == ["shoal.test", "some.library"]
    # What rank 0 has printed, with its progress.
    steps = [one for one in first if one["message"].startswith("step ")]
    assert [(one["level"], one["message"].split("  ")[0]) for one in steps] == [
        ("info", "step 1/2"),
        ("info", "step 2/2"),
    ]

    assert f"{steps[-1]['message']}\n" in said
    shown = shoal("logs", str(run))
    assert f"{steps[-1]['message']}\n" in shown
    assert "rank 1: warning: the disk of rank 1 is slow\n" in shown
    assert "rank 1: warning: a library speaks" in shown
    warnings = shoal("logs", str(run), "--level", "warning").splitlines()
    assert not any("step 1/2" in line for line in warnings)
    assert sum("is slow" in line for line in warnings) == 2
    assert shoal("logs", str(run), "--level", "error") == f"{run} has no log record of level error or above.\n"
    alone = json.loads(shoal("logs", str(run), "--level", "info", "--rank", "1", "--json"))
    assert alone["records"] == second
    # As a person reads the rank's own output.
    assert "warning: the disk of rank 1 is slow" in shoal("logs", str(run), "--rank", "1")


@pytest.mark.parametrize("level", ["debug", "warning"])
def test_the_level_is_that_of_the_terminal_and_of_the_files(
    level: str, text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = trained(text, tmp_path, world_size=1, log__level=level)
    said, logged = capfd.readouterr().err, [one["message"] for one in records(run, "rank-0.jsonl")]
    for found in (said.splitlines(), logged):
        assert any("a detail" in one for one in found) == (level == "debug")
        assert any(one.startswith("step 1/2") for one in found) == (level == "debug")
        assert any("the disk of rank 0 is slow" in one for one in found)
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2


class Fails(Hook):
    def on_step_end(self, end: Any) -> None:
        raise ZeroDivisionError("no step ends")


def test_an_error_is_logged_with_its_traceback_and_handlers_are_gone(text: Path, tmp_path: Path) -> None:
    def be() -> bool:
        before = list(logging.getLogger("shoal").handlers)
        with pytest.raises(ZeroDivisionError):
            api.train(api.config_from_mapping(settings(text)), runs=tmp_path, hooks=[Fails()])
        return logging.getLogger("shoal").handlers == before

    assert run_ranks(1, be) == [True]
    error = records(tmp_path / "run", "rank-0.jsonl")[-1]
    assert (error["level"], error["message"].splitlines()[0]) == ("error", "no step ends")
    assert "ZeroDivisionError: no step ends" in error["message"].splitlines()[-1]


def test_a_line_that_a_full_disk_has_cut_costs_no_other_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def say(*texts: str) -> None:
        log = RunLog()
        log.open(tmp_path, 0, None)
        for text in texts:
            log.emit(logging.LogRecord("shoal.test", logging.INFO, "", 0, text, None, None))
        log.close()

    with monkeypatch.context() as patch:
        write, full = os.write, [False, True, False]
        patch.setattr(os, "write", lambda file, line: write(file, line[:20] if full.pop(0) else line))
        say("before", "cut", "after")
    file = tmp_path / "rank-0.jsonl"
    assert [one["message"] for one in read_lines(file)] == ["before", "after"]
    file.write_bytes(file.read_bytes()[:-5])  # as a power failure does
    say("of the next process")
    assert [one["message"] for one in read_lines(file)] == ["before", "of the next process"]


def test_flags_that_contradict_each_other_are_a_mistake(tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["train", str(tmp_path / "none.yaml"), "-v", "-q"])
    assert isinstance(found.exception, UserMistake)
    assert "give one of them" in str(found.exception)
