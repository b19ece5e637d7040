"""`--like SYSTEM`: what other systems keep, communicate and do by default."""

from dataclasses import replace

import pytest

from shoal.plan.speed.compute import head_seconds
from shoal.plan.systems.modelled import DEFAULTS, SYSTEMS
from shoal.plan.terms import GIB
from tests.plan.planning import EIGHT_H100, plan

EIGHT_B = ("model.shape=llama3.1-8b", *EIGHT_H100, "data.max_length=2048", "train.global_batch=64")
PARAMETERS = 8_030_261_248
QLORA = ("model.shape=llama3.1-8b", "hardware.gpu=rtx4090", "adapter.kind=qlora", "train.micro_batch=2")


def bytes_per_parameter(system: str, *settings: str) -> dict[str, float]:
    terms = plan(*EIGHT_B, *settings, system=system).as_dict()["memory"]["terms"]
    names = ("weights", "gradients", "optimizer state")
    totals = {name: terms[name] if isinstance(terms[name], float) else sum(terms[name].values()) for name in names}
    return {name: amount * GIB / PARAMETERS for name, amount in totals.items()}


def test_megatron_has_18_bytes_per_parameter_of_which_12_are_sharded() -> None:
    found = bytes_per_parameter("megatron", "train.recompute=full")
    assert found == pytest.approx({"weights": 2, "gradients": 4, "optimizer state": 12 / 8}, rel=0.01)


def test_nemo_keeps_its_gradients_in_16_bits() -> None:
    assert bytes_per_parameter("nemo")["gradients"] == pytest.approx(2, rel=0.01)


def test_llama_factory_and_torchtune_checkpoint_bf16_blocks_and_compile_nothing() -> None:
    for system in ("llama-factory", "torchtune"):
        run = plan("model.shape=llama3-8b", "hardware.gpu=h100-80gb", "adapter.kind=lora", system=system).choice.run
        assert (run.recompute, run.compiled) == ("full", False)
        assert run.precision == ("bf16-mixed" if system == "llama-factory" else "bf16-true")
        assert run.varied_lengths  # sequences are not packed
    assert run.trained_bytes == 2  # torchtune's adapters have the dtype of the model, PEFT's are in fp32
    other = run.with_(traits=SYSTEMS["llama-factory"])
    assert (other.trained_bytes, other.traits.reentrant) == (4, True)


def test_axolotl_and_unsloth_train_bf16_weights_and_trl_fp32_ones() -> None:
    settings = ("model.shape=llama3.2-1b", "hardware.gpu=h200", "train.global_batch=4")
    held = {
        system: plan(*settings, system=system).as_dict()["memory"]["terms"]["optimizer state"]
        for system in ("trl", "axolotl", "unsloth")
    }
    assert held["trl"] == pytest.approx(2 * held["axolotl"], rel=0.01)
    # 8-bit moments, but those of the embedding (262,668,288 parameters) are in fp32.
    assert held["unsloth"] == pytest.approx(held["axolotl"] / 2 + 262_668_288 * 6 / 2**30, rel=0.03)


def test_defaults_apply_only_to_keys_that_the_config_does_not_set() -> None:
    unset = plan(*QLORA, system="unsloth")
    assert (unset.choice.run.recompute, unset.choice.run.optimizer) == ("offload", "adamw8bit")
    assert any("As unsloth does by default, because the config does not say: " in note for note in unset.notes)
    given = plan(*QLORA, "train.recompute=full", "train.optimizer.name=adamw", system="unsloth")
    assert (given.choice.run.recompute, given.choice.run.optimizer) == ("full", "adamw")
    assert not any("train.recompute" in note for note in given.notes)
    # Nothing else changes for systems without any, and for ours.
    assert plan(*QLORA).choice.run.recompute == plan(*QLORA, system="litgpt").choice.run.recompute == "none"


def test_unsloth_needs_the_least_memory_of_the_three() -> None:
    held = {system: plan(*QLORA, system=system).choice.memory.reserved for system in ("trl", "axolotl", "unsloth")}
    assert held["unsloth"] < 0.8 * held["axolotl"]


def test_packed_documents_need_no_mask_where_attention_takes_lengths() -> None:
    documents = (*EIGHT_B, "data.document_mask=true", "train.recompute=none")
    for system in ("megatron", "axolotl"):
        assert plan(*documents, system=system).choice.run.attention == "fused"
    assert plan(*documents, system="torchtitan").choice.run.attention == "dense mask"


@pytest.mark.parametrize("system", DEFAULTS)
def test_defaults_are_values_of_the_schema_for_systems_that_exist(system: str) -> None:
    assert system in SYSTEMS
    settings = [f"{key}={str(value).lower()}" for key, value in DEFAULTS[system].items()]
    said = plan(*EIGHT_B, *settings, system=system)
    assert said.choice.run == plan(*EIGHT_B, system=system).choice.run
    assert not any("by default" in note for note in said.notes)


def test_a_gpu_without_bf16_is_planned_with_fp16() -> None:
    found = plan("model.shape=tinyllama-1.1b", "hardware.gpu=t4", "adapter.kind=lora", system="axolotl")
    assert found.choice.run.precision == "16-mixed"


def test_trls_qlora_has_16_bit_adapters_and_an_fp32_rest() -> None:
    lora, qlora = (
        plan("model.shape=llama3-8b", "hardware.gpu=h100-80gb", f"adapter.kind={kind}", system="trl").choice.run
        for kind in ("lora", "qlora")
    )
    assert (lora.trained_bytes, qlora.trained_bytes) == (4, 2)
    assert (lora.narrow_adapters, qlora.narrow_adapters) == (False, True)
    assert qlora.residual_bytes == 4
    # Its loss is computed in parts, each of which is computed again and casts the head.
    other = qlora.with_(traits=replace(qlora.traits, chunks="chunked"))
    more = head_seconds(qlora).both - head_seconds(other).both
    casts = qlora.tokens / 256 * 128_256 * 4096 * 6 / (0.8 * qlora.gpu.memory_bandwidth)
    assert more > 2 * casts
    axolotl = plan("model.shape=llama3-8b", "hardware.gpu=h100-80gb", "adapter.kind=qlora", system="axolotl")
    assert axolotl.choice.run.trained_bytes == 4
