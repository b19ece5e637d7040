"""What `auto` chooses. Training calls the same function."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import ScheduleInterleaved1F1B

from shoal import api
from shoal.config.combinations import find_combinations
from shoal.mistakes import UserMistake
from shoal.plan.advise import Question, savings
from shoal.plan.decide import choose
from shoal.plan.machine import machine_at_hand, read_machine
from shoal.plan.memory.forecast import forecast_memory
from shoal.plan.memory.fragmentation import fragmented
from shoal.plan.models import read_shape
from shoal.plan.terms import GIB
from tests.plan.planning import plan

BASE = ("data.max_length=2048", "train.global_batch=64")


@pytest.mark.parametrize(
    ("overrides", "name", "says"),
    [
        (("model.shape=gpt2", "hardware.gpu=a100-80gb"), "single", "one device"),
        (("model.shape=gpt2", "hardware.gpu=a100-80gb", "hardware.devices=8"), "ddp", "GiB per device, which fits"),
        (("model.shape=llama3-8b", "hardware.gpu=a100-80gb", "hardware.devices=8"), "fsdp", "unsharded training needs"),
        (
            (
                "model.shape=llama3-8b", "hardware.gpu=h100-80gb", "hardware.devices=8", "hardware.nodes=4",
                "hardware.network=ethernet-25", "data.max_length=1024",
            ),
            "hybrid",
            "within each node",
        ),
        (
            ("model.shape=gpt2", "hardware.gpu=a100-80gb", "hardware.devices=2", "parallel.strategy=zero2"),
            "zero2",
            "set in the config",
        ),
        (("model.shape=gpt2", "hardware.gpu=a100-80gb", "parallel.offload=cpu"), "fsdp", "offload cpu"),
        (
            ("model.shape=llama3-8b", "hardware.gpu=h100-80gb", "hardware.devices=8", "parallel.tp=4"),
            "ddp × tp 4",
            "GiB per device, which fits",
        ),
    ],
)  # fmt: skip
def test_the_strategy_is_the_simplest_of_the_fastest_that_fit(overrides, name, says):
    chosen = plan(*BASE, *overrides).choice
    assert chosen.name == name
    assert says in chosen.reason
    assert chosen.fits


@pytest.mark.parametrize("model", ["gpt2", "llama3.2-1b", "qwen3-1.7b"])
def test_ddp_says_how_much_faster_sharding_would_be(model):
    found = plan(*BASE, f"model.shape={model}", "hardware.gpu=h200", "hardware.devices=8")
    speeds = {one.name: one.speed.tokens_per_second_per_gpu for one in found.alternatives}
    gain = speeds["fsdp"] / speeds["ddp"] - 1
    assert found.choice.name == "ddp"
    assert gain < 0.03
    says = "and sharding is no faster" if gain < 0.005 else f"sharding would be only {gain:.1%} faster"
    assert says in found.choice.reason


@pytest.mark.parametrize("memory", [32, 40, 80, 140])
def test_the_micro_batch_fits_with_a_margin(memory):
    found = plan(*BASE, "model.shape=llama3.2-1b", f"hardware.gpu={{like: a100-80gb, memory_gib: {memory}}}")
    run = found.choice.run
    assert run.micro_batch * run.grad_accum_steps == 64
    assert found.fits
    assert found.limits.micro_batch is not None
    assert run.micro_batch <= found.limits.micro_batch


def test_a_run_that_fits_but_for_the_cuda_context_says_so():
    settings = (*BASE, "model.shape=llama3-8b", "hardware.devices=8", "parallel.strategy=ddp", "train.micro_batch=1")
    settings += ("train.recompute=full",)
    needed = plan(*settings, "hardware.gpu={like: h100-80gb, memory_gib: 300}").choice.memory.reserved / GIB
    tight = plan(*settings, f"hardware.gpu={{like: h100-80gb, memory_gib: {needed + 0.5:.2f}}}").choice
    assert not tight.fits
    context = tight.memory.context / GIB
    assert f"needs {needed + context:.1f} GiB per device with the CUDA context" in tight.reason
    assert f"which has {needed + 0.5:.1f} GiB" in tight.reason


def test_recompute_auto_recomputes_only_if_nothing_else_fits():
    arguments = (*BASE, "model.shape=llama3-8b", "hardware.devices=8", "train.recompute=auto", "train.micro_batch=8")
    roomy = plan(*arguments, "hardware.gpu={like: h200, memory_gib: 300}").choice
    tight = plan(*arguments, "hardware.gpu=h100-80gb").choice
    assert roomy.run.recompute == "none"
    assert tight.run.recompute in ("cheap", "selective", "full")
    assert roomy.fits
    assert tight.fits
    assert tight.config.train.recompute == tight.run.recompute


def test_recompute_auto_offloads_only_if_nothing_else_fits():
    arguments = (
        "model.shape=llama3-8b", "hardware.devices=1", "train.recompute=auto", "train.micro_batch=8",
        "train.global_batch=8", "data.max_length=8192", "train.precision=bf16-true", "train.optimizer.name=adamw8bit",
    )  # fmt: skip
    full, offload = (
        forecast_memory(plan(*arguments, "hardware.gpu=h200", f"train.recompute={kind}").choice.run).reserved / GIB
        for kind in ("full", "offload")
    )
    between, above = (
        plan(*arguments, f"hardware.gpu={{like: h200, memory_gib: {memory / 0.94 + 1}}}").choice
        for memory in ((full + offload) / 2, full)
    )
    assert (above.run.recompute, above.fits) == ("full", True)
    assert (between.run.recompute, between.fits) == ("offload", True)


def test_the_chosen_config_has_no_auto_and_leads_to_the_same_choice():
    config = api.load_config(
        None,
        ["model.shape=llama3-8b", "hardware.gpu=h100-80gb", "hardware.devices=8", "train.recompute=auto", *BASE],
        planned=True,
    )
    shape, machine = read_shape(config.model), read_machine(config.hardware)
    chosen = choose(config, shape, machine)
    assert chosen.config.parallel.strategy != "auto"
    assert chosen.config.train.micro_batch != "auto"
    assert chosen.config.train.recompute != "auto"
    again = choose(chosen.config, shape, machine)
    assert (again.run.strategy, again.run.micro_batch, again.run.recompute) == (
        chosen.run.strategy,
        chosen.run.micro_batch,
        chosen.run.recompute,
    )


def test_training_can_pass_the_machine_it_runs_on():
    config = api.load_config(None, ["model.shape=gpt2", *BASE, "data.max_length=512"], planned=True)
    for printed, name in (("NVIDIA H200", "h200"), ("NVIDIA Nonesuch 9000", "a100-80gb")):
        machine = machine_at_hand(printed, 139.8, devices=4, nodes=2)
        assert (machine.gpu.name, machine.gpu.memory_gib) == (name, 139.8)
        chosen = choose(config, read_shape(config.model), machine)
        assert (chosen.world_size, chosen.data_parallel) == (8, 8)
        assert chosen.micro_batch * chosen.grad_accum_steps * 8 == chosen.global_batch == 64
    assert machine_at_hand(None, None, devices=2).is_cpu


def test_the_limits_fit_and_twice_as_much_does_not():
    arguments = ("model.shape=llama3.2-1b", "hardware.gpu=a100-40gb", "data.max_length=2048", "train.global_batch=1")
    found = plan(*arguments)
    micro_batch, length = found.limits.micro_batch, found.limits.length
    assert micro_batch is not None
    assert length is not None
    assert plan(*arguments, f"train.micro_batch={micro_batch}", f"train.global_batch={micro_batch}").fits
    more = micro_batch * 2
    assert not plan(*arguments, f"train.micro_batch={more}", f"train.global_batch={more}").fits
    one = ("train.micro_batch=1", "train.global_batch=1")
    assert plan(*arguments, *one, f"data.max_length={length}").fits
    assert not plan(*arguments, *one, f"data.max_length={length * 2}").fits


def test_limits_of_a_system_whose_allocator_is_replayed_take_few_replays():
    """Each takes 20 to 50 ms of a forecast that is to take less than a second."""
    arguments = ["model.shape=llama3-8b", "hardware.gpu=h100-80gb", "hardware.devices=8", "train.micro_batch=1"]
    found = plan(*arguments, system="axolotl")
    assert not found.fits
    before = fragmented.cache_info().misses
    length = found.limits.length
    assert length is not None
    assert fragmented.cache_info().misses - before <= 5
    assert plan(*arguments, f"data.max_length={length}", system="axolotl").fits
    assert not plan(*arguments, f"data.max_length={length + max(128, length // 16)}", system="axolotl").fits


def test_the_fewest_devices_hold_the_micro_batches_of_a_pipeline():
    settings = ("model.shape=llama3-70b", "hardware.gpu=h100-80gb", "hardware.devices=8", "hardware.nodes=8")
    settings += ("train.global_batch=256", "data.max_length=8192", "train.recompute=none", "train.micro_batch=1")
    found = plan(*settings, "parallel.tp=2", "parallel.pp=8")
    assert not found.fits
    fewest = found.limits.devices
    assert fewest is not None

    def on(devices: int) -> bool:
        more = (f"hardware.nodes={devices // 8}", "parallel.tp=2", "parallel.pp=8")
        return plan(*settings, *more).fits

    assert on(fewest)
    assert not on(fewest // 2)


def test_the_fewest_devices_are_enough_and_half_are_not():
    arguments = ("model.shape=llama3-8b", "hardware.gpu=a100-80gb", "data.max_length=2048", "train.global_batch=64")
    fewest = plan(*arguments, "hardware.devices=8").limits.devices
    assert fewest is not None
    assert plan(*arguments, f"hardware.devices={fewest}", "train.micro_batch=1").fits
    assert not plan(*arguments, f"hardware.devices={fewest // 2}", "train.micro_batch=1").fits


def test_alternatives_that_fit_come_first_and_the_fastest_of_them_first():
    rows = plan("model.shape=llama3-8b", "hardware.gpu=h100-80gb", "hardware.devices=8", *BASE).as_dict()[
        "alternatives"
    ]
    order = [(not row["fits"], -row["tokens_per_second_per_gpu"]) for row in rows]
    assert order == sorted(order)
    assert len({row["name"] for row in rows}) == len(rows) >= 5


def test_several_nodes_are_offered_tensor_and_pipeline_parallelism():
    found = plan(
        "model.shape=llama3.1-405b", "hardware.gpu=h100-80gb", "hardware.devices=8", "hardware.nodes=16",
        "train.global_batch=256", "data.max_length=4096", "train.recompute=full",
    )  # fmt: skip
    names = {choice.name for choice in found.alternatives}
    assert any("tp 8" in name and "pp" in name for name in names)
    best = found.alternatives[0]
    assert best.fits
    assert best.memory.reserved / GIB < 80


ON_EIGHT = ("hardware.gpu=a100-80gb", "hardware.devices=8")


@pytest.mark.parametrize(
    ("overrides", "strategy", "says"),
    [
        (("parallel.strategy=fsdp",), "single", "fsdp on one device is the same as single"),
        (
            (*ON_EIGHT, "parallel.strategy=fsdp", "parallel.sharding=no_shard"),
            "ddp",
            "fsdp with no_shard is the same as ddp",
        ),
        ((*ON_EIGHT, "parallel.strategy=zero3", "parallel.tp=4", "parallel.pp=2"), "ddp", "nothing to shard over"),
        ((*ON_EIGHT, "parallel.strategy=zero3", "parallel.tp=4", "parallel.cp=2"), "zero3", "set in the config"),
        (("hardware.gpu=cpu", "hardware.devices=4", "model.shape=llama2-7b"), "ddp", "sharding saves nothing"),
    ],
)
def test_a_strategy_with_nothing_to_shard_is_replaced_by_its_equivalent_with_a_reason(overrides, strategy, says):
    plain = ("model.shape=gpt2", "hardware.gpu=a100-80gb", "data.max_length=64", "train.global_batch=64")
    chosen = plan(*plain, *overrides).choice
    assert chosen.run.strategy == strategy
    if chosen.fits:
        assert says in chosen.reason


def test_single_on_several_processes_is_a_mistake():
    config = api.load_config(None, ["model.shape=gpt2", "parallel.strategy=single"], planned=True)
    with pytest.raises(UserMistake, match="there are 2 processes; use ddp or fsdp"):
        choose(config, read_shape(config.model), machine_at_hand(None, None, devices=2))


@pytest.mark.parametrize(
    ("global_batch", "stages", "schedule", "micro_batch"), [(64, 4, "1f1b", 4), (8, 4, "1f1b", 1), (96, 1, "1f1b", 8)]
)
def test_on_cpus_a_pipeline_gets_several_micro_batches_per_stage(global_batch, stages, schedule, micro_batch):
    run = plan(
        "model.shape=gpt2", "hardware.gpu=cpu", f"hardware.devices={stages}", f"parallel.pp={stages}",
        f"parallel.pp_schedule={schedule}", f"train.global_batch={global_batch}", "data.max_length=64",
    ).choice.run  # fmt: skip
    assert (run.micro_batch, run.grad_accum_steps) == (micro_batch, global_batch // micro_batch)


@pytest.mark.parametrize("global_batch", [36, 60, 100, 126])
def test_an_interleaved_schedule_gets_a_number_of_micro_batches_that_it_can_divide(global_batch):
    run = plan(
        "model.shape=gpt2", "hardware.gpu=h100-80gb", "hardware.devices=4", "parallel.pp=4",
        "parallel.pp_schedule=interleaved", f"train.global_batch={global_batch}", "data.max_length=512",
    ).choice.run  # fmt: skip
    # The schedule of torch, which refuses other numbers; it reads no more of a stage than this.
    stages: list[Any] = [SimpleNamespace(group_size=4, group_rank=0, num_stages=8, stage_index=one) for one in (0, 4)]
    ScheduleInterleaved1F1B(stages, n_microbatches=run.grad_accum_steps)


@pytest.mark.parametrize("overrides", [(), ("parallel.pp=8", "parallel.tp=8", "parallel.pp_schedule=interleaved")])
def test_the_choice_takes_less_than_a_second_of_cpu_time(overrides):
    config = api.load_config(
        None,
        ["model.shape=llama3-70b", "hardware.devices=8", "hardware.nodes=16", "train.global_batch=1024",
         "data.max_length=4096", "train.recompute=auto", *overrides],
        planned=True,
    )  # fmt: skip
    began = time.process_time()
    choose(config, read_shape(config.model), machine_at_hand("NVIDIA H200", 139.8, devices=8, nodes=16))
    assert time.process_time() - began < 1.0


def test_what_helps_another_system_that_does_not_fit_takes_less_than_a_second_of_cpu_time():
    asked = "model.shape=llama3-70b", "hardware.gpu=a100-40gb", "hardware.devices=8", "train.global_batch=64"
    began = time.process_time()
    found = plan(*asked, system="axolotl")
    assert not found.as_dict()["fits"]
    assert found.changes
    assert time.process_time() - began < 1.0


def test_a_cpu_gets_a_small_micro_batch():
    chosen = plan("model.shape=gpt2", "hardware.gpu=cpu", "data.max_length=64", "train.global_batch=64").choice
    assert chosen.run.micro_batch <= 8
    assert not chosen.run.compiled


def test_a_run_that_ran_out_of_memory_although_it_should_fit_gets_the_cheapest_savings():
    config = api.load_config(
        None, ["model.shape=llama3-8b", "hardware.gpu=h100-80gb", "hardware.devices=8", *BASE], planned=True
    )
    question = Question(config, read_shape(config.model), read_machine(config.hardware))
    choice = question.answer()
    assert choice is not None
    assert choice.fits
    found = savings(choice, question)
    assert {"train.recompute=full"} <= {setting for change in found for setting in change.settings}
    assert all(change.saves_gib > 0 for change in found)
    mild = [change.slower for change in found if change.affects == "execution"]
    assert mild == sorted(mild)


TOO_LARGE = ("model.shape=llama3-70b", "data.max_length=8192", "train.global_batch=64", "train.recompute=full")
TWO_NODES = ("hardware.gpu=h100-80gb", "hardware.devices=8", "hardware.nodes=2")


def test_where_replicas_and_shards_do_not_fit_tensor_parallelism_is_chosen_if_allowed():
    split = plan(*TOO_LARGE, *TWO_NODES)
    assert split.fits
    assert split.choice.run.mesh.tp > 1
    assert "tensor or pipeline parallelism is added" in split.choice.reason
    config = split.choice.config
    assert config.parallel.tp == split.choice.run.mesh.tp, "training gets what was planned"
    again = api.load_config(None, [*TOO_LARGE, *TWO_NODES])
    shape, machine = read_shape(again.model), read_machine(again.hardware)
    assert not choose(again, shape, machine, allow_model_parallel=False).fits
    explicit = plan(*TOO_LARGE, *TWO_NODES, "parallel.strategy=fsdp")
    assert not explicit.fits, "a strategy that is set is not changed"
    assert explicit.choice.run.mesh.tp == 1


def test_tensor_parallelism_is_chosen_only_if_it_divides_the_sequence_length():
    odd = plan(*TOO_LARGE[:1], "data.max_length=8190", *TOO_LARGE[2:], *TWO_NODES)
    assert 8190 % odd.choice.run.mesh.tp == 0


@pytest.mark.parametrize(
    "overrides",
    [
        ("train.optimizer=muon",),
        ("eval.prompts=[One]",),
        ("model.attention=eager",),
        ("adapter={kind: lora, dora: true, rank: 512}", "data.max_length=65536"),
    ],
    ids=str,
)
def test_auto_and_the_changes_it_offers_are_what_training_accepts(overrides):
    """Tensor parallelism would make each of these fit, and training refuses it with them."""
    found = plan(*TOO_LARGE, *TWO_NODES, *overrides)
    offered = [found.choice, *(change.choice for change in found.changes), *found.alternatives]
    assert {one.config.parallel.tp for one in offered} == {1}
    assert [key for one in offered for key, _ in find_combinations(one.config)] == []


def test_a_model_without_a_tensor_parallel_plan_is_not_offered_one():
    found = plan(*TOO_LARGE[1:], "model.shape=gemma2-27b", "hardware.gpu=a100-40gb", "hardware.devices=2")
    assert not found.fits
    assert not [one for change in found.changes for one in change.settings if one.startswith("parallel.tp")]
    assert {(one.run.mesh.tp, one.run.mesh.pp) for one in found.alternatives} == {(1, 1)}


def test_a_batch_smaller_than_the_data_parallel_ranks_is_answered_with_what_leaves_fewer():
    arguments = ("model.shape=llama3.2-1b", "hardware.gpu=h100-80gb", "hardware.devices=8", "train.global_batch=4")
    with pytest.raises(UserMistake, match=r"8 data-parallel ranks; .* are: 8; or set parallel\.tp, cp or pp, which"):
        plan(*arguments)
    assert plan(*arguments, "parallel.tp=2").fits
