"""Encoders: every strategy trains the same as one process, with the masks of one process."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.encoders import classifying, masked, write_labelled
from tests.harness import slow, train_again_on
from tests.parity.test_parity import hold_equal

OBJECTIVES = {"masked_lm": masked, "classify": classifying}
FSDP = {"strategy": "fsdp"}
# Without zero3, shard_grad_op and no_shard: other names of full_shard, zero2 and ddp (test_parity.py).
STRATEGIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ddp": ({"strategy": "ddp"}, {}),
    "zero1": ({"strategy": "zero1"}, {}),
    "zero2": ({"strategy": "zero2"}, {}),
    "full_shard": (FSDP, {}),
    "recompute": (FSDP, {"recompute": "full"}),
}
QUICK = (("masked_lm", "full_shard"), ("classify", "ddp"))
ALL = [(objective, strategy) for objective in OBJECTIVES for strategy in STRATEGIES]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_labelled(tmp_path_factory.mktemp("rows") / "rows.jsonl")


@pytest.fixture(scope="module")
def reference(rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def train(objective: str, precision: str = "32-true", global_batch: int = 4) -> Path:
        config = _config(objective, rows, precision, train__global_batch=global_batch)
        return train_again_on(1, config, tmp_path_factory.mktemp("reference"))

    return train


def _config(objective: str, rows: Path, precision: str = "32-true", **changes: Any) -> dict[str, Any]:
    common = {"train__steps": 2, "train__global_batch": 4, "train__micro_batch": 2, "train__precision": precision}
    return OBJECTIVES[objective](rows, **common | changes)


def _changes(strategy: str) -> dict[str, Any]:
    parallel, train = STRATEGIES[strategy]
    return {"parallel": parallel, **{f"train__{key}": value for key, value in train.items()}}


@pytest.mark.parametrize(("objective", "strategy"), [one if one in QUICK else slow(*one) for one in ALL])
def test_a_strategy_trains_an_encoder_the_same_as_one_process(objective, strategy, rows, reference, tmp_path):
    run = train_again_on(2, _config(objective, rows, **_changes(strategy)), tmp_path)
    hold_equal(run, reference(objective), bitwise=True)


@pytest.mark.slow
def test_a_compiled_encoder_trains_the_same(rows, tmp_path):
    """On sequences of one length, which are compiled once."""
    changes = {"data__pack": True, "data__max_length": 32}
    runs = [
        train_again_on(1, _config("masked_lm", rows, **changes, name=name, train__compile=compiled), tmp_path)
        for name, compiled in (("eager", False), ("compiled", "aot_eager"))
    ]
    hold_equal(*runs, bitwise=False)


@pytest.mark.slow
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_hybrid_sharding_trains_an_encoder_the_same_as_one_process(objective, rows, reference, tmp_path):
    parallel = {**FSDP, "sharding": "hybrid_shard", "replicate": 2}
    config = _config(objective, rows, parallel=parallel, train__global_batch=8)
    run = train_again_on(4, config, tmp_path)
    hold_equal(run, reference(objective, global_batch=8), bitwise=False)


@pytest.mark.slow
@pytest.mark.parametrize(("objective", "strategy"), [("masked_lm", "full_shard"), ("classify", "zero1")])
def test_in_bf16_a_strategy_trains_an_encoder_nearly_the_same(objective, strategy, rows, reference, tmp_path):
    run = train_again_on(2, _config(objective, rows, "bf16-mixed", **_changes(strategy)), tmp_path)
    hold_equal(run, reference(objective, "bf16-mixed"), bitwise=False, loss=2e-3, norm=1e-2)
