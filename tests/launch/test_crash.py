"""An error that nobody expected: one sentence with status 1, and a file with what is needed to find its cause."""

import re
import tempfile
from pathlib import Path
from typing import Any, NoReturn

import pytest

import shoal.plan.report
from shoal import __version__
from shoal.train.step import TrainStep
from tests.harness import settings
from tests.launch.command import Ended, environment, forked_shoal, write_config

PLAN = ("plan", "model.shape=gpt2", "hardware.gpu=t4")
SENTENCE = (
    r"shoal: An error that shoal did not expect: ZeroDivisionError: as planned; the traceback is in (\S+); "
    r"please report it\.\n"
)


def broken(*_: Any, **__: Any) -> NoReturn:
    raise ZeroDivisionError("as planned\nwith a second line")


def crash_file(ended: Ended) -> Path:
    """The file that the one sentence of a crash names."""
    assert (ended.status, ended.out) == (1, ""), ended.err
    found = re.search(SENTENCE, ended.err)
    assert found is not None, ended.err
    assert "Traceback" not in ended.err
    return Path(found[1])


@pytest.mark.parametrize("more", [(), ("--json",)], ids=["text", "json"])
def test_a_command_that_fails_unexpectedly_says_so_in_a_sentence_and_keeps_the_traceback(
    more: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shoal.plan.report, "make_plan", broken)
    ended = forked_shoal(tmp_path, *PLAN, *more)
    file = crash_file(ended)
    assert file.parent == tmp_path / "cache" / "crashes"
    assert file.stat().st_mode & 0o077 == 0, "the command may hold what others should not read"
    written = file.read_text()
    assert f"shoal {__version__}" in written
    assert f"shoal {' '.join((*PLAN, *more))}" in written
    assert "Traceback (most recent call last)" in written
    assert written.rstrip().endswith("ZeroDivisionError: as planned\nwith a second line")


def test_the_traceback_of_a_run_is_in_its_folder(
    instructions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrainStep, "__call__", broken)
    write_config(tmp_path, settings(instructions))
    file = crash_file(forked_shoal(tmp_path, "train", "run.yaml", "--json"))
    assert file.parent == tmp_path / "runs" / "run" / "logs"
    assert "in run_steps" in file.read_text()


def test_shoal_debug_shows_the_traceback_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shoal.plan.report, "make_plan", broken)
    ended = forked_shoal(tmp_path, *PLAN, env=environment(tmp_path, SHOAL_DEBUG="1"))
    assert ended.status == 1
    assert ended.err.startswith("Traceback (most recent call last)")
    assert re.search(SENTENCE + r"\Z", ended.err)


def test_without_a_place_for_the_file_the_traceback_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> NoReturn:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shoal.plan.report, "make_plan", broken)
    monkeypatch.setattr(tempfile, "mkstemp", full)
    ended = forked_shoal(tmp_path, *PLAN)
    assert ended.status == 1
    assert ended.err.startswith("Traceback (most recent call last)")
    assert ended.err.endswith(
        "shoal: An error that shoal did not expect: ZeroDivisionError: as planned; the traceback is above; "
        "please report it.\n"
    )


def test_output_to_a_full_disk_is_no_error_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> NoReturn:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shoal.plan.report, "make_plan", full)
    ended = forked_shoal(tmp_path, *PLAN)
    assert ended.status == 1
    assert ended.err == "shoal: A file or standard output cannot be written: No space left on device.\n"
    assert not (tmp_path / "cache" / "crashes").exists()
