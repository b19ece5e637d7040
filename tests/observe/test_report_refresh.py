"""`report.html` while a run trains."""

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.observe.run_reader import RunReader
from shoal.train import report
from shoal.train.report import ReportPage
from tests.observe.written_runs import append, training_line, write_run


def wait_for(condition: Callable[[], bool]) -> None:
    waiting = threading.Event()
    for _ in range(2000):
        if condition():
            return
        waiting.wait(0.01)
    raise AssertionError("it did not happen")


def started(run: Path, warnings: list[str], *, first: bool = True) -> ReportPage:
    hook = ReportPage({"name": run.name}, warnings.append)
    start: Any = SimpleNamespace(folder=run, ranks=SimpleNamespace(first=first))
    hook.on_run_start(start)
    return hook


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "FIRST", 0.01)
    monkeypatch.setattr(report, "EVERY", 0.01)
    monkeypatch.setattr(report, "SHARE", 1.0)


def test_the_page_follows_the_run_and_its_end(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", state=None)
    page, warnings = run / "report.html", list[str]()
    hook = started(run, warnings)
    wait_for(lambda: page.exists() and "step 50 of 100" in page.read_text())
    assert "state-running" in page.read_text()
    append(run / "metrics.jsonl", training_line(60))
    wait_for(lambda: "step 60 of 100" in page.read_text())
    hook.on_stop(60, "signal")
    hook.on_run_end(None)
    assert "state-stopped" in page.read_text()
    assert not [thread for thread in threading.enumerate() if thread.name == "report"]
    assert warnings == []


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    hook = started(run, [], first=False)
    hook.on_run_end(None)
    assert not (run / "report.html").exists()


def test_a_page_that_cannot_be_written_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "run")
    warnings = list[str]()
    hook = started(run, warnings)

    def damaged(*_: Any, **__: Any) -> Any:
        raise RuntimeError("something that nobody expected")

    monkeypatch.setattr(RunReader, "read", damaged)
    hook.on_run_end(None)
    assert warnings == [
        "report.html cannot be written: something that nobody expected. shoal report RUN writes it later."
    ]
