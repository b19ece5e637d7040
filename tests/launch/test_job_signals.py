"""What signals mean in a Slurm job, which Slurm itself sends."""

import os
import signal
import subprocess
import sys

import pytest

EARLY = """
import os, signal
from shoal.resilience.signals import StopRequest, keep_user_signals
keep_user_signals()
os.kill(os.getpid(), signal.SIGUSR1)  # while torch is imported
with StopRequest() as stop:
    print(stop.wanted)
with StopRequest() as stop:
    print(stop.wanted)
"""
TWICE = """
import os, signal, sys, time
from shoal.resilience.signals import StopRequest
with StopRequest(0.05) as stop:
    for number in (signal.SIGUSR1, int(sys.argv[1])):
        os.kill(os.getpid(), number)
        time.sleep(0.15)
    print("saved")
"""


def run(program: str, *arguments: str, in_job: bool) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=environment | ({"SLURM_JOB_ID": "4711"} if in_job else {}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_job_that_is_asked_to_stop_while_it_starts_stops_after_its_first_step() -> None:
    kept = run(EARLY, in_job=True)
    assert (kept.returncode, kept.stdout) == (0, "True\nFalse\n"), kept.stderr
    assert run(EARLY, in_job=False).returncode == -signal.SIGUSR1


@pytest.mark.parametrize(
    ("number", "in_job", "saved"),
    [(signal.SIGTERM, True, True), (signal.SIGINT, True, False), (signal.SIGTERM, False, False)],
)
def test_slurm_may_ask_twice_and_only_ctrl_c_ends_a_job_at_once(number: int, in_job: bool, saved: bool) -> None:
    done = run(TWICE, str(int(number)), in_job=in_job)
    assert (done.returncode, done.stdout) == ((0, "saved\n") if saved else (128 + number, "")), done.stderr
