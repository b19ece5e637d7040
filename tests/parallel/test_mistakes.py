"""A model that cannot be split gives an error with the reason and a remedy, before a run folder is created."""

from pathlib import Path
from typing import Any

import pytest
from transformers import (
    BertConfig,
    BertLMHeadModel,
    JambaConfig,
    JambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from shoal import api
from shoal.data.tokenizer import load_tokenizer
from shoal.mistakes import UserMistake
from tests.harness import run_ranks, settings


def mistake(world_size: int, config: dict[str, Any], runs: Path) -> str:
    with pytest.raises(UserMistake) as caught:
        run_ranks(world_size, lambda: api.train(api.config_from_mapping(config), runs=runs).as_dict())
    assert not runs.exists()
    says = str(caught.value)
    assert "\n" not in says
    return says


def planned(world_size: int, config: dict[str, Any]) -> str:
    """What `shoal plan` says of the same config: as a mistake, or after the forecast of what is not built yet."""
    try:
        plan = api.plan(api.config_from_mapping({**config, "hardware": {"devices": world_size}}))
    except UserMistake as refused:
        return str(refused)
    return " ".join(plan.notes)


def shape(**changes: Any) -> dict[str, Any]:
    sizes = {"family": "llama", "hidden": 48, "layers": 3, "heads": 6, "kv_heads": 3, "ffn": 96, "vocab": 260}
    return {**sizes, "positions": 512, **changes}


@pytest.mark.parametrize(
    ("world_size", "model", "parallel", "says"),
    [
        (
            4,
            {},
            {"tp": 4},
            "parallel.tp 4 does not divide the model's 6 attention heads; the next smaller degree that does is 3.",
        ),
        (2, {}, {"tp": 2}, "parallel.tp 2 does not divide the model's 3 key and value heads"),
        (3, {"ffn": 97}, {"tp": 3}, "parallel.tp 3 does not divide the model's 97 MLP columns"),
        (4, {}, {"pp": 4}, "parallel.pp 4 with pp_schedule 1f1b makes 4 stages, but the model has 3 blocks"),
        (2, {}, {"pp": 2, "pp_schedule": "interleaved"}, "lower parallel.pp to 1, or use parallel.pp_schedule 1f1b"),
        (
            4,
            {"kv_heads": 6},
            {"cp": 4, "cp_method": "ulysses"},
            "does not divide the 6 attention heads of the model; use",
        ),
        (3, {}, {"tp": 2}, "3 processes cannot be split into groups of 2"),
        (2, {}, {"strategy": "fsdp", "wrap": {"classes": ["LlamaMLPs"]}}, "is a LlamaMLPs. Did you mean LlamaMLP or"),
        (2, {"tied": True}, {"strategy": "fsdp", "wrap": {"classes": ["Embedding"]}}, "Embedding cannot be wrapped"),
        (
            2,
            {},
            {"strategy": "zero2", "wrap": {"min_params": 3000}},
            "train.recompute selective needs FSDP units of whole blocks, and parallel.wrap selects",
        ),
        (2, {}, {"strategy": "fsdp", "offload": {"optimizer": "nvme", "path": "nowhere/at/all"}}, "is not a folder"),
    ],
)
def test_a_split_that_is_impossible_says_why(world_size, model, parallel, says, instructions, tmp_path):
    config = settings(instructions, model__shape=shape(**model), parallel=parallel, data__max_length=192)
    config["train"]["recompute"] = "selective"
    config["train"].update(global_batch=24, micro_batch=2)
    assert says in mistake(world_size, config, tmp_path / "runs")
    if "strategy" not in parallel or "min_params" in parallel.get(
        "wrap", {}
    ):  # classes and folders are not in the sizes of a model
        assert says in planned(world_size, config)


def test_a_shard_boundary_inside_a_quantization_block_names_a_degree_without_one(instructions, tmp_path):
    sizes = {"family": "llama", "hidden": 512, "layers": 1, "heads": 8, "kv_heads": 4, "ffn": 1024, "vocab": 260}
    config = settings(instructions, model__shape={**sizes, "positions": 512}, parallel={"tp": 4})
    config["train"]["optimizer"] = {"name": "adamw8bit"}
    assert mistake(4, config, tmp_path / "runs") == (
        "parallel.tp 4 shards rows of model.layers.0.self_attn.o_proj.weight into 128 elements, not a multiple of the "
        "adamw8bit block of 256; use parallel.tp 2, or train.optimizer.name adamw."
    )
    assert "adamw8bit block of 256; use parallel.tp 2" in planned(4, config)


@pytest.mark.parametrize(
    ("adapter", "says"),
    [
        ({"kind": "lora", "dora": True}, "adapter.dora needs the norm of whole weight matrices"),
        ({"kind": "qlora", "quantize": "nf4-dq"}, "adapter.quantize nf4-dq quantizes the scales of a whole matrix"),
        ({"kind": "qlora"}, "o_proj has 64 inputs, and each rank needs a multiple of 64"),
    ],
)
def test_an_adapter_that_cannot_be_split_says_why(adapter, says, instructions, tmp_path):
    whole = shape(hidden=64, heads=4, kv_heads=4, ffn=128)
    config = settings(instructions, model__shape=whole, parallel={"tp": 2}, adapter=adapter)
    assert says in mistake(2, config, tmp_path / "runs")
    assert says in planned(2, config)


def test_a_number_of_micro_batches_that_a_schedule_cannot_divide_names_the_nearest_that_it_can(instructions, tmp_path):
    config = settings(instructions, model__shape=shape(layers=4), parallel={"pp": 2, "pp_schedule": "zero-bubble"})
    config["train"].update(global_batch=10, micro_batch=2)
    says = mistake(2, config, tmp_path / "runs")
    assert "5 micro-batches cannot be split into 2 rounds; change train.global_batch or micro_batch" in says
    assert "so that there are 4 or 6" in says
    assert planned(2, config) == says


def folder_with(model: Any, path: Path) -> dict[str, str]:
    model.save_pretrained(path)
    load_tokenizer("bytes").save(path)
    return {"from": str(path)}


@pytest.mark.parametrize(
    ("parallel", "says"),
    [
        ({"tp": 2}, "supports llama, mistral, qwen2, qwen3, gpt_neox, gpt2, and"),
        ({"pp": 2}, "use parallel.pp 1 and parallel.strategy fsdp"),
    ],
)
def test_a_family_without_a_plan_is_not_split(parallel, says, instructions, tmp_path):
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 6}
    model = BertLMHeadModel(BertConfig(**sizes, vocab_size=260, is_decoder=True))
    config = settings(instructions, model=folder_with(model, tmp_path / "start"), parallel=parallel)
    assert says in mistake(2, config, tmp_path / "runs")
    assert says in planned(2, config)


def test_a_sequence_with_a_sliding_window_is_not_split(instructions, tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 260}
    model = MistralForCausalLM(MistralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, sliding_window=16))
    config = settings(instructions, model=folder_with(model, tmp_path / "start"), parallel={"cp": 2})
    says = "cannot be used with a sliding window (16 tokens) shorter than data.max_length"
    assert says in mistake(2, config, tmp_path / "runs")
    assert says in planned(2, config)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"parallel": {"tp": 2}}, "parallel.tp needs a model whose blocks are one nn.ModuleList of identical layers"),
        ({"parallel": {"pp": 2}}, "use parallel.strategy fsdp with parallel.wrap {min_params: 10_000_000}"),
        ({"parallel": {"strategy": "fsdp"}}, "set parallel.wrap to {min_params: 10_000_000} or to {classes: [NAME]}"),
        ({"train__recompute": "full"}, "train.recompute needs a model whose blocks"),
        ({"train__optimizer": {"name": "muon"}}, "muon needs a model whose blocks"),
    ],
)
def test_a_model_without_identical_blocks_says_what_it_can_be_trained_with(changes, says, instructions, tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 260}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 1, "use_mamba_kernels": False}
    order = {"attn_layer_period": 2, "attn_layer_offset": 1, "pad_token_id": 258}
    model = folder_with(JambaForCausalLM(JambaConfig(**sizes, **heads, **order)), tmp_path / "start")
    config = settings(instructions, model=model, **changes)
    says_now = mistake(2, config, tmp_path / "runs")
    assert says in says_now
    assert "JambaForCausalLM" in says_now


def test_fewer_micro_batches_than_stages_give_a_warning_with_the_bubble(instructions, tmp_path, capfd):
    config = settings(instructions, parallel={"pp": 2}, train__steps=1)
    config["train"].update(global_batch=4, micro_batch=4)
    run_ranks(2, lambda: api.train(api.config_from_mapping(config), runs=tmp_path).as_dict())
    said = capfd.readouterr()
    assert (
        "parallel.pp 2 with 1 micro-batch per step leaves each device idle for 50% of the step" in said.out + said.err
    )
