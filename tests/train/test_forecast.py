"""Training executes the plan, for any model, and plan.json has the forecast and the measurements."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from shoal import api
from shoal.catalogue.shapes import parameters
from shoal.config.run import RunDirectory
from shoal.launch.join import joined
from shoal.models.prepare import Blueprint, prepare_model
from shoal.parallel.device import Device
from shoal.parallel.ranks import Ranks
from shoal.plan.decide import choose
from shoal.plan.machine import Machine, machine_at_hand
from shoal.plan.models import read_shape
from shoal.train import build, resolve
from shoal.train.compare import Comparison
from shoal.train.hooks import LogInterval, RunStart
from shoal.train.resolve import forecast_values, machine_of_all, resolve_run
from tests.harness import lines, reference_run, run_ranks, settings, slow, train_again_on, train_on
from tests.launch.command import forked_shoal, write_config
from tests.models.small import MIXTURES, mixture_config

AUTO = {"parallel__strategy": "auto", "train__micro_batch": "auto", "train__recompute": "auto"}
H200 = machine_at_hand("NVIDIA H200", 139.8, devices=1)


def plan_of(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "plan.json").read_text())
    return found


def forecast_of(model_type: str, machine: Machine = H200, overrides: tuple[str, ...] = (), **sizes: Any) -> Any:
    """(resolved run, parameter count) of a model that transformers builds from these sizes."""
    given = mixture_config(model_type, **sizes) if model_type in MIXTURES else CONFIG_MAPPING[model_type](**sizes)
    config = api.load_config(None, ["model.shape=gpt2", "data.max_length=64", *overrides], planned=True)
    prepared = prepare_model(Blueprint(given, None), longest=64)
    return resolve_run(config, prepared, machine), sum(one.numel() for one in prepared.model.parameters())


@pytest.mark.parametrize("world_size", [1, 2])
def test_training_executes_the_plan_and_stores_the_users_config(world_size, instructions, tmp_path):
    config = settings(instructions, **AUTO, hardware__devices=world_size, train__steps=1, train__global_batch=48)
    planned = write_config(tmp_path, config)
    said = json.loads(forked_shoal(tmp_path, "plan", str(planned), "hardware.gpu=cpu", "--json").out)
    found = plan_of(train_again_on(world_size, config, tmp_path / "runs"))
    assert found["chosen"] == {key: said["chosen"][key] for key in found["chosen"]}
    assert found["chosen"]["strategy"] == ("single" if world_size == 1 else "ddp")
    assert (found["chosen"]["micro_batch"], found["chosen"]["recompute"]) == (8, "none")
    for part in ("memory", "speed"):
        assert found["forecast"][part] == {key: said[part][key] for key in found["forecast"][part]}
    kept = api.load_config(tmp_path / "runs" / "run" / "config.yaml")
    assert (kept.parallel.strategy, kept.train.micro_batch, kept.train.recompute) == ("auto", "auto", "auto")


def test_the_model_is_built_with_what_was_chosen(instructions, tmp_path, monkeypatch):
    """On a device so small that nothing fits: what needs the least memory, which of so few blocks is no less with their
    inputs offloaded; the losses are the same."""
    reference = reference_run(settings(instructions))
    config = settings(instructions, **{**AUTO, "train__micro_batch": 4})
    tight = machine_at_hand("NVIDIA H200", 0.0, devices=1)
    monkeypatch.setattr(resolve, "machine_of_all", lambda *_: tight)
    given: list[Any] = []
    built = build.parallelize

    def parallelize(prepared: Any, settled: Any, **others: Any) -> Any:
        given.append(settled.train.recompute)
        return built(prepared, settled, **others)

    monkeypatch.setattr(build, "parallelize", parallelize)
    assert run_ranks(1, lambda: (api.train(api.config_from_mapping(config), runs=tmp_path), given)[1]) == [["full"]]
    assert plan_of(tmp_path / "run")["chosen"]["recompute"] == "full"
    assert [one["loss"] for one in lines(tmp_path / "run")] == [one["loss"] for one in lines(reference)]


ODD = {
    "gpt2": {},
    "gpt_neox": {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 2048},
    "bloom": {},
    "falcon": {"hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4},
    "opt": {},
    "gptj": {"n_embd": 256, "n_layer": 3, "n_head": 4, "rotary_dim": 16},
    "phi": {"hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4},
    "gemma2": {"num_hidden_layers": 4},
    "mamba": {"num_hidden_layers": 4},
    "rwkv": {"num_hidden_layers": 4, "hidden_size": 512},
    "jamba": {
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
    },
    **{name: {} for name in MIXTURES},
}


@pytest.mark.parametrize("model_type", ODD)
def test_any_model_has_a_forecast_with_its_exact_parameter_count(model_type):
    forecast, true = forecast_of(model_type, **ODD[model_type])
    shape = forecast.run.shape
    assert parameters(shape) == pytest.approx(true, rel=0.01)
    assert forecast_values(forecast)["memory"]["allocated_gib"] >= round(true * 12 / 2**30, 3)
    assert forecast.exact == (model_type in ("gpt2", "gpt_neox")), "an approximated model is not exact"


def test_inactive_experts_take_memory_and_hardly_any_time():
    few, _ = forecast_of("mixtral", num_local_experts=4)
    many, _ = forecast_of("mixtral", num_local_experts=64)
    assert few.memory.worst.peak.tree.find("activations") == many.memory.worst.peak.tree.find("activations")
    assert many.memory.allocated > few.memory.allocated
    # A token passes as many experts; tokens that are spread over more of them leave more tiles partly empty.
    some, more = (one.speed.step.find("matmuls").amount for one in (few, many))
    assert some < more < 1.2 * some


def test_recompute_auto_does_nothing_for_a_model_without_blocks():
    tight = machine_at_hand("NVIDIA H200", 0.0, devices=1)
    forecast, _ = forecast_of("jamba", tight, ("train.recompute=auto",), **ODD["jamba"])
    assert forecast.config.train.recompute == "none"


def test_ranks_with_different_devices_choose_the_same(instructions):
    config = api.config_from_mapping(settings(instructions))
    devices = [Device(None, 79.1, None, "NVIDIA H100 80GB HBM3"), Device(None, 39.5, None, "NVIDIA A100-SXM4-40GB")]

    def meet() -> Machine:
        with joined(config) as ranks:
            return machine_of_all(config, devices[ranks.rank], ranks)

    one, other = run_ranks(2, meet)
    assert one == other
    assert (one.gpu.name, one.gpu.memory_gib, one.devices) == ("h100-80gb", 39.5, 2)


def test_a_network_set_in_the_config_is_used_as_in_shoal_plan(instructions):
    config = api.config_from_mapping(settings(instructions, hardware__network="ethernet-25", hardware__nodes=2))
    machine = machine_of_all(config, Device(None, 79.1, None, "NVIDIA H100 80GB HBM3"), Ranks(0, 1, 0, None))
    assert machine.network.name == "ethernet-25"


# Measurements.


def test_the_steps_after_warmup_are_measured_and_not_compared_on_a_cpu(instructions, tmp_path, capfd):
    config = settings(instructions, train__steps=18, data__max_length=64, data__train_on="all")
    run = train_on(2, config, tmp_path)
    found = plan_of(run)
    measured = found["measured"]
    assert measured["steps"] == [6, 15]
    assert found["off"] is None
    assert measured["memory"] == {"allocated_gib": None, "reserved_gib": None}
    seconds = [line["seconds"] for line in lines(run)[5:15]]
    assert measured["speed"]["step_seconds"] == pytest.approx(sum(seconds) / 10, rel=0.01)
    assert measured["speed"]["mfu"] is None
    assert 0 < measured["speed"]["tokens_per_second_per_gpu"] * measured["speed"]["step_seconds"] <= 4 * 64 * 1.01
    assert "forecast" not in capfd.readouterr().err


@pytest.mark.parametrize(("steps", "every", "measured"), [(4, 1, None), (8, 1, [6, 8]), slow(14, 7, [8, 14])])
def test_a_short_run_measures_the_steps_it_has(steps, every, measured, instructions):
    found = plan_of(reference_run(settings(instructions, train__steps=steps, log__every=every)))["measured"]
    assert (found and found["steps"]) == measured


def compared(tmp_path: Path, *, speed: float, memory: float, full: float = 1.0) -> tuple[dict[str, Any], list[str]]:
    """plan.json and the warnings of a run on an H200 with these fractions of its forecast."""
    config = api.load_config(
        None, ["model.shape=llama3.2-1b", "train.global_batch=8", "train.micro_batch=4"], planned=True
    )
    choice = choose(config, read_shape(config.model), H200)
    said: list[str] = []
    run = RunDirectory(tmp_path)
    reporter: Any = SimpleNamespace(warn=said.append)
    seen = Comparison(run, choice, {}, reporter)
    seen.on_run_start(RunStart(run.path, choice, Ranks(0, 1, 0, torch.device("cpu")), step=0, steps=15))
    positions = round(8 * config.data.max_length * full)
    for step in range(1, 16):
        seconds = choice.speed.step_seconds / speed * (100.0 if step == 1 else 1.0)
        allocated = choice.memory.allocated / 2**30 * memory
        seen.on_metrics({}, LogInterval(step, 1, seconds, positions, 0.4, allocated, 100.0))
    return json.loads((tmp_path / "plan.json").read_text()), said


def test_a_run_close_to_its_forecast_has_no_warning(tmp_path):
    found, said = compared(tmp_path, speed=0.95, memory=1.05)
    assert found["off"] == {"memory": 0.05, "speed": -0.05}
    assert found["measured"]["speed"]["mfu"] == 0.4
    assert said == []


def test_memory_or_speed_far_from_the_forecast_is_a_warning_with_both_figures(tmp_path):
    found, said = compared(tmp_path, speed=0.8, memory=1.25)
    memory, speed = said
    assert memory.startswith("memory is 25% above its forecast: ")
    assert f"{found['measured']['memory']['allocated_gib']:.1f} GiB allocated" in memory
    assert "the largest term is " in memory
    assert speed.startswith("the run is 20% slower than its forecast: ")
    assert f"{found['measured']['speed']['tokens_per_second_per_gpu']:,.0f} tokens/s per device" in speed
    assert len(compared(tmp_path, speed=1.2, memory=1.0)[1]) == 1


def test_sequences_shorter_than_the_forecast_assumes_are_not_compared(tmp_path):
    found, said = compared(tmp_path, speed=0.5, memory=0.5, full=0.5)
    assert (found["off"], found["measured"]["full_sequences"], said) == (None, False, [])
