"""`shoal top`: a run from its files alone, while it runs and afterwards, for any user who may read them."""

import contextlib
import json
import os
import pty
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shoal import api
from shoal.cli.app import app
from shoal.config.lock import holder, locked
from shoal.observe.curve import draw_curve, thinned
from shoal.observe.events import EventLog
from shoal.observe.run_view import RunView
from tests.harness import lines, reference_run, settings
from tests.observe.written_runs import write_run


@pytest.fixture
def run(text: Path) -> Path:
    return reference_run(
        settings(text, train__steps=4, checkpoint__every=2, eval__every=2, data__validation=0.05, parallel__prefetch=3)
    )


def top(*arguments: str) -> str:
    found = CliRunner().invoke(app, ["top", *arguments], env={"COLUMNS": "100"})
    assert found.exit_code == 0, found.output
    return found.output


def test_a_finished_run_is_printed_once_with_its_curves_and_events(run: Path) -> None:
    said = top(str(run))
    assert said.splitlines()[0] == "run  finished  step 4/4"
    for title in ("loss", "evaluation loss", "tokens/s", "learning rate", "gradient norm"):
        assert f"─ {title}  " in said
    assert "2 written, the newest at step 4" in said
    assert "parallel.prefetch 3 has no effect" in said
    assert any("⠀" <= character <= "⣿" for character in said)


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_captions_are_whole_in_a_narrow_terminal_and_without_unicode(run: Path, encoding: str) -> None:
    ended = CliRunner(charset=encoding).invoke(app, ["top", str(run)], env={"COLUMNS": "44", "NO_COLOR": "1"})
    assert ended.exit_code == 0, ended.output
    assert "evaluation loss  " in ended.output
    assert ended.output.count("step 2 to 4 ") == 1  # of the evaluation loss
    assert ended.output.count("step 1 to 4 ") == 4
    assert "\x1b" not in ended.output
    assert ("*" in ended.output) == (encoding == "latin-1")


def test_a_stopped_run_has_no_time_left_and_captions_are_whole_or_shorter(tmp_path: Path) -> None:
    stopped = write_run(tmp_path / "stopped", steps=20_000, done=10_000, state="stopped")
    ended = CliRunner().invoke(app, ["top", str(stopped), "--once"], env={"COLUMNS": "80"})
    assert ended.output.splitlines()[0] == "stopped  stopped  step 10000/20000"
    assert " left" not in ended.output
    assert "step 10 to 10000 ─╯" in ended.output  # of the norm
    rates = next(line for line in ended.output.splitlines() if "e-0" in line and "╰" in line)
    assert "step 10 to" not in rates.split("╯")[1]


def test_json_has_the_facts_of_the_files(run: Path) -> None:
    found = json.loads(top(run.name, "--runs", str(run.parent), "--json"))
    last = lines(run)[-1]
    assert (found["state"], found["step"], found["steps"]) == ("finished", 4, 4)
    assert (found["loss"], found["lr"]) == (last["loss"], last["lr"])
    assert found["curves"]["loss"] == [[line["step"], line["loss"]] for line in lines(run)]
    assert [step for step, _ in found["curves"]["eval_loss"]] == [2, 4]
    assert [save["step"] for save in found["saves"]] == [2, 4]
    assert found["waits"].keys() == {"data", "communication", "checkpoints"}
    assert found["seconds_left"] == 0


def test_a_view_follows_the_files_and_leaves_out_what_a_rollback_abandoned(tmp_path: Path) -> None:
    def add(*objects: Any) -> None:
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.writelines(json.dumps(one) + "\n" for one in objects)

    view = RunView(tmp_path)
    assert (view.newest, view.curve("loss"), view.seconds_left) == ({}, [], None)
    add(*({"step": step, "loss": 1.0 * step} for step in (1, 2, 3, 4)))
    view.refresh()
    assert view.curve("loss") == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]
    add({"step": 2, "loss": 9.0})  # rolled back
    (tmp_path / "metrics.jsonl").open("a").write('{"step": 3, "lo')  # half a line
    EventLog(tmp_path, 1, 2).write("fault", text="a NaN")
    view.refresh()
    assert view.curve("loss") == [(1, 1.0), (2, 9.0)]
    assert [one["text"] for one in view.of_kind("fault")] == ["a NaN"]
    (tmp_path / "metrics.jsonl").unlink()
    add({"step": 1, "loss": 7.0})  # replaced by --overwrite
    view.refresh()
    assert view.curve("loss") == [(1, 7.0)]


def test_a_curve_falls_from_the_upper_left_to_the_lower_right() -> None:
    drawn = draw_curve([(0, 2.0), (1, 1.0)], 4, 2)
    assert [len(line) for line in drawn] == [4, 4]
    assert drawn[0][0] != "⠀" != drawn[1][3]
    assert drawn[0][3] == "⠀" == drawn[1][0]
    assert draw_curve([(0, float("nan"))], 4, 2) == []
    many = [(float(step), float(step)) for step in range(1000)]
    assert len(thinned(many, 50)) <= 50
    assert thinned(many, 50)[-1] == (999.0, 999.0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_another_user_who_may_only_read_sees_that_a_run_is_running() -> None:
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    try:
        with locked(folder / ".run.lock", otherwise="held"):
            (folder / ".run.lock").chmod(0o644)
            child = os.fork()
            if child == 0:
                os.setuid(65534)
                found = holder(folder / ".run.lock")
                os._exit(0 if found is not None and found.process == os.getppid() else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        shutil.rmtree(folder)


def test_top_does_not_import_torch_and_an_unknown_run_is_one_sentence(run: Path, tmp_path: Path) -> None:
    code = f"import sys; from shoal.cli.app import app; app(['top', {str(run)!r}, '--json'], standalone_mode=False)"
    program = tmp_path / "program.py"
    program.write_text(f"{code}\nassert 'torch' not in sys.modules")
    assert os.waitstatus_to_exitcode(os.spawnv(os.P_WAIT, sys.executable, [sys.executable, str(program)]) << 8) == 0
    with pytest.raises(Exception, match="There is no run nothing"):
        api.view("nothing", runs=tmp_path)


@pytest.mark.slow
def test_a_running_run_is_shown_until_q_is_pressed(run: Path) -> None:
    with locked(run.with_name(f".{run.name}.lock"), otherwise="held"):
        process, terminal = pty.fork()
        if process == 0:
            os.environ["TERM"] = "xterm"
            os.execv(sys.executable, [sys.executable, "-m", "shoal", "top", str(run), "--every", "0.1"])
        shown = b""
        while b"running" not in shown:
            shown += os.read(terminal, 65536)
        os.write(terminal, b"q")
        with contextlib.suppress(OSError):  # the terminal of a process that has ended
            while piece := os.read(terminal, 65536):
                shown += piece
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
    assert b"step 4/4" in shown
    assert b"\x1b[?1049l" in shown  # the screen is as it was
