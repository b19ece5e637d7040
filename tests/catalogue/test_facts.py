"""Each strategy, optimizer and family stands in one table; whoever depends on all of them is compared with it."""

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from transformers import CohereConfig, ElectraConfig, MptConfig, NemotronConfig, Starcoder2Config

from shoal import objectives
from shoal.catalogue.earlier_models import EARLIER
from shoal.catalogue.families import BUILDABLE, BY_MODEL_TYPE, FAMILIES
from shoal.catalogue.forecast_families import CODE_FROM_HUB
from shoal.catalogue.objectives import OBJECTIVES
from shoal.catalogue.optimizers import OPTIMIZERS
from shoal.catalogue.shapes import shape_from_sizes
from shoal.catalogue.strategies import SHARDINGS, STRATEGIES, find_strategy
from shoal.config import schema_run, schema_train
from shoal.config.schema import OptimizerConfig, PreferenceConfig, TrainConfig
from shoal.models.anatomy import read_anatomy
from shoal.models.families import BUILDERS, transformers_config
from shoal.optim.makers import MAKERS
from shoal.optim.optimizer import make_optimizer
from tests.catalogue.forecast_only import built, config_of
from tests.models.small import drawn, on_meta, small_config

# Families that are only forecast, which shoal does not build.
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
OTHERS = {
    "mpt": MptConfig(d_model=64, n_heads=4, n_layers=2, vocab_size=99),
    "starcoder2": Starcoder2Config(**SIZES, vocab_size=99),
    "nemotron": NemotronConfig(**SIZES, vocab_size=99),
    "cohere": CohereConfig(**SIZES, vocab_size=99),
    "electra": ElectraConfig(**SIZES, vocab_size=99),
    **{
        shape.family: config_of(replace(shape, layers=2))
        for shape in EARLIER.values()
        if shape.model_type == shape.family
    },
}
# These construct keys before queries.
KEYS_FIRST = ("gpt_neo", "gptj", "opt")


def literals(annotated: Any) -> tuple[str, ...]:
    """The values of an annotated Literal."""
    return get_args(get_args(annotated)[0])


def test_the_schema_has_the_strategies_of_the_table():
    assert literals(schema_run.Strategy) == ("auto", *STRATEGIES)
    assert literals(schema_run.Sharding) == tuple(SHARDINGS)


def test_the_schema_and_the_makers_have_the_optimizers_of_the_table():
    assert literals(schema_train.OptimizerName) == tuple(OPTIMIZERS)
    assert set(MAKERS) == {name for name, one in OPTIMIZERS.items() if one.built}


def test_the_objectives_of_the_schema_are_those_of_the_table_and_each_has_its_loss():
    assert literals(schema_train.ObjectiveName) == tuple(OBJECTIVES) == (*objectives.OBJECTIVES, "kto")  # not built
    keys = set(PreferenceConfig.model_fields)
    assert {key for one in OBJECTIVES.values() for key, _ in one.options} == keys


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


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_options_of_an_optimizer_are_keys_of_the_config(name):
    optimizer = OPTIMIZERS[name]
    assert set(optimizer.options) <= OptimizerConfig.model_fields.keys()
    assert optimizer.state_option is None or optimizer.state_option in optimizer.options
    assert {optimizer.elsewhere, optimizer.smaller} <= {None, *OPTIMIZERS}


@pytest.mark.parametrize("name", MAKERS)
def test_the_state_of_an_optimizer_takes_the_bytes_that_are_forecast(name):
    # Rows of 256 elements are one block of quantized state.
    shape = shape_from_sizes("llama", hidden=256, layers=1, heads=4, ffn=256, vocab=256, positions=64, tied=True)
    model = drawn(transformers_config(shape))
    parameters = dict(model.named_parameters())
    train = TrainConfig.model_validate({"optimizer": {"name": name}})
    optimizer = make_optimizer(parameters, train, read_anatomy(model))
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step(0.1, torch.tensor(True))
    matrix = "model.layers.0.mlp.up_proj.weight"
    held = sum(value.nbytes for key, value in optimizer.state().items() if key.endswith(matrix) and value.dim())
    assert held == OPTIMIZERS[name].bytes_per_parameter(4) * parameters[matrix].numel()


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in CODE_FROM_HUB])
def test_the_linear_layers_of_a_family_are_those_of_its_model_in_transformers(name):
    family = FAMILIES[name]
    model = on_meta(small_config(name)) if family.buildable else built(OTHERS[name])
    block = family.names.block.format(0)
    weights = [key for key, one in model.named_parameters() if key.startswith(block) and one.dim() == 2]
    paths = [key.removeprefix(block).removesuffix(".weight") for key in weights]
    assert family.names.embedding in dict(model.named_parameters())
    names = (*family.names.attention, *family.names.mlp)
    if name in KEYS_FIRST:
        weights.sort(key=lambda key: [key.endswith(f"{linear}.weight") for linear in names].index(True))
        paths = [key.removeprefix(block).removesuffix(".weight") for key in weights]
    assert len(paths) == len(names)
    assert all(path.endswith(linear) for path, linear in zip(paths, names, strict=True)), "in forward order"
    if family.names.attention_in:
        assert [family.names.weight(linear, 0) for linear in names] == weights
    if family.plan is not None:
        assert sorted((*family.plan.column, *family.plan.row)) == sorted(paths)


@pytest.mark.parametrize("name", BUILDABLE)
def test_the_head_of_a_family_has_the_name_of_its_model_in_transformers(name):
    assert FAMILIES[name].names.head in dict(on_meta(small_config(name)).named_parameters(remove_duplicate=False))
