"""Random configs: each is planned, with consistent figures, or rejected with a sentence."""

import random

import pytest

from shoal import api
from shoal.catalogue.gpus import GPUS
from shoal.catalogue.shapes import NAMED
from shoal.mistakes import UserMistake
from shoal.plan.render import plan_text
from tests.plan.planning import leaves

VALUES: dict[str, list[object]] = {
    "model.shape": list(NAMED),
    "hardware.gpu": list(GPUS),
    "hardware.devices": [1, 2, 8],
    "hardware.nodes": [1, 1, 4],
    "parallel.strategy": ["auto", "ddp", "fsdp", "zero1", "zero2", "zero3"],
    "parallel.sharding": ["full_shard", "hybrid_shard", "shard_grad_op", "no_shard"],
    "parallel.tp": [1, 1, 2],
    "parallel.pp": [1, 1, 2],
    "parallel.cp": [1, 1, 2],
    "parallel.pp_schedule": ["1f1b", "interleaved", "zero-bubble"],
    "parallel.reshard": ["auto", "true", 2],
    "parallel.offload": ["none", "cpu", "optimizer", "{optimizer: nvme, path: /tmp}"],
    "parallel.compress": ["none", "bf16", "powersgd"],
    "parallel.engine": ["native", "deepspeed"],
    "train.recompute": ["none", "cheap", "selective", "full", "offload", "auto", "{every: 3}"],
    "train.precision": ["bf16-mixed", "16-mixed", "32-true", "bf16-true", "fp8"],
    "train.optimizer.name": ["adamw", "adamw8bit", "sgd", "lion", "muon"],
    "train.loss_impl": ["auto", "plain", "chunked", "fused"],
    "train.compile": ["auto", "false", "true"],
    "train.global_batch": [8, 64],
    "train.micro_batch": ["auto", 1, 4],
    "data.max_length": [512, 8192],
    "adapter.kind": ["none", "lora", "qlora"],
    "model.attention": ["auto", "eager"],
}


@pytest.mark.parametrize("seed", range(60))
def test_any_run_is_planned_or_rejected_with_a_sentence(seed: int) -> None:
    drawn = random.Random(seed)
    always = ("model.shape", "hardware.gpu")
    settings = [f"{key}={drawn.choice(of)}" for key, of in VALUES.items() if key in always or drawn.random() < 0.4]
    rejected = ""
    try:
        plan = api.plan(api.load_config(None, settings, planned=True))
    except UserMistake as mistake:
        rejected = str(mistake)
    if rejected:
        assert rejected.endswith(".")
        return
    found = plan.as_dict()
    memory, speed = found["memory"], found["speed"]
    assert leaves(memory["terms"]) == pytest.approx(memory["allocated_gib"], abs=0.02)
    assert leaves(speed["terms"]) == pytest.approx(speed["step_seconds"], rel=1e-3)
    assert 0 < memory["allocated_gib"] <= memory["reserved_gib"]
    assert speed["tokens_per_second_per_gpu"] > 0
    assert found["chosen"]["strategy"] != "auto"
    assert bool(plan.changes) <= (not plan.fits)
    assert plan_text(plan)
