"""Nothing is silently ignored: an option without effect says so, and one with effect does not."""

from typing import Any

import pytest

from shoal.config import Config, without_effect
from shoal.config.effect import _RULES
from shoal.config.load import config_from_mapping, config_values
from shoal.config.schema import every_key


def config(**blocks: Any) -> Config:
    return Config.model_validate({"model": {"shape": "gpt2"}, **blocks})


def test_defaults_are_never_reported() -> None:
    for world_size in (None, 1, 8):
        assert without_effect(config(), world_size) == []


@pytest.mark.parametrize(
    ("useless", "useful", "world_size", "says"),
    [
        (
            {"log": {"wandb": {"project": "alpaca"}}},
            {"log": {"wandb": {"project": "alpaca"}, "to": ["wandb"]}},
            None,
            "log.wandb.project alpaca has no effect: log.to does not name wandb.",
        ),
        (
            {"log": {"mlflow": {"experiment": "alpaca"}, "to": ["wandb"]}},
            {"log": {"mlflow": {"experiment": "alpaca"}, "to": ["mlflow"]}},
            None,
            "log.mlflow.experiment alpaca has no effect: log.to does not name mlflow.",
        ),
        (
            {"data": {"path": "a.h5ad", "source": "cells", "cells": {"bins": 11}}},
            {"data": {"path": "a.h5ad", "source": "cells", "cells": {"bins": 11, "tokens": "binned"}}},
            None,
            "data.cells.bins 11 has no effect: data.cells.tokens is rank_value.",
        ),
        (
            {"data": {"path": "a.h5ad", "source": "cells", "cells": {"medians": "data", "tokens": "binned"}}},
            {"data": {"path": "a.h5ad", "source": "cells", "cells": {"medians": "data"}}},
            None,
            "data.cells.medians data has no effect: data.cells.tokens is binned.",
        ),
        (
            {"data": {"path": "a.h5ad", "source": "cells", "cells": {"target_sum": 5.0, "normalized": True}}},
            {"data": {"path": "a.h5ad", "source": "cells", "cells": {"target_sum": 5.0}}},
            None,
            "data.cells.target_sum 5.0 has no effect: data.cells.normalized is true: the matrix is used as it is.",
        ),
        (
            {"data": {"path": "a.jsonl", "split": "test"}},
            {"data": {"path": "owner/name", "split": "test"}},
            None,
            "data.split test has no effect: only data.source hf has it.",
        ),
        (
            {"data": {"source": "csv", "path": "folder", "token_dtype": "uint32"}},
            {"data": {"path": "folder", "token_dtype": "uint32"}},
            None,
            "data.token_dtype uint32 has no effect: only data.source tokens has it.",
        ),
        (
            {"train": {"objective": "dpo", "preference": {"gamma": 0.5}}},
            {"train": {"objective": "simpo", "preference": {"gamma": 0.5}}},
            None,
            "train.preference.gamma 0.5 has no effect: train.objective dpo does not use it.",
        ),
        (
            {"train": {"preference": {"beta": 0.5}}},
            {"train": {"objective": "orpo", "preference": {"beta": 0.5}}},
            None,
            "train.preference.beta 0.5 has no effect: train.objective causal_lm does not use it.",
        ),
        (
            {"train": {"objective": "dpo", "preference": {"undesirable_weight": 2.0}}},
            {"train": {"objective": "apo_zero_unpaired", "preference": {"undesirable_weight": 2.0}}},
            None,
            "train.preference.undesirable_weight 2.0 has no effect: train.objective dpo does not use it.",
        ),
        (
            {"data": {"train_on": "all"}, "train": {"objective": "dpo"}},
            {"data": {"train_on": "last"}, "train": {"objective": "dpo"}},
            None,
            "data.train_on all has no effect: train.objective dpo compares the answers.",
        ),
        (
            {"data": {"path": "train.bin", "columns": {"text": "moves"}}},
            {"data": {"path": "train.csv", "columns": {"text": "moves"}}},
            None,
            'data.columns {"text": "moves"} has no effect: tokens have no columns.',
        ),
        (
            {"data": {"path": "a.jsonl", "mixing": {"by": "examples"}}},
            {"data": {"source": [{"path": "a.jsonl"}, {"path": "b.jsonl"}], "mixing": {"by": "examples"}}},
            None,
            "data.mixing.by examples has no effect: data.source is not a list.",
        ),
        (
            {"data": {"path": "a.jsonl", "mixing": {"when_exhausted": "end"}}},
            {"data": {"source": [{"path": "a.jsonl"}, {"path": "b.jsonl"}], "mixing": {"when_exhausted": "end"}}},
            None,
            "data.mixing.when_exhausted end has no effect: data.source is not a list.",
        ),
        (
            {"train": {"base_batch": 8}},
            {"train": {"base_batch": 8, "lr_scaling": "linear"}},
            None,
            "train.base_batch 8 has no effect: train.lr_scaling is none.",
        ),
        (
            {"parallel": {"prefetch": 2, "strategy": "ddp"}},
            {"parallel": {"prefetch": 2, "strategy": "fsdp"}},
            8,
            "parallel.prefetch 2 has no effect: parallel.strategy is ddp, which shards nothing.",
        ),
        (
            {"parallel": {"optimizer_ranks": 4, "strategy": "ddp"}},
            {"parallel": {"optimizer_ranks": 4, "strategy": "zero1"}},
            8,
            "parallel.optimizer_ranks 4 has no effect: parallel.strategy is ddp, not zero1.",
        ),
        (
            {"parallel": {"sequence_parallel": False}},
            {"parallel": {"sequence_parallel": False, "tp": 2}},
            8,
            "parallel.sequence_parallel false has no effect: parallel.tp is 1.",
        ),
        (
            {"parallel": {"pp_stages": 2, "strategy": "fsdp"}},
            {"parallel": {"pp_stages": 2, "pp": 2, "strategy": "fsdp"}},
            8,
            "parallel.pp_stages 2 has no effect: parallel.pp is 1.",
        ),
        (
            {"parallel": {"sharding": "shard_grad_op", "strategy": "single"}},
            {"parallel": {"sharding": "shard_grad_op"}},
            None,
            "parallel.sharding shard_grad_op has no effect: parallel.strategy is single, which shards nothing.",
        ),
        (
            {"parallel": {"wrap": {"min_params": 9}, "strategy": "zero1"}},
            {"parallel": {"wrap": {"min_params": 9}, "strategy": "zero3"}},
            8,
            'parallel.wrap {"min_params": 9, "classes": []} has no effect: parallel.strategy zero1 shards the '
            "optimizer state and no weights.",
        ),
        (
            {"parallel": {"compress": "bf16", "strategy": "zero3"}},
            {"parallel": {"compress": "bf16", "strategy": "zero1"}},
            8,
            "parallel.compress bf16 has no effect: parallel.strategy is zero3.",
        ),
        (
            {"train": {"reduce_dtype": "bf16"}, "parallel": {"pp": 2, "strategy": "ddp"}},
            {"train": {"reduce_dtype": "bf16"}, "parallel": {"pp": 2, "strategy": "fsdp"}},
            8,
            "train.reduce_dtype bf16 has no effect: a pipeline without sharding reduces gradients in fp32.",
        ),
        (
            {"parallel": {"reshard": True, "pp": 2, "strategy": "fsdp"}},
            {"parallel": {"reshard": True, "strategy": "fsdp"}},
            8,
            "parallel.reshard true has no effect: a pipeline stage keeps its weights gathered for all micro-batches.",
        ),
        (
            {"train": {"reduce_dtype": "bf16", "precision": "32-true"}},
            {"train": {"reduce_dtype": "bf16"}},
            8,
            "train.reduce_dtype bf16 has no effect: train.precision 32-true reduces gradients in fp32 anyway.",
        ),
        (
            {"data": {"train_on": "all", "format": "text"}},
            {"data": {"train_on": "all", "format": "alpaca"}},
            None,
            "data.train_on all has no effect: plain text has no answers, so every token counts.",
        ),
        (
            {"data": {"chat_template": "chatml", "format": "alpaca"}},
            {"data": {"chat_template": "chatml", "format": "chat"}},
            None,
            "data.chat_template chatml has no effect: data.format is alpaca.",
        ),
        (
            {"train": {"schedule": {"name": "constant", "min_ratio": 0.5}}},
            {"train": {"schedule": {"name": "linear", "min_ratio": 0.5}}},
            None,
            "train.schedule.min_ratio 0.5 has no effect: a constant schedule does not decay.",
        ),
        (
            {"train": {"optimizer": {"name": "sgd", "betas": [0.5, 0.5]}}},
            {"train": {"optimizer": {"name": "lion", "betas": [0.5, 0.5]}}},
            None,
            "train.optimizer.betas [0.5, 0.5] has no effect: sgd does not use it.",
        ),
        (
            {"train": {"optimizer": {"momentum": 0.5}}},
            {"train": {"optimizer": {"name": "muon", "momentum": 0.5}}},
            None,
            "train.optimizer.momentum 0.5 has no effect: adamw does not use it.",
        ),
        (
            {"train": {"optimizer": {"rounding": "stochastic"}}},
            {"train": {"optimizer": {"rounding": "stochastic"}, "precision": "bf16-true"}},
            None,
            "train.optimizer.rounding stochastic has no effect: train.precision auto has fp32 weights.",
        ),
        (
            {"train": {"optimizer": {"name": "lion", "rounding": "stochastic"}, "precision": "bf16-true"}},
            {"train": {"optimizer": {"name": "adamw8bit", "rounding": "stochastic"}, "precision": "bf16-true"}},
            None,
            "train.optimizer.rounding stochastic has no effect: lion does not use it.",
        ),
        (
            {"data": {"validation": 0}, "eval": {"every": 5}},
            {"data": {"validation": "held-out.json"}, "eval": {"every": 5}},
            None,
            "eval.every 5 has no effect: data.validation is 0, so nothing is evaluated.",
        ),
        (
            {"data": {"validation": 0}, "checkpoint": {"keep_best": 1}},
            {"data": {"validation": 0}, "checkpoint": {"keep_best": 1, "metric": "loss"}},
            None,
            "checkpoint.keep_best 1 has no effect: data.validation is 0, so nothing is evaluated.",
        ),
        (
            {"model": {"shape": "gpt2", "attention": "flex"}, "data": {"format": "alpaca", "pack": False}},
            {"model": {"shape": "gpt2", "attention": "flex"}, "data": {"format": "alpaca", "pack": True}},
            None,
            "model.attention flex has no effect: it is for packed sequences of several documents, and here "
            "each sequence is one document.",
        ),
        (
            {"adapter": {"rank": 4}},
            {"adapter": {"rank": 4, "kind": "lora"}},
            None,
            "adapter.rank 4 has no effect: adapter.kind is none.",
        ),
        (
            {"parallel": {"compress": "bf16", "strategy": "fsdp"}},
            {"parallel": {"compress": "bf16", "strategy": "ddp"}},
            8,
            "parallel.compress bf16 has no effect: parallel.strategy is fsdp.",
        ),
    ],
)
def test_an_option_without_effect_says_so_and_one_with_effect_does_not(
    useless: dict[str, Any], useful: dict[str, Any], world_size: int | None, says: str
) -> None:
    assert without_effect(config(**useless), world_size) == [says]
    assert without_effect(config(**useful), world_size) == []


def test_a_default_that_was_given_and_has_no_effect_is_said_once() -> None:
    said = "adapter.quantize nf4 has no effect: adapter.kind is not qlora."
    chosen = config(adapter={"kind": "lora", "quantize": "nf4"})
    assert without_effect(chosen, 1) == [said]
    assert without_effect(config(adapter={"kind": "qlora", "quantize": "nf4"}), 1) == []
    # A run's config.yaml has all defaults, which nobody gave; and those that ask for nothing are not missed.
    assert without_effect(config_from_mapping(config_values(chosen)), 1) == []
    assert without_effect(config(parallel={"compress": "none", "strategy": "fsdp"}, adapter={"dora": False}), 1) == []


def test_auto_on_one_device_counts_as_single_and_elsewhere_as_unknown() -> None:
    chosen = config(parallel={"reshard": True}, train={"reduce_dtype": "bf16"})
    assert [sentence.split(" ")[0] for sentence in without_effect(chosen, 1)] == [
        "train.reduce_dtype",
        "parallel.reshard",
    ]
    assert without_effect(chosen, 8) == []
    assert without_effect(chosen, None) == []


def test_the_rules_name_real_keys() -> None:
    assert {key for key, _ in _RULES} <= {key for key, _ in every_key()}


def test_what_the_user_gave_decides_whether_an_interval_is_chosen():
    given = config(checkpoint={"every": "auto"}, hardware={"mtbf_hours": 2.0, "disk_gb_per_second": 1.0})
    resolved = given.model_copy(update={"checkpoint": given.checkpoint.model_copy(update={"every": 25})})
    assert without_effect(resolved, 1, given=given) == []
    assert len(without_effect(resolved, 1)) == 2
