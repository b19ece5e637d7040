"""Learning rate schedules."""

import pytest

from shoal.config.schema import ScheduleConfig, TrainConfig
from shoal.train.schedule import make_schedule, peak_lr


def curve(total: int = 100, **settings: object) -> list[float]:
    factor = make_schedule(ScheduleConfig(**settings), total)
    return [factor(step) for step in range(total)]


@pytest.mark.parametrize("name", ["cosine", "linear", "constant", "wsd"])
def test_the_learning_rate_rises_linearly_over_the_warmup_to_its_peak(name):
    lrs = curve(name=name, warmup=10)
    assert lrs[:10] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0])
    assert max(lrs) == 1.0


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd"])
def test_the_last_step_has_the_lowest_learning_rate(name):
    lrs = curve(name=name, warmup=10, min_ratio=0.1)
    assert lrs[-1] == pytest.approx(0.1)
    assert lrs[10:] == sorted(lrs[10:], reverse=True)


def test_cosine_is_half_way_down_in_the_middle():
    assert curve(101, name="cosine", warmup=0, min_ratio=0.0)[50] == pytest.approx(0.5, abs=0.02)


def test_wsd_is_constant_and_decays_at_the_end():
    lrs = curve(name="wsd", warmup=10, min_ratio=0.0, decay=0.2)
    assert lrs[10:80] == [1.0] * 70
    assert lrs[80] < 1.0
    assert lrs[89] == pytest.approx(0.5)


def test_constant_stays_where_the_warmup_ends():
    assert curve(name="constant", warmup=10)[10:] == [1.0] * 90


def test_a_warmup_below_one_is_a_fraction_of_the_steps():
    assert curve(name="constant", warmup=0.2) == curve(name="constant", warmup=20)


def test_a_warmup_longer_than_the_run_ends_with_it():
    assert curve(10, name="cosine", warmup=100)[-1] == 1.0


def test_scaling_multiplies_the_learning_rate_by_the_growth_of_the_batch_or_its_root():
    assert peak_lr(TrainConfig(lr=1e-4, global_batch=512, lr_scaling="linear", base_batch=128)) == pytest.approx(4e-4)
    assert peak_lr(TrainConfig(lr=1e-4, global_batch=512, lr_scaling="sqrt", base_batch=128)) == pytest.approx(2e-4)
    assert peak_lr(TrainConfig(lr=1e-4, global_batch=512)) == 1e-4


def test_the_schedule_may_be_longer_or_shorter_than_the_run():
    longer = curve(50, name="cosine", warmup=0.1, total_steps=100)
    assert longer == curve(100, name="cosine", warmup=0.1)[:50]
    shorter = curve(100, name="linear", warmup=10, total_steps=50, min_ratio=0.1)
    assert shorter[:50] == curve(50, name="linear", warmup=10, min_ratio=0.1)
    assert shorter[50:] == pytest.approx([0.1] * 50)
