"""`shoal plan` refuses what training refuses, and nothing else, in combinations that nobody has chosen."""

import os
import random
from pathlib import Path
from typing import Any

import pytest

from shoal import api
from shoal.mistakes import UserMistake
from tests.harness import run_ranks, settings

SEEDS = range(80)


def draw(seed: int, data: Path) -> dict[str, Any]:
    """A config for four or eight devices. What only the names of a model's parameters tell is left out."""
    choose = random.Random(seed).choice
    family = choose(["llama", "mistral", "qwen2", "qwen3", "neox", "gpt2"])
    shape = {"family": family, "hidden": choose([48, 64, 128]), "layers": choose([3, 4]), "heads": choose([4, 8])}
    shape |= {"ffn": choose([96, 128, 512]), "vocab": 260, "positions": choose([512, 512, 48])}
    if family not in ("neox", "gpt2"):
        shape["kv_heads"] = choose([1, 2, 4])
    parallel: dict[str, Any] = choose(
        [{}, {}, {"tp": 2}, {"tp": 4}, {"pp": 2}, {"cp": 2}, {"tp": 2, "pp": 2}, {"cp": 4}]
    )
    parallel |= {"strategy": choose(["auto", "ddp", "zero1", "zero2", "fsdp", "fsdp"])}
    parallel |= {
        "pp_schedule": choose(["1f1b", "interleaved", "zero-bubble"]),
        "cp_method": choose(["gather", "ulysses"]),
    }
    if parallel["strategy"] == "fsdp":
        parallel |= {"sharding": choose(["full_shard", "hybrid_shard", "no_shard"]), "replicate": choose(["auto", 2])}
        parallel["offload"] = choose(["none", "none", "cpu"])
    if choose([False, True]):
        parallel["wrap"] = {"min_params": choose([1000, 20_000])}
    config = settings(data, model__shape=shape, parallel=parallel, data__max_length=64)
    config["hardware"] = {"devices": choose([4, 8])}
    config["train"] |= {
        "recompute": choose(["none", "selective", "auto"]),
        "global_batch": choose([8, 16, 16, 24]),
        "micro_batch": choose([1, 1, 2, "auto"]),
        "optimizer": {"name": choose(["adamw", "adamw", "adamw8bit", "muon"])},
    }
    if choose([False, False, True]):
        config["adapter"] = {
            "kind": choose(["lora", "qlora"]),
            "dora": choose([False, True]),
            "rank": choose([4, 4, 56]),
        }
        config["adapter"]["quantize"] = choose(["nf4", "nf4-dq"])
    return config


def refused(door: Any, config: dict[str, Any]) -> str:
    """The sentences of the refusal; empty if there is none."""
    try:
        found = door(api.config_from_mapping(config))
    except UserMistake as mistake:
        return str(mistake)
    return " ".join(note for note in getattr(found, "notes", ()) if "does not accept" in note)


@pytest.mark.slow
def test_the_plan_refuses_what_training_refuses(instructions: Path) -> None:
    def compare() -> list[tuple[int, str, str]]:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):  # as a command that starts the processes
            del os.environ[name]
        configs = {seed: draw(seed, instructions) for seed in SEEDS}
        return [(seed, refused(api.plan, one), refused(api.dry_run, one)) for seed, one in configs.items()]

    (found,) = run_ranks(1, compare)
    assert [one for one in found if bool(one[1]) != bool(one[2])] == []
    assert 20 < sum(not planned for _, planned, _ in found) < len(SEEDS) - 20
