"""Goodput: interruptions, the best interval between checkpoints, and the share of time that is useful."""

import json
import math
from pathlib import Path

import pytest

from benchmarks.goodput.simulate import simulate
from shoal.plan.goodput import Conditions
from shoal.plan.render import plan_text
from tests.plan.planning import EIGHT_H100, plan

SIMULATED = Path(__file__).parents[2] / "benchmarks" / "goodput" / "simulated.json"
EIGHT_B = ("model.shape=llama3-8b", *EIGHT_H100, "data.max_length=8192")


def test_the_default_rate_is_that_published_of_llama_3() -> None:
    found = plan("model.shape=llama3.1-405b", "hardware.gpu=h100-80gb", "hardware.devices=8", "hardware.nodes=2048",
                 "train.global_batch=4096", "parallel.tp=8", "parallel.pp=16").as_dict()["goodput"]  # fmt: skip
    assert found["interruptions_per_day"] * 54 == pytest.approx(419, rel=1e-5)


def test_the_shares_of_time_add_up_and_interruptions_follow_the_duration() -> None:
    found = plan(*EIGHT_B, "train.steps=1000000").as_dict()
    goodput = found["goodput"]
    parts = [goodput[f"{part}_share"] for part in ("effective", "saving", "repeated", "restart")]
    assert sum(parts) == pytest.approx(1, abs=1e-5)
    assert all(part >= 0 for part in parts)
    assert goodput["seconds_to_finish"] == pytest.approx(
        found["speed"]["seconds_to_finish"] / goodput["effective_share"], rel=1e-4
    )
    days = goodput["seconds_to_finish"] / 86400
    assert goodput["interruptions"] == pytest.approx(goodput["interruptions_per_day"] * days, rel=1e-4)
    # Weights and two moments in fp32.
    assert goodput["checkpoint_bytes"] == pytest.approx(12 * found["model"]["parameters"], rel=1e-6)


def test_a_run_of_seconds_is_shown_without_its_goodput() -> None:
    tiny = "model.shape={family: llama, hidden: 64, layers: 2, heads: 2, vocab: 260}"
    said = plan_text(plan(tiny, "hardware.gpu=h100-80gb", "train.steps=10", "data.max_length=64"))
    assert "goodput" not in said
    assert " 0 ms" not in said
    assert "goodput" in plan_text(plan(*EIGHT_B, "train.steps=1000"))


def test_an_unknown_duration_leaves_the_rates() -> None:
    goodput = plan(*EIGHT_B).as_dict()["goodput"]
    assert goodput["interruptions"] is None
    assert goodput["seconds_to_finish"] is None
    assert goodput["effective_share"] > 0.99


def test_auto_is_the_best_interval_and_hardware_changes_it() -> None:
    alone = "data.validation=0"
    given = plan(*EIGHT_B, alone).goodput
    auto = plan(*EIGHT_B, alone, "checkpoint.every=auto")
    assert auto.goodput.every == auto.goodput.best_every == given.best_every == auto.choice.config.checkpoint.every
    assert auto.choice.requested.checkpoint.every == "auto"
    assert auto.goodput.share >= given.share
    # Young: the interval goes with the square root of the time between interruptions.
    often = plan(*EIGHT_B, alone, "hardware.mtbf_hours=506.77").goodput
    assert often.conditions.best == pytest.approx(given.conditions.best / 10, rel=0.01)
    # A checkpoint is complete before the next one begins, however slow the disk.
    slow = plan(*EIGHT_B, alone, "hardware.mtbf_hours=506.77", "hardware.disk_gb_per_second=0.05").goodput
    assert slow.best_every * slow.step_seconds >= slow.conditions.written > often.conditions.best
    # A synchronous save blocks until it is written; restarts cost time, but do not change the interval.
    blocking = plan(*EIGHT_B, alone, "checkpoint.async=false").goodput
    assert blocking.conditions.blocked == pytest.approx(given.conditions.written)
    assert blocking.conditions.written == 0
    quick = plan(*EIGHT_B, alone, "hardware.restart_minutes=1").goodput
    assert (quick.best_every, quick.restarting) == (given.best_every, pytest.approx(given.restarting / 15, rel=1e-3))


def test_auto_coincides_with_evaluations_and_permanent_checkpoints() -> None:
    for settings, unit in ((("eval.every=70",), 70), (("eval.every=300000",), 300000)):
        found = plan(*EIGHT_B, *settings).goodput.best_every
        assert found % unit == 0 or unit % found == 0
    assert 1000 % plan(*EIGHT_B, "checkpoint.keep_every=1000").goodput.best_every == 0


def test_an_adapter_has_small_checkpoints() -> None:
    small = plan(*EIGHT_B, "adapter.kind=lora").goodput
    assert small.bytes < plan(*EIGHT_B).goodput.bytes / 100


def test_the_text_says_what_a_long_run_loses() -> None:
    from shoal.plan.render import plan_text

    text = plan_text(plan(*EIGHT_B, "train.steps=1000000"))
    assert "goodput 99.9" in text
    assert "checkpoint.every=auto: every" in text
    assert "checkpoint.every=auto" not in plan_text(plan(*EIGHT_B, "checkpoint.every=auto"))


def test_a_save_waits_for_the_one_before_it() -> None:
    # 96 s to write a checkpoint after every 13 s: as many as can be written, with 13 s of training in each.
    planned = plan(*EIGHT_B, "train.steps=10000", "checkpoint.every=2")
    often = planned.goodput
    interval, written, blocked = often.interval, often.conditions.written, often.conditions.blocked
    assert interval < written / 5
    assert often.share == pytest.approx(interval / (written + blocked), rel=0.01)
    assert often.saving == pytest.approx(1 - often.share, rel=0.01)
    assert often.best_share > 0.99
    assert f"blocks for {written - interval + blocked:.1f} s" in plan_text(planned)


def test_auto_is_not_rounded_to_where_saves_wait() -> None:
    settings = ("model.shape=llama3.2-1b", *EIGHT_H100, "train.micro_batch=8", "train.global_batch=512")
    slow = ("eval.every=100", "hardware.mtbf_hours=100", "hardware.disk_gb_per_second=0.06", "data.max_length=2048")
    found = plan(*settings, *slow).goodput
    assert found.best_every % 100 == 0
    assert found.best_every * found.step_seconds >= found.conditions.written


def test_no_progress_is_a_share_of_zero_and_not_an_overflow() -> None:
    found = plan(*EIGHT_B, "train.steps=100", "hardware.mtbf_hours=1e-6").as_dict()["goodput"]
    assert found["effective_share"] == 0
    assert found["seconds_to_finish"] is None


def test_a_simulation_of_failing_devices_agrees_with_the_formula() -> None:
    conditions = Conditions(mtbf=11_000.0, restart=60.0, blocked=5.0, written=300.0)
    for interval in (conditions.written / 10, conditions.best / 4, conditions.best, conditions.best * 4):
        ran = simulate(conditions, interval, devices=64, interruptions=400, seed=3)
        assert 1 - conditions.share(interval) == pytest.approx(ran.lost, rel=0.1)


def test_the_committed_simulation_agrees_with_the_formula() -> None:
    runs = json.loads(SIMULATED.read_text())["runs"]
    assert [run["devices"] for run in runs] == [8, 512, 16_384]
    for run in runs:
        for mode in (True, False):
            rows = [row for row in run["rows"] if row["async"] is mode]
            assert all(abs(row["off"]) < 3 * row["expected_scatter"] for row in rows), run["devices"]
            best = next(row for row in rows if row["times_best"] == 1.0)
            assert best["lost_share"] == min(row["lost_share"] for row in rows)
            assert math.isclose(best["interruptions"], best["interruptions_forecast"], rel_tol=0.05)
