"""What other systems' code holds and sends in training on many devices, checked against arithmetic by hand."""

from dataclasses import replace
from typing import Any

import pytest

from shoal.catalogue.efficiency import efficiency
from shoal.catalogue.gpus import LINKS, find_gpu
from shoal.catalogue.shapes import parameters
from shoal.config.mesh import Mesh
from shoal.plan.memory.forecast import forecast_memory
from shoal.plan.run.layout import ranks_of
from shoal.plan.run.run import Run
from shoal.plan.speed.communication import Group, collective_seconds
from shoal.plan.speed.compute import block_compute
from shoal.plan.speed.forecast import forecast_speed
from shoal.plan.systems.modelled import SYSTEMS, TORCHTITAN_2024, TORCHTITAN_2025
from shoal.plan.systems.traits import SystemTraits
from shoal.plan.terms import GIB
from tests.plan.planning import make_run, plan
from tests.plan.systems.test_memory import at
from tests.plan.systems.test_other_systems import term


def trained(traits: SystemTraits, *, precision: str = "16-mixed", strategy: str = "zero1", ranks: int = 4) -> Run:
    """Llama 2 with 7 billion parameters on `ranks` A100, four micro-batches per step."""
    settings = {"precision": precision, "strategy": strategy, "mesh": Mesh(dp_shard=ranks)}
    return make_run("llama2-7b", "a100-80gb", grad_accum_steps=4, loss="plain", traits=traits, **settings)


def test_every_axis_of_the_mesh_has_a_communicator_and_several_one_more():
    def context(gpu: str = "a100-80gb", software: int = 0, **degrees: int) -> float:
        traits = replace(SYSTEMS["megatron"], software=software)
        return forecast_memory(make_run(gpu=gpu, traits=traits, mesh=Mesh(**degrees))).context / GIB

    assert context() == pytest.approx(0.6)
    assert context(dp_shard=8) == pytest.approx(0.6 + 0.6)
    assert context(dp_shard=2, tp=4) == pytest.approx(0.6 + 3 * 0.6)
    assert context(dp_shard=2, tp=4, pp=2) == pytest.approx(0.6 + 4 * 0.6)
    # Slower links have fewer channels; before 2023 all kernels were loaded at once.
    assert context("v100-32gb", dp_shard=8) == pytest.approx(1.3 + 0.3)
    assert context(software=2022) == pytest.approx(1.5)
    assert context(software=2023) == pytest.approx(0.6)


def test_megatron_deepspeed_flattens_fp16_gradients_and_keeps_bf16_ones_that_it_has_added():
    traits = SYSTEMS["megatron-deepspeed"]
    half, wide = (trained(traits, precision=one) for one in ("16-mixed", "bf16-mixed"))
    all_of_it = parameters(half.shape)
    buckets = 2 * (1 << 24) * 4  # of updated weights
    assert at(half, "optimizer step", "optimizer temporaries") * GIB == pytest.approx(all_of_it / 4 * 6 + buckets)
    assert at(wide, "optimizer step", "optimizer temporaries") * GIB == pytest.approx(buckets)
    assert at(half, "optimizer step", "gradients that have been added") == 0
    assert at(wide, "optimizer step", "gradients") * GIB == pytest.approx(4 * all_of_it)
    for moment in ("forward pass", "backward of the first block", "embedding gradient", "optimizer step"):
        assert at(wide, moment, "gradients that have been added") * GIB == pytest.approx(2 * all_of_it)
    # They are freed before the next backward pass.
    assert at(wide, "start of the backward pass", "gradients that have been added") == 0
    # Without ZeRO, all gradients are cast one by one, and copied into one tensor.
    plain = trained(traits, strategy="ddp")
    assert at(plain, "optimizer step", "optimizer temporaries") * GIB == pytest.approx(8 * all_of_it)


def test_megatrons_gradients_are_reduced_where_they_are():
    assert at(trained(SYSTEMS["megatron"]), "loss", "gradient bucket") == 0
    assert at(trained(SYSTEMS["megatron-deepspeed"]), "loss", "gradient bucket") * GIB == pytest.approx(5e8 * 2)


def test_an_adamw_over_one_tensor_holds_two_more():
    copies = replace(SYSTEMS["megatron"], step_copies=2)
    one, other = (trained(traits, ranks=8) for traits in (SYSTEMS["megatron"], copies))
    more = [at(run, "optimizer step", "optimizer temporaries") * GIB for run in (one, other)]
    assert more[1] - more[0] == pytest.approx(2 * 4 * parameters(one.shape) / 8)


def test_zero3_holds_a_billion_parameters_between_its_passes():
    run = trained(SYSTEMS["deepspeed"], strategy="zero3", ranks=8)
    for moment in ("loss", "start of the backward pass"):
        assert at(run, moment, "gathered weights") * GIB == pytest.approx(2e9)
    assert at(run, "backward of the first block", "gathered weights") * GIB < 2e9
    fsdp = trained(SYSTEMS["torchtitan"], strategy="fsdp", ranks=8)
    assert at(fsdp, "loss", "gathered weights") * GIB < 2e9


def test_offloaded_optimizers_of_deepspeed_leave_no_gradients_on_the_device():
    run = trained(SYSTEMS["deepspeed"], strategy="zero2", ranks=8)
    assert at(run, "optimizer step", "gradients") * GIB == pytest.approx(2 * parameters(run.shape) / 8)
    assert at(run.with_(offload="optimizer"), "optimizer step", "gradients") == 0
    # ZeRO-1 does not partition them.
    zero1 = run.with_(strategy="zero1", offload="optimizer")
    assert at(zero1, "optimizer step", "gradients") * GIB == pytest.approx(2 * parameters(run.shape))


def test_ddp_of_accelerate_copies_gradients_to_its_buckets():
    def buckets(moment: str, *, accum: int = 1, **settings: object) -> float:
        run = make_run("gpt2", strategy="ddp", mesh=Mesh(dp_shard=2), traits=SYSTEMS["huggingface"], compiled=False)
        return at(run.with_(grad_accum_steps=accum, **settings), moment, "gradient buckets") * GIB

    size = 4 * parameters(make_run("gpt2").shape)
    assert buckets("optimizer step") == pytest.approx(size)
    # Between steps there are the buckets alone, which count as gradients; while gradients are added up, both.
    assert buckets("loss") == 0
    assert buckets("loss", accum=2) == pytest.approx(size)
    assert buckets("loss", traits=replace(SYSTEMS["huggingface"], software=2022)) == pytest.approx(size)
    assert buckets("optimizer step", mesh=Mesh(), strategy="single") == 0
    assert buckets("optimizer step", traits=SYSTEMS["shoal"]) == 0


def test_broadcasts_from_every_rank_take_longer_the_more_there_are():
    def added(ranks: int) -> float:
        run = trained(SYSTEMS["megatron"], ranks=ranks)
        sent = run.with_(traits=replace(run.traits, broadcasts_weights=True))
        return forecast_speed(sent).step_seconds - forecast_speed(run).step_seconds

    assert 0 < added(64) < 0.1 < added(512) < added(1024)
    # As many as there are matrices: a fused QKV layer and five others in 32 blocks, embedding and head.
    assert added(1024) / added(512) == pytest.approx(2, rel=0.1)


def test_blocks_that_do_not_divide_are_missing_in_deepspeeds_last_stage():
    def blocks(layers: int, stages: int, *, modules: bool = False) -> list[int]:
        shape = replace(make_run("llama2-7b").shape, layers=layers)
        traits = replace(SYSTEMS["megatron-deepspeed"], stages_of_modules=modules)
        return [rank.blocks for rank in ranks_of(make_run(traits=traits, mesh=Mesh(pp=stages)).with_(shape=shape))]

    assert blocks(70, 12) == [6] * 11 + [4]  # as its partition_balanced divides BLOOM's
    assert blocks(72, 12) == [6] * 12
    # Where nothing would be left, blocks are spread.
    assert blocks(33, 12) == [2] * 3 + [3] * 9
    # With the embedding before, and norm and head behind: 63 modules, of which the last stage has three.
    assert blocks(60, 16, modules=True) == [3] + [4] * 14 + [1]


def test_gradients_may_be_reduced_wider_than_they_are_kept_and_to_all_ranks():
    narrow = replace(SYSTEMS["megatron"], wide_gradients=False, accumulates_in_matmuls=False)
    wide = replace(narrow, widens_reduction=True)

    def reduced(traits: SystemTraits, operation: str = "reduce-scatter") -> float:
        return term(forecast_speed(trained(traits, precision="bf16-mixed")), f"gradient {operation}")

    assert reduced(wide) == pytest.approx(2 * reduced(narrow), rel=0.01)
    assert reduced(replace(wide, all_reduces=True), "all-reduce") == pytest.approx(2 * reduced(wide), rel=0.01)
    for name in ("gradients", "gradient accumulation"):
        kept = [trained(one, precision="bf16-mixed") for one in (wide, narrow)]
        same = [at(one, "optimizer step", name) + term(forecast_speed(one), name) for one in kept]
        assert same[0] == same[1] > 0


def test_a_group_of_fewer_than_eight_has_fewer_links_where_there_is_no_switch():
    def seconds(gpu: str, ranks: int) -> float:
        run = trained(SYSTEMS["megatron"], ranks=8).with_(gpu=find_gpu(gpu), link=LINKS[find_gpu(gpu).link])
        return collective_seconds(run, "all-gather", Group(ranks, 1), 8e9)

    # 0.7 of the links' bandwidth, of which a pair has one of seven.
    assert seconds("mi300x", 8) == pytest.approx(7 / 8 * 8e9 / (0.70 * 448e9), rel=0.01)
    assert seconds("mi300x", 2) == pytest.approx(1 / 2 * 8e9 / (0.70 * 64e9), rel=0.01)
    assert seconds("h100-80gb", 2) == pytest.approx(4 / 7 * seconds("h100-80gb", 8), rel=0.01)


def test_fp8_is_limited_by_what_limits_bf16():
    # 0.89 of an H100-PCIe's 0.593, and on an RTX 4090 0.99 of the 0.897 of bf16.
    assert efficiency(find_gpu("h100-pcie")).fp8 == pytest.approx(0.89 * 0.593, abs=0.001)
    assert efficiency(find_gpu("rtx4090")).fp8 == pytest.approx(0.99 * 0.897, abs=0.001)
    assert efficiency(find_gpu("h200")).fp8 == pytest.approx(0.62)
    assert efficiency(find_gpu("b200")).fp8 == pytest.approx(0.68)


def test_the_command_knows_megatron_deepspeed():
    found = plan(
        *("model.shape=llama3-8b", "hardware.gpu=a100-80gb", "hardware.devices=8", "parallel.strategy=zero1"),
        *("train.precision=bf16-mixed", "train.grad_accum=4", "train.micro_batch=1"),
        system="megatron-deepspeed",
    )
    assert found.choice.memory.worst.peak.tree.find("gradients that have been added")


def test_transformer_engine_computes_attention_on_amd_by_its_own_kernels_since_2025():
    def attention(year: int) -> float:
        run = trained(replace(SYSTEMS["megatron"], software=year)).with_(gpu=find_gpu("mi300x"))
        return block_compute(run).attention.both

    assert attention(2024) / attention(2025) == pytest.approx(432 / 230, rel=0.01)


def test_what_is_gathered_along_the_sequence_is_copied_and_its_gradients_are_added_up():
    def parallel(system: str, *, micro_batch: int = 1, compiled: bool = False) -> Run:
        settings = {"strategy": "fsdp", "mesh": Mesh(dp_shard=2, tp=4), "recompute": "none", "loss": "plain"}
        return make_run(micro_batch=micro_batch, compiled=compiled, traits=SYSTEMS[system], **settings)

    def collectives(system: str, **settings: Any) -> float:
        return term(forecast_speed(parallel(system, **settings)), "tensor parallel")

    one = 2048 * 4096 * 2
    # torchtitan's pull request 437: two copies of 8,192 tokens take 0.18 ms.
    copied = 8 * 2 * one / (3.35e12 * 0.64) * 32
    assert collectives("torchtitan") - collectives("torchtitan", compiled=True) == pytest.approx(copied)
    assert collectives("shoal") == collectives("shoal", compiled=True)
    assert collectives("shoal", micro_batch=2) - collectives("shoal", micro_batch=2, compiled=True) == pytest.approx(
        2 * copied
    )
    assert collectives("megatron") == collectives("megatron", compiled=True)
    # Of queries, keys and values two sums, of gate and up one, each of which reads two tensors and writes one.
    run = parallel("torchtitan")
    joined = replace(run, traits=replace(run.traits, fused_qkv=True))
    added = block_compute(run).elementwise.backward - block_compute(joined).elementwise.backward
    assert added == pytest.approx(3 * 3 * one / (3.35e12 * 0.8))


def test_a_norm_of_pytorch_is_one_kernel_since_2_9():
    before, since = (make_run(traits=one, compiled=False) for one in (TORCHTITAN_2024, TORCHTITAN_2025))
    assert block_compute(since).elementwise.forward < 0.7 * block_compute(before).elementwise.forward


def test_collectives_of_a_stage_overlap_with_the_micro_batches_of_another():
    def exposed(name: str, **settings: Any) -> float:
        settings = {"strategy": "zero1", "mesh": Mesh(dp_shard=32, pp=4), "grad_accum_steps": 16, **settings}
        run = make_run("llama2-70b", "h100-80gb", loss="plain", compiled=True, traits=SYSTEMS["nemo"], **settings)
        slow = run.with_(network=replace(run.network, bytes_per_second=5e9))
        return term(forecast_speed(slow), name)

    gradients, weights = "gradient reduce-scatter", "all-gather of updated weights"
    alone = {name: exposed(name, schedule="1f1b") for name in (gradients, weights)}
    five = {name: exposed(name, schedule="interleaved", virtual_stages=5) for name in (gradients, weights)}
    block = block_compute(make_run("llama2-70b", "h100-80gb", compiled=True, loss="plain", traits=SYSTEMS["nemo"]))
    backward, forward = block.backward * 20, block.forward * 20
    # Alone, what one micro-batch does not hide; else what four do not, but at least a fifth, of one stage.
    assert five[gradients] == pytest.approx(max((alone[gradients] + backward) / 5, alone[gradients] - 3 * backward))
    assert five[weights] == pytest.approx(max(alone[weights] / 5, alone[weights] - 3 * forward))
    assert five[weights] < 0.7 * alone[weights]
