"""Each strategy, optimizer and family stands in one table; whoever depends on all of them is compared with it."""

from typing import Any, get_args

import pytest

from shoal.catalogue.families import BUILDABLE, BY_MODEL_TYPE, FAMILIES, PLANS, find_plan
from shoal.catalogue.optimizers import OPTIMIZERS
from shoal.catalogue.strategies import COMPARED, SHARDINGS, STRATEGIES, find_strategy
from shoal.config import schema_run, schema_train
from shoal.config.schema import OptimizerConfig
from shoal.config.schema_model import ShapeConfig
from shoal.mistakes import UserMistake
from shoal.models.families import BUILDERS
from shoal.models.tensor_slices import BLOCK
from shoal.optim.optimizer import MAKERS


def literals(annotated: Any) -> tuple[str, ...]:
    """The values of an annotated Literal."""
    return get_args(get_args(annotated)[0])


def test_the_schema_has_the_strategies_of_the_table():
    assert literals(schema_run.Strategy) == ("auto", *STRATEGIES)
    assert literals(schema_run.Sharding) == tuple(SHARDINGS)


def test_the_schema_and_the_makers_have_the_optimizers_of_the_table():
    assert literals(schema_train.OptimizerName) == tuple(OPTIMIZERS)
    assert set(MAKERS) == set(OPTIMIZERS)


def test_the_builders_have_the_families_of_the_table():
    assert set(BUILDERS) == set(BUILDABLE)
    assert len(BY_MODEL_TYPE) == len(FAMILIES), "no two families share a model_type"


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_shards_weights_only_with_gradients_and_these_only_with_optimizer_state(name):
    strategy = find_strategy(name)
    assert strategy.shards_weights <= strategy.shards_gradients <= strategy.shards_optimizer
    assert strategy.fully_shard == strategy.shards_gradients, "DDP does not shard gradients"
    assert not strategy.keeps_weights or strategy.fully_shard


def test_sharding_selects_a_variant_of_fsdp_and_of_nothing_else():
    assert [find_strategy("fsdp", one).name for one in SHARDINGS] == ["fsdp", "zero2", "fsdp", "ddp"]
    assert all(find_strategy(name, one).name == name for name in STRATEGIES if name != "fsdp" for one in SHARDINGS)


def test_shoal_plan_compares_strategies_that_differ():
    assert COMPARED == ("ddp", "zero1", "zero2", "fsdp")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_options_of_an_optimizer_are_keys_of_the_config(name):
    optimizer = OPTIMIZERS[name]
    assert set(optimizer.options) <= OptimizerConfig.model_fields.keys()
    assert optimizer.state_option is None or optimizer.state_option in optimizer.options
    assert {optimizer.elsewhere, optimizer.smaller} <= {None, *OPTIMIZERS}


def test_a_quantized_optimizer_has_an_fp32_scale_per_block():
    assert OPTIMIZERS["adamw8bit"].scale_bytes == 4 / BLOCK
    assert OPTIMIZERS["adamw8bit"].bytes_per_parameter(4) == 2 * (1 + 4 / BLOCK)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_linear_layers_of_a_family_are_those_of_its_plan(name):
    family = FAMILIES[name]
    names = (*family.names.attention, *family.names.mlp)
    assert len(family.names.mlp) == (3 if family.gated else 2)
    if family.plan is not None:
        in_plan = (*family.plan.column, *family.plan.row)
        assert all(any(path.endswith(one) for path in in_plan) for one in names)
        assert len(in_plan) == len(names)


def test_a_model_without_a_plan_is_told_which_have_one():
    with pytest.raises(UserMistake, match=f"parallel.tp supports {', '.join(PLANS)}, and this model is bert"):
        find_plan("bert", "parallel.tp")


def test_the_help_of_the_schema_names_every_family():
    help_text = ShapeConfig.model_fields["family"].description
    assert help_text == "Architecture: llama, mistral, qwen2, qwen3, neox (Pythia), gpt2 or bert."
