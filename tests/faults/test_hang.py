"""A hung rank: all ranks dump their stacks, the cause is reported, and the run is restarted."""

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shoal.launch.join import heartbeat_file, joined_within
from shoal.resilience.watchdog import Watchdog
from tests.harness import PATIENCE, reference_run, run_ranks, settings, train_on
from tests.launch.command import ForkedCommand, losses, rank_process, training_lines, write_config

HANG_TIMEOUT = 4.0


@contextmanager
def running(watchdog: Watchdog) -> Iterator[Watchdog]:
    watchdog.start()
    yield watchdog
    watchdog.stop(failed=True)


def hang(folder: Path, act: Callable[[int], None], *, one_node: bool = True) -> tuple[str, dict[int, str]]:
    """The watchdog's message and each rank's stacks when three ranks do `act` instead of their next step."""
    said = folder / "said"

    def be() -> None:
        with joined_within(60) as ranks:
            watchdog = Watchdog(
                folder / "hang",
                ranks,
                1.0,
                heartbeats=heartbeat_file() if one_node else None,
                tell=lambda text: said.write_text(text) and None,
            )
            with running(watchdog):
                dist.all_reduce(torch.ones(3))
                watchdog.heartbeat(7, "training")
                act(ranks.rank)

    # Ranks that exit break the connections of the others.
    with pytest.raises((AssertionError, RuntimeError), match=r"ended without an answer|Connection"):
        run_ranks(3, be)
    found = {int(path.stem[-5:]): path.read_text() for path in (folder / "hang").glob("rank-*.txt")}
    assert (folder / "hang" / "verdict.txt").read_text().strip() == said.read_text()
    return said.read_text(), found


def test_a_rank_that_skips_a_collective_is_reported_with_the_collective_and_its_activity(tmp_path):
    def act(rank: int) -> None:
        if rank == 1:
            time.sleep(60)
        dist.all_reduce(torch.ones(5))

    said, stacks = hang(tmp_path, act)
    assert said.startswith("The run made no progress for 1 s: rank 1 has not reached all_reduce number 2 of group ")
    assert " of group gloo 0" in said
    assert "it was training after step 7, at test_hang.py:" in said
    assert set(stacks) == {0, 1, 2}
    assert "in act" in stacks[1]
    assert "all_reduce number 2" not in stacks[1]
    assert "all_reduce number 2" in stacks[0]
    assert "all_reduce" in stacks[2]


def test_a_stopped_rank_is_reported_and_killed(tmp_path):
    def act(rank: int) -> None:
        if rank == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.all_reduce(torch.ones(5))

    said, stacks = hang(tmp_path, act)
    assert said.startswith("The run made no progress for 1 s: rank 0 is stopped; it was training after step 7.")
    assert set(stacks) == {1, 2}


def test_a_stopped_rank_of_another_node_is_reported_with_its_host_and_its_activity(tmp_path, monkeypatch):
    monkeypatch.setattr("shoal.resilience.watchdog.GRACE", 1.0)

    def act(rank: int) -> None:
        if rank == 0:
            time.sleep(0.6)  # for a sign of life
            subprocess.Popen(["sh", "-c", f"sleep 5; kill -9 {os.getpid()}"])  # which its own node would do
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.all_reduce(torch.ones(5))

    said, stacks = hang(tmp_path, act, one_node=False)
    host = socket.gethostname()
    expected = f"The run made no progress for 1 s: rank 0 on {host} does not respond; it was training after step 7."
    assert said.startswith(expected)
    assert set(stacks) == {1, 2}


@pytest.mark.slow
def test_the_rank_that_hung_first_waits_for_the_reports_of_the_others(tmp_path):
    """It times out first, and the others have had heartbeats since."""

    def be() -> None:
        with joined_within(60) as ranks:
            told = lambda text: (tmp_path / "said").write_text(text) and None  # noqa: E731
            with running(Watchdog(tmp_path / "hang", ranks, 3.0, heartbeats=heartbeat_file(), tell=told)) as watchdog:
                watchdog.heartbeat(7, "training")
                if ranks.rank == 1:
                    time.sleep(60)
                time.sleep(2.5)
                watchdog.heartbeat(8, "training")
                dist.all_reduce(torch.ones(5))

    with pytest.raises((AssertionError, RuntimeError), match=r"ended without an answer|Connection"):
        run_ranks(3, be)
    assert "rank 1 " in (tmp_path / "said").read_text()
    assert len(list((tmp_path / "hang").glob("rank-*.txt"))) == 3


def test_survivors_of_a_dead_rank_do_not_wait_for_it(tmp_path):
    """Where no connection breaks: they see in /proc that its process is dead."""

    def be() -> None:
        with joined_within(600) as ranks:
            watchdog = Watchdog(tmp_path, ranks, 600, heartbeats=heartbeat_file())
            watchdog.start()
            watchdog.heartbeat(1, "training")
            dist.barrier()
            if ranks.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(2 * PATIENCE)

    with pytest.raises(AssertionError, match="ended without an answer"):  # and not: gave no answer
        run_ranks(2, be)


def test_a_slow_step_is_not_a_hang(instructions, tmp_path):
    config = settings(instructions, train__hang_timeout=3.0, train__steps=3, eval__every=1, data__validation=0.3)
    train_on(2, config, tmp_path)
    assert not list((tmp_path / "run" / "logs").glob("hang-*"))


def config_of(data: Path, **changes: Any) -> dict[str, Any]:
    return settings(
        data,
        train__steps=60,
        train__hang_timeout=HANG_TIMEOUT,
        checkpoint__every=20,
        hardware__devices=2,
        data__max_length=64,
        data__train_on="all",
        **changes,
    )


@pytest.mark.slow
def test_a_hung_run_is_restarted_and_ends_as_if_undisturbed(instructions: Path, tmp_path: Path) -> None:
    undisturbed = reference_run(config_of(instructions), 2)
    write_config(tmp_path, config_of(instructions))
    run = tmp_path / "runs" / "run"
    with ForkedCommand(tmp_path, ["train", "run.yaml", "--max-restarts", "1", "--json"]) as command:
        command.wait_until(lambda: max(training_lines(run), default=0) > 22)
        os.kill(rank_process(command.process.pid, 1), signal.SIGSTOP)
        ended = command.wait()
    assert ended.status == 0, ended.err
    said = next(line for line in ended.err.splitlines() if "made no progress" in line)
    assert "rank 1 is stopped; it was training after step" in said
    assert "All processes were restarted (restart 1 of " in said
    assert losses(run) == losses(undisturbed)
    report = json.loads((run / "logs" / "hang-0" / "rank-00000.json").read_text())
    assert report["collectives"]
    assert "in run_steps" in (run / "logs" / "hang-0" / "rank-00000.txt").read_text()


@pytest.mark.slow
def test_a_hung_run_without_restarts_fails_with_that_message(instructions: Path, tmp_path: Path) -> None:
    write_config(tmp_path, config_of(instructions))
    run = tmp_path / "runs" / "run"
    with ForkedCommand(tmp_path, ["train", "run.yaml", "--json"]) as command:
        command.wait_until(lambda: len(training_lines(run)) > 2)
        os.kill(rank_process(command.process.pid, 0), signal.SIGSTOP)
        ended = command.wait()
    assert (ended.status, ended.out) == (1, "")
    said = ended.err.splitlines()[-1]
    assert said.startswith(f"shoal: The run made no progress for {HANG_TIMEOUT:g} s: rank 0 is stopped")
    assert said.endswith("Resume with: shoal train run.yaml --json --resume")
    assert "Traceback" not in ended.err
