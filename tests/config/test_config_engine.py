"""`parallel.engine: deepspeed`: the ZeRO stage of each strategy, and what is refused before anything is imported."""

import subprocess
import sys

import pytest

from shoal.config.combinations import find_combinations
from shoal.config.effect import without_effect
from shoal.config.engine import zero_stage
from shoal.config.load import load_config
from shoal.mistakes import UserMistake

ENGINE = ["model.shape=gpt2", "parallel.engine=deepspeed"]


@pytest.mark.parametrize(
    ("strategy", "sharding", "stage"),
    [
        ("single", "full_shard", 0),
        ("ddp", "full_shard", 0),
        ("fsdp", "no_shard", 0),
        ("zero1", "full_shard", 1),
        ("zero2", "full_shard", 2),
        ("fsdp", "shard_grad_op", 2),
        ("zero3", "full_shard", 3),
        ("fsdp", "full_shard", 3),
    ],
)
def test_every_strategy_has_a_zero_stage(strategy: str, sharding: str, stage: int) -> None:
    assert zero_stage(strategy, sharding) == stage


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["parallel.tp=2"], "parallel.tp 2 cannot be used with parallel.engine deepspeed, which shards over data-par"),
        (["parallel.pp=2"], "use pp 1, or parallel.engine native."),
        (["parallel.cp=2"], "use cp 1, or parallel.engine native."),
        (["parallel.sharding=hybrid_shard"], "use full_shard, or parallel.engine native."),
        (["parallel={strategy: ddp, engine: deepspeed, compress: bf16}"], "use compress none, or"),
        (["adapter.kind=qlora"], "cannot hold 4-bit ones; use lora, or parallel.engine native."),
        (["train.precision=fp8"], "use bf16-mixed, or parallel.engine native."),
        (["train.precision=bf16-true"], "bf16 or fp16 with fp32 master weights"),
        (["train.optimizer.name=muon"], "it needs whole matrices, and ZeRO updates one-dimensional shards of all"),
        (["train.optimizer.name=adamw8bit"], "use adamw, lion, sgd, or parallel.engine native."),
        (["train.compile=true"], "train.compile true cannot be used with parallel.engine deepspeed"),
        (["train.cuda_graphs=true"], "use auto, or parallel.engine native."),
        (["train.on_spike=skip"], "which measures, clips and updates in one step; use report"),
        (["train.on_spike={action: skip}"], "use report, or parallel.engine native."),
        (["model.freeze=[wte]", "train.precision=bf16-mixed"], "has no fp32 weights of frozen parameters to save"),
        (
            ["parallel={strategy: ddp, engine: deepspeed}", "adapter.kind=lora", "train.precision=bf16-mixed"],
            "needs ZeRO on parallel.engine deepspeed; use strategy zero1",
        ),
        (["parallel={strategy: ddp, engine: deepspeed, offload: optimizer}"], "and ddp shards nothing; use strat"),
        (["parallel={strategy: zero2, engine: deepspeed, offload: cpu}"], "zero2 is ZeRO-2 on parallel.engine deep"),
        (
            ["parallel={strategy: zero1, engine: deepspeed, offload: {optimizer: nvme, path: x}}"],
            "to nvme is a part of ZeRO-3, and zero1 is ZeRO-1 on parallel.engine deepspeed; use strategy zero3",
        ),
        (
            ["parallel={strategy: zero2, engine: deepspeed, offload: {parameters: cpu}}"],
            "parallel.offload.parameters needs ZeRO-3",
        ),
        (
            ["parallel={engine: native, offload: {parameters: cpu}}"],
            "is for parallel.engine deepspeed; use offload cpu",
        ),
        (["parallel={offload: {parameters: nvme}}"], "parallel.offload to nvme needs path"),
    ],
)
def test_what_the_engine_cannot_do_is_refused_with_an_alternative(overrides: list[str], says: str) -> None:
    with pytest.raises(UserMistake) as caught:
        load_config(None, [*ENGINE, *overrides])
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "parallel",
    [
        "{engine: deepspeed}",
        "{engine: deepspeed, strategy: ddp}",
        "{engine: deepspeed, strategy: zero1, offload: optimizer}",
        "{engine: deepspeed, strategy: zero3, offload: cpu}",
        "{engine: deepspeed, strategy: fsdp, offload: {optimizer: nvme, parameters: nvme, path: /scratch}}",
    ],
)
def test_what_the_engine_does_is_accepted(parallel: str) -> None:
    config = load_config(None, ["model.shape=gpt2", f"parallel={parallel}"])
    assert list(find_combinations(config)) == []


def test_fsdp_units_have_no_effect_on_deepspeed() -> None:
    config = load_config(None, [*ENGINE, "parallel.strategy=zero3", "parallel.prefetch=2"])
    assert (
        "parallel.prefetch 2 has no effect: parallel.engine is deepspeed, which has no FSDP units."
        in without_effect(config, 2)
    )


def test_a_refusal_imports_neither_torch_nor_deepspeed() -> None:
    code = (
        "import sys\nfrom shoal.config.load import load_config\n"
        "try:\n    load_config(None, ['model.shape=gpt2', 'parallel={engine: deepspeed, tp: 2}'])\n"
        "except Exception as mistake:\n    print(mistake)\n"
        "print(sorted({'torch', 'deepspeed'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout.splitlines()[-1] == "[]"
    assert "parallel.tp 2 cannot be used" in ran.stdout
