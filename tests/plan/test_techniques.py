"""Techniques that are forecast before training builds them: figures move as the tensors that each keeps or drops."""

import json
from dataclasses import replace

import pytest

from shoal.catalogue.gpus import LINKS
from shoal.catalogue.shapes import find_shape
from shoal.config.load import load_config
from shoal.config.mesh import Mesh
from shoal.mistakes import UserMistake
from shoal.plan.memory.activations import block_input, block_kept
from shoal.plan.memory.checkpointed import block_without_parts
from shoal.plan.memory.forecast import forecast_memory
from shoal.plan.memory.moments import moments
from shoal.plan.memory.states import optimizer_bytes, states
from shoal.plan.run.blocks import linears
from shoal.plan.run.layout import micro_batches_in_flight, ranks
from shoal.plan.run.run import Run
from shoal.plan.speed.forecast import forecast_speed
from shoal.plan.systems.modelled import DEEPSPEED, OURS
from tests.plan.planning import EIGHT_H100, make_run, plan

LONG = {"length": 8192, "micro_batch": 2}


def saved(run: Run) -> float:
    """Bytes that the blocks save for the backward pass."""
    (rank,) = ranks(run.shape, 1, run.schedule)
    tree = next(moment.tree for moment in moments(run, rank) if moment.name == "start of the backward pass")
    found = tree.find("activations")
    assert found is not None
    return found.amount


def seconds(run: Run) -> float:
    return forecast_speed(run).step_seconds


def parts(*names: str, **settings: object) -> Run:
    return make_run("llama3.2-1b", recompute="parts", recomputed_parts=names, **LONG, **settings)


def test_attention_recompute_drops_the_scores_of_unfused_attention_and_nothing_else():
    run = parts("attention", attention="scores", attention_dropout=True, traits=DEEPSPEED, compiled=False)
    heads, tokens = run.shape.heads, run.tokens
    # The softmax in fp32, what dropout leaves of its copy in bf16, and the mask; and the softmax's sums.
    scores = tokens * heads * run.length * (4 + 2 + 1) + tokens * heads * 4
    assert block_kept(run).amount - block_without_parts(run).amount == scores
    assert saved(replace(run, recompute="none")) - saved(run) == pytest.approx(scores * run.shape.layers)


def test_attention_recompute_of_a_fused_kernel_saves_only_the_sums_of_its_softmax():
    run = parts("attention")
    assert block_kept(run).amount - block_without_parts(run).amount == run.tokens * run.shape.heads * 4
    assert seconds(run) > seconds(replace(run, recompute="none"))


def test_norm_and_activation_recompute_drop_their_outputs():
    run = parts("norm", traits=DEEPSPEED, compiled=True)
    kept = block_kept(run)
    assert kept.amount - block_without_parts(run).amount == 2 * run.tokens * run.shape.hidden * 2
    run = replace(run, recomputed_parts=("activation",))
    assert kept.amount - block_without_parts(run).amount == run.tokens * run.shape.ffn * 2
    run = replace(run, recomputed_parts=("mlp",))
    assert kept.amount - block_without_parts(run).amount == 3 * run.tokens * run.shape.ffn * 2
    assert seconds(run) > seconds(replace(run, recomputed_parts=("activation",)))


def test_recomputing_the_first_layers_lies_between_none_and_all():
    apart = replace(OURS, packs_projections=False)  # which only blocks without recomputation do
    none = make_run("llama3.2-1b", traits=apart, **LONG)
    full = replace(none, recompute="full")
    some = replace(full, recomputed_blocks=4)
    assert saved(full) < saved(some) < saved(none)
    # Of four of the sixteen blocks the input alone is saved.
    whole = block_kept(some).amount
    assert saved(some) == pytest.approx(4 * block_input(some) + 12 * whole)
    assert seconds(some) - seconds(none) == pytest.approx((seconds(full) - seconds(none)) / 4)


def test_offloaded_activations_leave_two_blocks_on_the_device_and_the_rest_with_the_host():
    run = make_run("llama3.2-1b", recompute="offload-all", **LONG)
    whole = block_kept(run).amount
    assert saved(run) == pytest.approx(2 * whole)
    host = forecast_memory(run).host.find("offloaded activations")
    assert host is not None
    assert host.amount == pytest.approx(16 * whole)
    slow = replace(run, gpu=replace(run.gpu, compute_capability=(7, 0)))  # over PCIe 3
    assert seconds(slow) > seconds(run) > seconds(replace(run, recompute="none"))


def test_without_sequence_parallelism_every_rank_has_the_whole_residual_stream():
    run = make_run("llama3-8b", mesh=Mesh(tp=4), **LONG)
    plain = replace(run, sequence_parallel=False)
    assert block_input(plain) == 4 * block_input(run)
    norms = [one.find("norm inputs") for one in (block_kept(run), block_kept(plain))]
    assert norms[0] is not None
    assert norms[1] is not None
    assert norms[1].amount == 4 * norms[0].amount
    assert block_kept(plain).amount - block_kept(run).amount == pytest.approx(0.75 * norms[1].amount)
    # An all-reduce moves what a reduce-scatter and an all-gather move, but every rank computes all norms and adds.
    times = [forecast_speed(one).step for one in (run, plain)]
    assert [term.amount for term in times[0].parts if term.name == "communication"] == [
        term.amount for term in times[1].parts if term.name == "communication"
    ]
    assert 1.05 < times[1].amount / times[0].amount < 1.3
    assert block_kept(replace(run, mesh=Mesh(), sequence_parallel=False)) == block_kept(replace(run, mesh=Mesh()))


def test_scores_of_unfused_attention_are_sharded_by_heads():
    one, four = (
        make_run("llama3-8b", mesh=Mesh(tp=degree), attention="scores", compiled=False, **LONG) for degree in (1, 4)
    )
    scores = [block_kept(run).find("attention scores") for run in (one, four)]
    assert scores[0] is not None
    assert scores[1] is not None
    assert scores[0].amount == 4 * scores[1].amount
    # One kernel for scaling, mask and softmax keeps its result alone: 2 of 6 bytes per score, and of 4 if compiled.
    fused = block_kept(replace(four, traits=replace(four.traits, fused_softmax="always"))).find("attention scores")
    assert fused is not None
    assert fused.amount == scores[1].amount / 3
    compiled = block_kept(replace(four, compiled=True)).find("attention scores")
    assert compiled is not None
    assert compiled.amount == 2 * fused.amount


def test_more_virtual_stages_shrink_the_bubble_and_hold_more_micro_batches():
    run = make_run("llama3-70b", mesh=Mesh(pp=4), schedule="interleaved", grad_accum_steps=16, virtual_stages=5)
    two = replace(run, virtual_stages=2)

    def bubble(one: Run) -> float:
        found = forecast_speed(one).step.find("pipeline bubble")
        assert found is not None
        return found.amount / (forecast_speed(one).step_seconds - found.amount)

    assert bubble(run) / bubble(two) == pytest.approx(2 / 5, rel=0.05)
    first = ranks(run.shape, 4, "interleaved", 5)[0]
    assert len(first.stages) == 5
    # Megatron's warm-up: 2 (p - 1) + (v - 1) p chunks and the one in progress, of v per micro-batch.
    assert micro_batches_in_flight(run, first) == (2 * 3 + 4 * 4 + 1) / 5
    assert micro_batches_in_flight(replace(two, virtual_stages=0), first) == micro_batches_in_flight(two, first)


def test_zero1_within_a_node_replicates_its_state_across_nodes():
    everywhere = make_run("llama3-8b", mesh=Mesh(dp_shard=64), strategy="zero1", traits=DEEPSPEED)
    within = replace(everywhere, optimizer_ranks=8)
    (rank,) = ranks(within.shape, 1, "1f1b")
    assert states(within, rank).optimizer.amount == 8 * states(everywhere, rank).optimizer.amount
    slow = {"network": LINKS["ethernet-25"]}
    gathers = [
        forecast_speed(replace(run, **slow)).step.find("all-gather of updated weights") for run in (within, everywhere)
    ]
    assert gathers[0] is not None
    assert gathers[1] is not None
    assert gathers[0].amount < gathers[1].amount / 5


def test_an_optimizer_in_the_backward_pass_holds_the_gradient_of_one_matrix():
    run = make_run("llama3-8b", precision="bf16-true", optimizer_in_backward=True)
    (rank,) = ranks(run.shape, 1, "1f1b")
    assert states(run, rank).gradients.amount == run.shape.vocab * run.shape.hidden * 2
    accumulating = replace(run, grad_accum_steps=2)  # then all gradients are needed until the last micro-batch
    assert states(accumulating, rank).gradients == states(replace(run, optimizer_in_backward=False), rank).gradients


def test_a_paged_optimizer_keeps_its_state_with_the_host():
    run = make_run("llama3-8b", precision="bf16-true", optimizer="adamw8bit", paged_optimizer=True)
    (rank,) = ranks(run.shape, 1, "1f1b")
    plain = states(replace(run, paged_optimizer=False), rank)
    assert states(run, rank).optimizer.amount == 0
    assert states(run, rank).host == plain.optimizer.amount
    # CUDA leaves its pages on the device while there is room for them.
    assert seconds(run) == seconds(replace(run, paged_optimizer=False))
    full = replace(run, gpu=replace(run.gpu, memory_gib=40.0))
    assert seconds(full) > seconds(replace(full, paged_optimizer=False))


def test_adafactor_keeps_a_row_and_a_column_per_matrix():
    run = make_run("llama3-8b", optimizer="adafactor")
    (rank,) = ranks(run.shape, 1, "1f1b")
    state = optimizer_bytes(run, rank)
    shape = run.shape
    widths = 2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14_336)
    assert state == 4 * (shape.layers * (widths + 2 * 4096) + 2 * (shape.vocab + shape.hidden))
    assert state < optimizer_bytes(replace(run, optimizer="adamw"), rank) / 1000


def test_models_with_grouped_keys_and_no_gate_are_forecast(tmp_path):
    shape = find_shape("starcoder2-3b")
    assert shape.kv_heads < shape.heads
    # Two matrices in the MLP, and narrow keys and values.
    assert [one.outputs for one in linears(shape)] == [3072, 256, 256, 3072, 12_288, 3072]
    settings = {"hidden_size": 18_432, "num_hidden_layers": 96, "num_attention_heads": 96, "num_key_value_heads": 8}
    settings |= {"model_type": "nemotron", "intermediate_size": 73_728, "vocab_size": 256_000, "hidden_act": "relu2"}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    found = plan(f"model.from={tmp_path}", "hardware.gpu=h100-80gb").as_dict()["model"]
    assert found["parameters"] / 1e9 == pytest.approx(341.0, rel=0.001)


def test_accumulation_without_sync_holds_unsharded_gradients_and_reduces_once_a_step():
    plain = make_run("llama3-8b", precision="bf16-true", mesh=Mesh(dp_shard=8), strategy="fsdp", grad_accum_steps=4)
    without = replace(plain, traits=replace(plain.traits, unsharded_accumulation=True))
    (rank,) = ranks(plain.shape, 1, "1f1b")
    assert states(plain, rank).unreduced.amount == 0
    assert states(without, rank).unreduced.amount == 8 * states(plain, rank).gradients.amount * plain.reduce_bytes / 2
    assert forecast_memory(without).allocated > forecast_memory(plain).allocated
    once = replace(without, grad_accum_steps=1)
    assert states(once, rank).unreduced.amount == 0
    slow = {"link": LINKS["ethernet-10"], "network": LINKS["ethernet-10"]}
    assert seconds(replace(without, **slow)) < seconds(replace(plain, **slow))


TECHNIQUES = (
    "train.optimizer.name=adafactor",
    "train.optimizer.in_backward=true",
    "train.optimizer.paged=true",
    "train.recompute=attention",
    "train.recompute=offload-all",
    "train.recompute={first: 3}",
    "train.recompute={parts: [norm, activation]}",
    "parallel.sequence_parallel=false",
    "parallel.pp_stages=4",
    "parallel.optimizer_ranks=8",
)


@pytest.mark.parametrize("override", TECHNIQUES)
def test_a_technique_can_be_planned_and_training_refuses_it_in_one_sentence(override):
    given = ("model.shape=llama3.2-1b", "hardware.gpu=h100-80gb", override)
    assert "does not accept this yet" in " ".join(plan(*given).as_dict()["notes"])
    with pytest.raises(UserMistake, match="is not built yet") as refused:
        load_config(None, given)
    assert len(str(refused.value).splitlines()) == 1


def test_each_further_checkpointed_block_costs_as_much_as_the_first() -> None:
    settings = ("model.shape=llama3-70b", "hardware.gpu=h100-80gb", "hardware.devices=8", "hardware.nodes=8")
    settings += ("train.global_batch=128", "train.micro_batch=1", "parallel.tp=4", "parallel.pp=4")

    def seconds(recompute: str) -> float:
        found = plan(*settings, f"train.recompute={recompute}", system="megatron")
        return found.choice.speed.step_seconds

    none, one, two = (seconds(kind) for kind in ("none", "{first: 1}", "{first: 2}"))
    assert two - one == pytest.approx(one - none, rel=1e-3)
    assert seconds("full") - none == pytest.approx(20 * (one - none), rel=1e-3)


def test_the_optimizer_state_is_shared_by_ranks_that_divide_all_of_them() -> None:
    with pytest.raises(UserMistake, match="optimizer_ranks 3 does not divide the number of ranks"):
        plan("model.shape=llama3.2-1b", *EIGHT_H100, "parallel.strategy=zero1", "parallel.optimizer_ranks=3")
