"""Straggler detection: a slow rank is reported once, with the cause."""

import contextlib
import multiprocessing
import os
from typing import Any

import pytest

from shoal import api
from shoal.config.schema_train import SlowRankConfig
from shoal.resilience.stragglers import StragglerDetector
from tests.harness import run_ranks, settings

STEP = 0.1


def warnings_of(times_of_steps, *, behind=0.3, steps=3):
    said: list[str] = []
    detector = StragglerDetector(SlowRankConfig(behind=behind, steps=steps), len(times_of_steps[0]), said.append)
    for times in times_of_steps:
        detector.update(times, STEP)
    return said


EVEN = [(0.001, 0.0), (0.0011, 0.0), (0.0009, 0.001), (0.001, 0.0)]
THIRD_SLOW = [*EVEN[:2], (0.0015, 0.0), EVEN[3]]
THIRD_WAITS = [*EVEN[:2], (0.001, 0.06), EVEN[3]]


def test_a_slow_device_is_reported_once():
    said = warnings_of([THIRD_SLOW] * 10)
    assert said == [
        "straggler: rank 2 has been 50% slower than the others for 3 steps: "
        "a matmul takes 1.50 ms, and 1.00 ms on the others."
    ]


def test_a_slow_disk_is_reported_once():
    said = warnings_of([THIRD_WAITS] * 10)
    assert len(said) == 1
    assert "rank 2 has been 60% slower" in said[0]
    assert "it waits 60.0 ms longer for data per step of 100.0 ms" in said[0]


@pytest.mark.parametrize(
    "times",
    [
        [EVEN] * 10,
        [THIRD_SLOW, THIRD_SLOW, EVEN] * 5,  # never for three steps in a row
        [[(0.001, 0.2)] * 4] * 10,  # all wait for the same time
        [[(0.0, 0.0), (0.001, 0.0)]] * 10,  # not measured on every rank yet
        [[(0.001, 0.0)]] * 10,  # alone
    ],
)
def test_no_rank_is_reported_without_cause(times):
    assert warnings_of(times) == []


def spin(core: int) -> None:
    os.sched_setaffinity(0, {core})
    while True:
        pass


@pytest.mark.slow
def test_a_rank_that_shares_its_core_with_others_is_reported_during_training(instructions, tmp_path, capfd):
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("there is one core")
    config = settings(instructions, train__steps=30, train__slow_rank={"behind": 0.5, "steps": 8}, log__every=5)

    def be() -> dict[str, Any]:
        rank = int(os.environ["RANK"])
        os.sched_setaffinity(0, {cores[rank]})
        if rank == 0:  # other processes of this machine should not slow down this one too
            with contextlib.suppress(PermissionError):
                os.setpriority(os.PRIO_PROCESS, 0, -15)
        return api.train(api.config_from_mapping(config), runs=tmp_path).as_dict()

    fork = multiprocessing.get_context("fork")
    # Many more than other processes of this machine, which the scheduler moves to the other core.
    others = [fork.Process(target=spin, args=(cores[1],), daemon=True) for _ in range(12)]
    for other in others:
        other.start()
    try:
        run_ranks(2, be)
    finally:
        for other in others:
            other.kill()
    said = " ".join(capfd.readouterr().err.split())
    # Once while it lasts; on a busy machine the other rank may be as slow for a moment in between.
    assert said.count("slower than the others for 8 steps") in (1, 2)
    assert "warning: straggler: rank 1 has been" in said
    assert "a matmul takes" in said
