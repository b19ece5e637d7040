"""Incompatible keys are refused when the config is loaded, with the reason and an alternative."""

import pytest

from shoal.config.load import load_config
from shoal.mistakes import UserMistake


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ["parallel.strategy=zero3", "parallel.sharding=hybrid_shard"],
            "parallel.sharding hybrid_shard is for fsdp, and zero3 has its own; "
            "use strategy fsdp with sharding hybrid_shard.",
        ),
        (["parallel.strategy=zero1", "parallel.sharding=shard_grad_op"], "use strategy zero2."),
        (["parallel.strategy=zero2", "parallel.reshard=true"], "and zero2 keeps them; use fsdp with full_shard."),
        (
            ["parallel.strategy=fsdp", "parallel.sharding=shard_grad_op", "parallel.reshard=2"],
            "parallel.reshard 2 frees weights after the forward pass, and shard_grad_op keeps them",
        ),
        (["parallel.strategy=ddp", "parallel.offload=cpu"], "ddp shards no weights; use strategy fsdp, or offload opt"),
        (["parallel.strategy=fsdp", "parallel.offload=cpu", "parallel.pp=2"], "use offload optimizer, or pp 1."),
        (["parallel.tp=2", "train.optimizer.name=muon"], "muon needs whole; use tp 1 with strategy fsdp, or"),
        (["parallel.pp=2", "parallel.compress=bf16"], "use compress none, or pp 1."),
        (
            ["parallel.cp=2", "model.attention=eager"],
            "needs unsharded sequences, and parallel.cp shards them; use auto.",
        ),
        (
            ["parallel.tp=2", "model.attention=eager"],
            "needs unsharded sequences, and parallel.tp shards them; use auto.",
        ),
        (
            ["parallel={pp: 2, pp_schedule: zero-bubble}", "train.recompute=selective"],
            "use recompute full, or pp_schedule interleaved.",
        ),
        (["adapter.from=lora"], "adapter.from lora is an adapter to train, and adapter.kind is none; use kind lora."),
        (
            ["train.objective=dpo", "data={path: a.jsonl, streaming: true}", "train.steps=1"],
            "data.streaming reads data while training, and train.objective dpo computes the reference of all of it",
        ),
        (["parallel.offload={optimizer: cpu, path: x}"], "parallel.offload to cpu has no path"),
        (["parallel.cp=2", "data.max_length=250"], "it must be a multiple of 4, such as 248 or 252."),
        (["parallel.tp=3", "data.max_length=2"], "it must be a multiple of 3, such as 3."),
        (["parallel.tp=3", "data.max_length=48", "hardware.devices=8"], "use 6 processes or 9 processes"),
    ],
)
def test_incompatible_keys_are_refused_with_an_alternative(overrides: list[str], says: str) -> None:
    with pytest.raises(UserMistake) as caught:
        load_config(None, ["model.shape=gpt2", *overrides])
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_line_of_the_file_is_named(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("model: {shape: gpt2}\nparallel:\n  strategy: ddp\n  offload: cpu\n")
    with pytest.raises(UserMistake, match=r"^run.yaml:4: parallel.offload cpu offloads sharded state"):
        load_config("run.yaml")
