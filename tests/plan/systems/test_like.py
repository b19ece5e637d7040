"""`--like SYSTEM@YEAR-MONTH` and `--trait`: other systems, as they were, and with options of their own."""

from dataclasses import fields, replace
from pathlib import Path

import pytest

from shoal import api
from shoal.catalogue.gpus import GPUS
from shoal.mistakes import UserMistake
from shoal.plan.report import Plan
from shoal.plan.systems.document import document, meanings
from shoal.plan.systems.earlier import as_of
from shoal.plan.systems.like import NAMES, read_like, shown_value
from shoal.plan.systems.traits import SystemTraits

PAGE = Path(__file__).parents[3] / "docs" / "traits.md"
RUN = ("data.max_length=2048", "train.global_batch=64", "hardware.devices=8")


def like(system: str, *overrides: str, traits: tuple[str, ...] = ()) -> Plan:
    config = api.load_config(None, (*RUN, *overrides), planned=True)
    return api.plan(config, system=system, traits=traits)


def tokens(plan: Plan) -> float:
    return plan.choice.speed.tokens_per_second_per_gpu


@pytest.mark.parametrize("system", [name for name in NAMES if name not in ("shoal", "composer")])
def test_a_system_of_this_month_is_the_one_without_a_month(system: str) -> None:
    today = as_of(system, NAMES[system], (2026, 11), gpu=GPUS["h100-80gb"], model_type="llama")
    assert replace(today, software=0) == replace(NAMES[system], software=0)


def test_libraries_of_2023_are_slower_on_hopper_and_their_adamw_needs_more() -> None:
    names, gpu = ("huggingface", "huggingface@2023-09"), "hardware.gpu=h100-80gb"
    today, then = (like(name, gpu, "model.shape=llama3.2-1b", "train.micro_batch=4") for name in names)
    assert tokens(then) < 0.93 * tokens(today)
    # Where the optimizer step is the peak, a foreach AdamW shows.
    replicated = ("model.shape=pythia-1b", "train.recompute=full", "train.micro_batch=1", "parallel.strategy=ddp")
    less, more = (like(name, gpu, *replicated) for name in names)
    assert more.choice.memory.worst.peak.name == "optimizer step"
    assert more.choice.memory.allocated > less.choice.memory.allocated
    assert any("huggingface with the libraries of 2023-09" in note for note in then.notes)


def test_adapters_of_16_bit_layers_were_narrow_and_4_bit_ones_kept_their_inputs() -> None:
    shape = ("model.shape=llama2-7b", "hardware.gpu=a100-80gb", "train.micro_batch=2", "train.precision=bf16-true")
    lora, qlora = (
        {
            when: like(f"huggingface{when}", *shape, f"adapter.kind={kind}").choice.memory.allocated
            for when in ("@2024-02", "@2024-05", "@2025-03")
        }
        for kind in ("lora", "qlora")
    )
    assert lora["@2024-02"] < lora["@2025-03"]
    assert qlora["@2024-05"] > qlora["@2025-03"]
    assert qlora["@2024-02"] >= qlora["@2024-05"]


def test_defaults_are_those_of_the_month() -> None:
    shape = ("model.shape=llama3.2-1b", "hardware.gpu=a100-80gb")
    assert like("trl", *shape).choice.run.loss == "chunked"
    assert like("trl@2025-06", *shape).choice.run.loss == "plain"
    assert like("trl@2025-06", *shape, "train.loss_impl=chunked").choice.run.loss == "chunked"


def test_an_option_of_a_system_changes_its_forecast() -> None:
    shape = ("model.shape=llama3-8b", "hardware.gpu=h100-80gb", "hardware.nodes=2", "train.micro_batch=1")
    plain, overlapped = (like("megatron", *shape, traits=given) for given in ((), ("overlaps_gradients=true",)))
    assert tokens(overlapped) > 1.02 * tokens(plain)
    assert any("megatron with overlaps_gradients=true" in note for note in overlapped.notes)


@pytest.mark.parametrize("system", ["transformers", "pytorch", "nanogpt"])
def test_loops_by_hand_are_forecast(system: str) -> None:
    plan = like(system, "model.shape=gpt2", "hardware.gpu=a100-80gb", "train.micro_batch=8")
    assert plan.fits
    assert plan.choice.run.compiled == (system == "nanogpt")
    assert plan.choice.run.loss == "plain"


@pytest.mark.parametrize(
    ("system", "traits", "says"),
    [
        ("huggingface@2023-13", (), "2023-13 is no month"),
        ("huggingface@", (), "nothing is no month"),
        ("@2023-05", (), "--like @2023-05 names no system before its month"),
        ("hugingface@2023-09", (), "Did you mean huggingface?"),
        ("shoal@2023-09", (), "shoal is forecast as it is"),
        ("shoal", ("flash2=true",), "shoal is forecast as it is"),
        ("megatron", ("overlap_gradients=true",), "Did you mean overlaps_gradients"),
        ("megatron", ("flash2",), "--trait flash2 has no value. It may be flash2=true, false."),
        ("megatron", ("fused=true",), "no trait is called fused"),
        ("megatron", ("flash2=perhaps",), "It may be true, false."),
        ("megatron", ("logit_bytes=many",), "It may be a number."),
        ("megatron", ("fused_rows=2.5",), "It may be a whole number, liger, 4 GiB, 256 MiB."),
    ],
)
def test_what_cannot_be_read_is_said_in_one_sentence(system: str, traits: tuple[str, ...], says: str) -> None:
    with pytest.raises(UserMistake) as raised:
        read_like(system, traits)
    assert says in str(raised.value)


def test_every_trait_reads_the_values_that_systems_have() -> None:
    for one in fields(SystemTraits):
        for traits in NAMES.values():
            value = getattr(traits, one.name)
            if value == "":
                continue
            assert dict(read_like("megatron", (f"{one.name}={shown_value(value)}",)).given)[one.name] == value


def test_the_page_of_traits_matches_the_code() -> None:
    assert all(meaning for name, meaning in meanings())
    assert PAGE.read_text() == document(), "run make docs"
