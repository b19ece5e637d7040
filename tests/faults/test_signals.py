"""TERM, INT, USR1 and USR2 to the launcher or any rank: the step is finished and saved, with status 75."""

import fcntl
import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from shoal import api
from shoal.checkpoint.store import list_complete
from shoal.temporary import OWNER
from shoal.train.step import TrainStep
from tests.harness import reference_run, run_ranks, settings
from tests.launch.command import (
    PATIENCE,
    SHOAL,
    Command,
    ForkedCommand,
    descendants,
    environment,
    forked_shoal,
    losses,
    rank_process,
    training_lines,
    write_config,
)

STEPS = 30
HANG_TIMEOUT = 60.0  # after which a rank that waits for another fails by itself

pytestmark = pytest.mark.slow


def config(data: Path, **changes: Any) -> dict[str, Any]:
    long = {"train__steps": STEPS, "checkpoint__every": 16, "hardware__devices": 2, "train__hang_timeout": HANG_TIMEOUT}
    return settings(data, **{**long, **changes})


def test_a_signal_to_any_rank_stops_all_of_them_with_everything_saved(instructions: Path, tmp_path: Path) -> None:
    undisturbed = reference_run(config(instructions), 2)
    write_config(tmp_path, config(instructions))
    run, saved = tmp_path / "runs" / "run", 0
    # The test below sends the other signals.
    for rank, number in ((1, signal.SIGTERM), (0, signal.SIGUSR1)):
        arguments = ["train", "run.yaml", "--json", "--max-restarts", "3"]
        with ForkedCommand(tmp_path, [*arguments, "--resume"] if saved else arguments) as command:
            command.wait_until(lambda: max(training_lines(run), default=0) > saved + 2)  # noqa: B023
            os.kill(rank_process(command.process.pid, rank), number)
            ended = command.wait()
        assert ended.status == 75, f"{number.name}: {ended.err}"
        summary = json.loads(ended.out)
        assert summary["stopped"] == "signal"
        assert saved < summary["step"] < STEPS
        assert list_complete(run / "checkpoints")[-1].step == summary["step"]
        assert {line["attempt"] for line in training_lines(run).values() if line["step"] > saved} == {
            training_lines(run)[summary["step"]]["attempt"]
        }, "a stop was treated as a failure, and the ranks were restarted"
        saved = summary["step"]
    ended = forked_shoal(tmp_path, "train", "run.yaml", "--resume", "--json")
    assert ended.status == 0, ended.err
    assert losses(run) == losses(undisturbed)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2])
def test_every_signal_to_a_rank_stops_all_ranks_after_their_step(
    number: int, instructions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, seen = TrainStep.__call__, [0]

    def step(self: TrainStep, batch: Any, lr: float) -> Any:
        seen[0] += 1
        if seen[0] == 3 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), number)
        return call(self, batch, lr)

    monkeypatch.setattr(TrainStep, "__call__", step)
    settled = api.config_from_mapping(config(instructions))
    summaries = run_ranks(2, lambda: api.train(settled, runs=tmp_path).as_dict())
    assert [one["stopped"] for one in summaries] == ["signal", "signal"]
    stopped_at = summaries[0]["step"]
    assert stopped_at in (3, 4)  # ranks agree after a step
    assert (
        list_complete(tmp_path / "run" / "checkpoints")[-1].step == stopped_at == max(training_lines(tmp_path / "run"))
    )


@pytest.mark.parametrize("devices", [1, 2])
def test_a_second_signal_ends_it_at_once_and_loses_only_what_was_not_saved(
    devices: int, instructions: Path, tmp_path: Path
) -> None:
    """Also when the first cannot be handled: here a rank is stopped, and the others wait for it."""
    write_config(tmp_path, config(instructions, checkpoint__every=5, hardware__devices=devices, train__steps=100_000))
    run = tmp_path / "runs" / "run"
    with ForkedCommand(tmp_path, ["train", "run.yaml", "--json"]) as command:
        command.wait_until(lambda: len(list_complete(run / "checkpoints")) > 1)
        ranks = [rank_process(command.process.pid, rank) for rank in range(devices)] if devices > 1 else []
        if ranks:
            os.kill(ranks[1], signal.SIGSTOP)
        os.kill(command.process.pid, signal.SIGTERM)
        if ranks:
            time.sleep(1)
            assert command.process.poll() is None
        else:
            time.sleep(0.35)
        try:
            os.kill(command.process.pid, signal.SIGTERM)
        except ProcessLookupError:
            assert devices == 1, "one process may have exited after the first"
        ended = command.wait(HANG_TIMEOUT / 2)
        time.sleep(0.5)
        left = [rank for rank in ranks if Path(f"/proc/{rank}/cmdline").exists() and not is_dead(rank)]
    assert left == []
    assert ended.err.count("Stopping after this step, and saving a checkpoint.") == 1
    if ended.status == 143:
        assert ended.err.count("Ended at once: nothing was saved since the last checkpoint.") == 1
    assert ended.status in ((143, 1) if devices > 1 else (143, 75, -signal.SIGTERM))  # the last: it had exited already
    whole = list_complete(run / "checkpoints")[-1].step
    last = max(training_lines(run))
    assert last - whole <= 2 * 5  # what was under way may not have been whole yet
    resumed = forked_shoal(tmp_path, "train", "run.yaml", f"train.steps={last + 2}", "--resume", "--json")
    assert resumed.status == 0, resumed.err


def test_ctrl_c_while_the_ranks_import_torch_is_one_sentence(instructions: Path, tmp_path: Path) -> None:
    """Ctrl-C reaches every process of a terminal, here those of a process group."""
    write_config(tmp_path, config(instructions))

    def importing() -> bool:
        ranks = [one for one in descendants(command.process.pid) if "shoal.launch.worker" in text_of(one, "cmdline")]
        return len(ranks) == 2 and all("libtorch" in text_of(one, "maps") for one in ranks)

    with Command(tmp_path, [str(SHOAL), "train", "run.yaml", "--json"]) as command:
        command.wait_until(importing)
        os.killpg(command.process.pid, signal.SIGINT)
        ended = command.wait(HANG_TIMEOUT)
    assert (ended.status, ended.out) == (1, ""), ended.err
    assert "Traceback" not in ended.err
    assert ended.err.endswith("shoal: The run was stopped before it could save.\n")


def text_of(process: int, name: str) -> str:
    try:
        return Path(f"/proc/{process}/{name}").read_text(errors="replace")
    except OSError:
        return ""


def is_dead(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def is_unlocked(folder: Path) -> bool:
    with (folder / OWNER).open("r+") as file, suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def test_ranks_do_not_outlive_a_launcher_that_is_killed(instructions: Path, tmp_path: Path) -> None:
    write_config(tmp_path, config(instructions, train__steps=100_000))
    run = tmp_path / "runs" / "run"
    (tmp_path / "tmp").mkdir()
    with_tmp = environment(tmp_path, TMPDIR=str(tmp_path / "tmp"))
    with ForkedCommand(tmp_path, ["train", "run.yaml"], with_tmp) as command:
        command.wait_until(lambda: len(training_lines(run)) > 2)
        ranks = descendants(command.process.pid)
        assert len(ranks) >= 2
        os.kill(command.process.pid, signal.SIGKILL)
        command.wait()
        deadline = time.monotonic() + PATIENCE
        while not all(is_dead(rank) for rank in ranks):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    folders = list((tmp_path / "tmp").iterdir())
    assert folders
    # A process that was forked since the ranks were listed may hold the lock of its launcher a moment longer.
    while not all(is_unlocked(folder) for folder in folders):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    alone = ("name=alone", "hardware.devices=1", "parallel.strategy=single", "train.steps=1", "train.micro_batch=8")
    assert forked_shoal(tmp_path, "train", "run.yaml", *alone, env=with_tmp).status == 0
    assert list((tmp_path / "tmp").iterdir()) == []
