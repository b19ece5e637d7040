"""The speed forecast: MFU with the FLOPs that torch counts, and monotonicity."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from shoal.catalogue.gpus import GPUS
from shoal.catalogue.shapes import block_matrices, shape_from_sizes
from shoal.config.mesh import Mesh
from shoal.models.families import transformers_config
from shoal.plan.render import plan_text
from shoal.plan.run.run import FROZEN
from shoal.plan.speed.communication import collective_seconds, rank_group
from shoal.plan.speed.compute import head_seconds
from shoal.plan.speed.forecast import flops_per_token, forecast_speed
from shoal.plan.systems.modelled import SYSTEMS
from tests.plan.planning import make_run, plan, tokens_per_second


@pytest.mark.parametrize(("family", "kv_heads"), [("llama", 2), ("gpt2", 4), ("neox", 4), ("qwen3", 2)])
def test_the_flops_of_a_token_are_those_that_torch_counts(family, kv_heads):
    shape = shape_from_sizes(
        family, hidden=64, layers=2, heads=4, kv_heads=kv_heads, vocab=99, positions=32, tied=family == "gpt2"
    )
    if family == "qwen3":  # heads × head dimension is not the hidden size
        shape = replace(shape, head_size=32)
    model = AutoModelForCausalLM.from_config(transformers_config(shape), attn_implementation="eager")
    tokens = torch.zeros(3, 32, dtype=torch.long)
    with FlopCounterMode(display=False) as trained:
        model(input_ids=tokens, use_cache=False).logits.sum().backward()
    embedded = model.get_input_embeddings()(tokens).detach().requires_grad_()
    model.requires_grad_(False)
    with FlopCounterMode(display=False) as frozen:
        model(inputs_embeds=embedded, use_cache=False).logits.sum().backward()
    run = make_run(length=32, micro_batch=3).with_(shape=shape)
    assert flops_per_token(run) == trained.get_total_flops() / tokens.numel()
    assert flops_per_token(run.with_(trained=FROZEN)) == frozen.get_total_flops() / tokens.numel()


def test_mfu_is_the_share_of_the_published_peak():
    speed = plan("model.shape=llama3.2-1b", "hardware.gpu=h200", "data.max_length=4096").as_dict()["speed"]
    matrices = 16 * (2048 * (2 * 2048 + 2 * 512) + 3 * 2048 * 8192) + 128_256 * 2048
    flops = 6 * matrices + 12 * 16 * 2048 * 4096
    assert speed["mfu"] == pytest.approx(speed["tokens_per_second_per_gpu"] * flops / 989e12, rel=1e-3)


def test_mfu_counts_attention_within_sliding_windows():
    windowed = make_run("gemma3-1b", length=32_768)  # five of six blocks have a window of 512 tokens
    shape = windowed.shape
    whole = windowed.with_(shape=replace(shape, sliding_window=None))
    keys = 12 * shape.layers * shape.heads * shape.head_size * shape.sliding_share * (32_768 - shape.sliding_window)
    assert shape.sliding_share > 0.8
    assert flops_per_token(whole) - flops_per_token(windowed) == pytest.approx(keys)
    assert flops_per_token(windowed.with_(length=512)) == flops_per_token(whole.with_(length=512))


@pytest.mark.parametrize("gpu", GPUS)
def test_every_device_has_a_speed_below_its_peak(gpu):
    precision = "16-mixed" if GPUS[gpu].bf16 is None else "bf16-mixed"
    speed = forecast_speed(make_run("gpt2", gpu, length=1024, micro_batch=8, precision=precision))
    assert 0.05 < speed.mfu < 0.9


def test_activation_checkpointing_takes_time():
    speeds = [
        forecast_speed(make_run(recompute=kind)).tokens_per_second_per_gpu for kind in ("none", "selective", 2, "full")
    ]
    assert speeds[0] > speeds[1]
    assert speeds[0] > speeds[2] > speeds[3]
    cheap = forecast_speed(make_run(recompute="cheap")).tokens_per_second_per_gpu
    assert 0.98 * speeds[0] < cheap < speeds[0]


def test_offloaded_activations_take_time_only_if_the_link_is_slower_than_the_block():
    def seconds(shape, kind):
        return forecast_speed(make_run(shape, "h200", micro_batch=4, recompute=kind)).step_seconds

    assert seconds("llama3-8b", "offload") == seconds("llama3-8b", "full")
    # The blocks of gpt2 are short: 12 of them, with inputs of 768 fp32 elements per token, forth and back.
    most = 12 * 2 * 4 * 2048 * 768 * 4 / 50e9
    assert 0 < seconds("gpt2", "offload") - seconds("gpt2", "full") < most


def test_compiled_blocks_are_faster_and_fp8_is_faster_still():
    eager, compiled, eight = (
        forecast_speed(make_run(micro_batch=8, compiled=compiled, precision=precision)).tokens_per_second_per_gpu
        for compiled, precision in ((False, "bf16-mixed"), (True, "bf16-mixed"), (True, "fp8"))
    )
    assert eager < compiled < eight


def test_a_slower_network_is_never_faster():
    arguments = (
        "model.shape=llama3-8b", "hardware.gpu=a100-80gb", "hardware.devices=8", "hardware.nodes=4",
        "parallel.strategy=fsdp", "train.micro_batch=1", "train.global_batch=32", "data.max_length=2048",
    )  # fmt: skip
    names = ("infiniband-ndr", "infiniband-hdr", "ethernet-100", "ethernet-10")
    speeds = [tokens_per_second(*arguments, f"hardware.network={name}") for name in names]
    assert speeds == sorted(speeds, reverse=True)
    assert speeds[0] > 3 * speeds[-1]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_data_parallel_speed_falls_gently_with_the_number_of_devices(strategy):
    def speed_per_gpu(count):
        mesh = Mesh(dp_replicate=count) if strategy == "ddp" else Mesh(dp_shard=count)
        run = make_run("llama3.2-1b", "a100-80gb", micro_batch=8, strategy=strategy, mesh=mesh)
        return forecast_speed(run).tokens_per_second_per_gpu

    alone = forecast_speed(make_run("llama3.2-1b", "a100-80gb", micro_batch=8)).tokens_per_second_per_gpu
    speeds = [speed_per_gpu(count) for count in (8, 64, 1024, 4096)]
    assert alone * 1.02 > speeds[0]
    assert speeds == sorted(speeds, reverse=True)
    assert speeds[1] > 0.6 * alone


def test_communication_overlaps_with_at_most_as_much_compute_as_there_is():
    """A step with little compute takes as long as its communication."""
    run = make_run("llama3-8b", length=64, micro_batch=1, strategy="fsdp", mesh=Mesh(dp_shard=64))
    run = run.with_(shape=replace(run.shape, vocab=1_000_000))
    over, shape = rank_group(run, 64, 1), run.shape
    head = shape.vocab * shape.hidden
    blocks = shape.layers * block_matrices(shape)
    gathers = collective_seconds(run, "all-gather", over, (2 * blocks + 2 * head) * 2)
    scatters = collective_seconds(run, "reduce-scatter", over, (blocks + 2 * head) * 4)
    assert forecast_speed(run).step_seconds > 0.99 * (gathers + scatters)


def test_the_bubble_shrinks_with_more_micro_batches_and_with_interleaving():
    def bubble(grad_accum_steps, schedule="1f1b"):
        run = make_run(mesh=Mesh(pp=4), grad_accum_steps=grad_accum_steps, schedule=schedule, strategy="ddp")
        step = forecast_speed(run).step
        found = step.find("pipeline bubble")
        assert found is not None
        return found.amount / step.amount

    assert bubble(4) > bubble(16) > bubble(64)
    assert bubble(16, "interleaved") < bubble(16)


def test_rank_groups_know_how_many_nodes_they_span():
    run = make_run(mesh=Mesh(tp=4, dp_shard=16))
    assert rank_group(run, 4, 1).nodes == 1  # tensor-parallel ranks are adjacent
    over = rank_group(run, 16, 4)  # every fourth rank: two of them in each node of eight
    assert (over.nodes, over.within) == (8, 2)


def test_small_eager_kernels_are_bound_by_launch_overhead():
    step = forecast_speed(make_run("gpt2", "h100-80gb", length=64, compiled=False)).step
    overhead = step.find("kernel launch overhead")
    assert overhead is not None
    assert overhead.amount > step.amount / 2


SMALL = ("model.shape=smollm2-135m", "hardware.gpu=h200", "data.max_length=512", "train.micro_batch=32")


def test_cuda_graphs_are_planned_where_the_device_would_wait_for_its_host():
    small = plan(*SMALL)
    assert small.as_dict()["chosen"]["cuda_graphs"]
    assert "CUDA graphs" in plan_text(small)
    without = plan(*SMALL, "train.cuda_graphs=false")
    assert not without.as_dict()["chosen"]["cuda_graphs"]
    assert without.as_dict()["speed"]["terms"]["kernel launch overhead"] > 0
    assert without.choice.speed.step_seconds > 1.3 * small.choice.speed.step_seconds


def test_replicas_replay_graphs_where_that_is_worth_gradients_that_are_reduced_after_them():
    replicated = (*SMALL, "hardware.devices=8", "parallel.strategy=ddp", "train.global_batch=256")
    found = {choice: plan(*replicated, f"train.cuda_graphs={choice}") for choice in ("true", "false", "auto")}
    assert found["auto"].as_dict()["chosen"]["cuda_graphs"]
    replayed, launched = (found[choice].choice.speed.step for choice in ("true", "false"))
    assert found["auto"].choice.speed.step.amount == replayed.amount < launched.amount
    assert replayed.find("gradient all-reduce").amount > launched.find("gradient all-reduce").amount


@pytest.mark.parametrize(
    "different",
    [
        ("model.shape=llama3-8b", "adapter.kind=lora"),
        ("hardware.devices=2", "parallel.strategy=fsdp"),
        ("hardware.devices=2", "parallel.strategy=zero1"),
        ("hardware.devices=2", "parallel.strategy=ddp", "train.reduce_dtype=bf16"),
        (
            "hardware.devices=2",
            "parallel.strategy=ddp",
            "train.micro_batch=64",
            "data.max_length=1024",
            "train.global_batch=128",
        ),
        ("train.compile=false",),
        ("train.recompute=offload",),
        ("hardware.gpu=cpu",),
    ],
    ids=str,
)
def test_other_runs_have_no_cuda_graphs(different):
    assert not plan(*SMALL, *different).as_dict()["chosen"]["cuda_graphs"]


def test_preference_tuning_of_an_adapter_has_a_forward_pass_more():
    """A third of what a step computes without gradients of weights, and the head's logits are computed twice."""
    common = ("model.shape=llama3-8b", "hardware.gpu=h200", "adapter.kind=lora", "train.micro_batch=2")
    alone, pairs = (plan(*common, f"train.objective={name}").as_dict()["speed"] for name in ("causal_lm", "dpo"))
    without = plan(*common, "train.objective=simpo").as_dict()["speed"]
    assert alone["step_seconds"] < without["step_seconds"] < 1.1 * alone["step_seconds"]
    assert 0.3 < pairs["terms"]["reference forward pass"] / without["step_seconds"] < 0.5
    assert pairs["step_seconds"] == pytest.approx(
        without["step_seconds"] + pairs["terms"]["reference forward pass"], rel=1e-3
    )


@pytest.mark.parametrize("kind", ["none", "lora"])
def test_a_plan_says_what_it_counts_of_the_reference(kind):
    found = plan("model.shape=llama3-8b", "hardware.gpu=h200", f"adapter.kind={kind}", "train.objective=dpo")
    said = {"none": "computed once before the first step", "lora": "a forward pass without the adapter"}[kind]
    assert sum(said in note for note in found.notes) == 1
    assert ("reference forward pass" in found.as_dict()["speed"]["terms"]) == (kind == "lora")


def test_a_vocabulary_that_tensor_cores_cannot_read_takes_long_unless_it_is_padded():
    def seconds(vocabulary: int, system: str, precision: str = "bf16-mixed") -> float:
        run = make_run("gpt2", "h200", length=1024, micro_batch=32, precision=precision)
        return head_seconds(run.with_(shape=replace(run.shape, vocab=vocabulary), traits=SYSTEMS[system])).both

    assert seconds(50257, "shoal") == pytest.approx(seconds(50304, "shoal"), rel=0.01)
    assert seconds(50257, "huggingface") > 3 * seconds(50304, "huggingface")
    assert seconds(50257, "litgpt") < 1.5 * seconds(50304, "litgpt")
    assert seconds(50257, "huggingface", "32-true") == pytest.approx(seconds(50304, "huggingface", "32-true"), rel=0.01)
