"""The largest and smallest values that a config accepts can be planned, and those beyond are refused in a sentence."""

import json
import time
from contextlib import suppress
from typing import get_args

import pytest
from annotated_types import Ge, Gt, Le, Lt

from shoal import api
from shoal.config.schema import every_key
from shoal.mistakes import UserMistake
from shoal.plan.batches import divisors
from shoal.plan.render import plan_text

BASE = ["model.shape={hidden: 64, layers: 4}", "hardware.gpu=h100-80gb", "hardware.devices=8"]


@pytest.mark.parametrize(
    ("override", "most"),
    [
        (f"train.steps=1{'0' * 400}", 10**18),
        ("model.shape.layers=1000000", 10**5),
        (f"train.global_batch={10**15}", 10**9),
        ("parallel.pp=5000", 2**10),
        ("train.hang_timeout=1e18", 10**9),
    ],
    ids=lambda value: str(value)[:24],
)
def test_what_no_one_can_mean_is_refused_in_one_sentence(override: str, most: int) -> None:
    with pytest.raises(UserMistake) as refused:
        api.plan(api.load_config(None, [*BASE, override], planned=True))
    assert str(refused.value) == f"override {override}: must be at most {most}."


def test_the_time_of_a_plan_does_not_grow_with_its_counts() -> None:
    """A loop over blocks or over the sequences of a batch took a minute at these sizes."""

    def seconds(layers: int, batch: int, stages: int = 4) -> float:
        config = [f"model.shape.layers={layers}", f"train.global_batch={batch}", f"parallel.pp={stages}"]
        config.append(f"hardware.nodes={max(1, stages // 8)}")
        began = time.process_time()
        plan = api.plan(api.load_config(None, [*BASE, *config], planned=True))
        assert plan.alternatives
        assert plan.limits
        assert plan.changes or plan.fits
        return time.process_time() - began

    seconds(64, 720)  # imports
    assert seconds(100_000, 720_720_000) < 50 * seconds(100, 720)
    assert seconds(1024, 1024, stages=1024) < 5 * seconds(1024, 1024)  # 26 s with the memory of every pipeline rank


def test_divisors_are_in_order_and_complete() -> None:
    assert all(divisors(value) == [one for one in range(1, value + 1) if value % one == 0] for value in range(1, 200))


def bounds() -> dict[str, list[float]]:
    """Key → the outermost values that the schema accepts."""
    found: dict[str, list[float]] = {}
    for key, field in every_key():
        parts = [*field.metadata, *(part for member in get_args(field.annotation) for part in get_args(member))]
        for one in (*parts, *get_args(field.annotation)):
            if isinstance(one, Ge | Le):
                found.setdefault(key, []).append(one.ge if isinstance(one, Ge) else one.le)  # type: ignore[arg-type]
            elif isinstance(one, Gt | Lt):
                found.setdefault(key, []).append(5e-324 if isinstance(one, Gt) else 1 - 2**-53)
    return found


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 8))])
def test_every_key_at_its_bounds_gives_a_plan_or_a_sentence(part: int) -> None:
    keys = bounds()
    assert len(keys) > 60, "most numeric keys are found"
    for override in [f"{key}={value}" for key in list(keys)[part::8] for value in keys[key]]:
        with suppress(UserMistake):
            plan = api.plan(api.load_config(None, [*BASE, override], planned=True))
            json.dumps(plan.as_dict(), allow_nan=False)
            assert plan_text(plan)
