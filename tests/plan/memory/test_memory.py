"""The memory forecast: terms add up, more sharding and recomputation never need more, ZeRO's table is reproduced."""

from dataclasses import replace
from itertools import pairwise

import pytest

from shoal.catalogue.gpus import GPUS
from shoal.catalogue.shapes import NAMED, ModelShape, parameters
from shoal.config.mesh import Mesh
from shoal.plan.memory.forecast import forecast_memory
from shoal.plan.memory.head import head
from shoal.plan.memory.states import states
from shoal.plan.run.blocks import linears
from shoal.plan.run.layout import count, ranks
from shoal.plan.run.run import FROZEN, Adapter, Run
from shoal.plan.systems.modelled import DEEPSPEED
from shoal.plan.terms import GIB
from tests.plan.planning import EIGHT_H100, leaves, make_run, plan, reserved

SHAPES = ["llama3-8b", "pythia-1b", "gpt2", "qwen3-8b", "mpt-7b", "mistral-7b"]


@pytest.mark.parametrize("name", NAMED)
def test_the_parts_of_a_model_add_up_to_its_parameters(name):
    run = make_run(name)
    (rank,) = ranks(run.shape, 1, "1f1b")
    assert count(run, rank).all == parameters(run.shape)


@pytest.mark.parametrize("name", ["llama3-8b", "llama3.2-1b"])
def test_the_pipeline_stages_add_up_to_the_parameters_of_the_model(name):
    run = make_run(name, mesh=Mesh(pp=4))
    held = sum(count(run, rank).all for rank in ranks(run.shape, 4, "1f1b"))
    twice = run.shape.vocab * run.shape.hidden if run.shape.tied else 0
    assert held == parameters(run.shape) + twice


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("parallel.tp=2",),
        ("parallel.pp=2", "train.micro_batch=1"),
        ("adapter.kind=qlora",),
        ("parallel.strategy=zero1",),
        ("train.recompute=selective",),
        ("parallel.offload=optimizer",),
    ],
)
def test_the_terms_add_up(overrides):
    found = plan("model.shape=llama3.2-1b", *EIGHT_H100, *overrides).as_dict()
    memory, speed = found["memory"], found["speed"]
    assert leaves(memory["terms"]) == pytest.approx(memory["allocated_gib"], abs=0.01)
    assert leaves(speed["terms"]) == pytest.approx(speed["step_seconds"], rel=1e-3)
    assert max(memory["moments"].values()) == memory["allocated_gib"] == memory["moments"][memory["peak"]]
    assert max(stage["reserved_gib"] for stage in memory["stages"]) == memory["reserved_gib"]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("degrees", [{}, {"tp": 2}, {"cp": 2}])
def test_more_activation_checkpointing_takes_at_most_one_percent_more_memory(shape, compiled, degrees):
    """More, where weights and gradients need most of it: what a block recomputes is not free."""

    def needed(recompute):
        run = make_run(shape, micro_batch=4, compiled=compiled, recompute=recompute, mesh=Mesh(**degrees))
        return forecast_memory(run).reserved

    def ordered(*amounts):
        return all(less <= 1.01 * more for less, more in pairwise(amounts))

    whole, half, full = needed("none"), needed(2), needed("full")
    assert ordered(needed("offload"), full, half, whole)
    assert ordered(full, needed("cheap"), whole)
    if "tp" not in degrees:  # with tp, selective also keeps the results of collectives
        assert ordered(full, needed("selective"), whole)


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3", "fsdp"])
def test_more_shards_never_take_more_memory(strategy):
    def needed(count):
        mesh = Mesh(dp_replicate=count) if strategy == "zero1" else Mesh(dp_shard=count)
        return forecast_memory(make_run(strategy=strategy, mesh=mesh)).reserved

    sizes = [needed(count) for count in (2, 4, 8, 64, 512)]
    assert sizes == sorted(sizes, reverse=True)


def test_each_stage_of_zero_takes_less_than_the_one_before():
    def needed(strategy):
        mesh = Mesh(dp_replicate=8) if strategy in ("ddp", "zero1") else Mesh(dp_shard=8)
        return forecast_memory(make_run(strategy=strategy, mesh=mesh)).allocated

    sizes = [needed(strategy) for strategy in ("ddp", "zero1", "zero2", "zero3")]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(("axis", "degrees"), [("tp", (1, 2, 4, 8)), ("cp", (1, 2, 4))])
def test_sharding_a_model_or_its_sequences_saves_memory(axis, degrees):
    sizes = [forecast_memory(make_run(length=32_768, mesh=Mesh(**{axis: each}))).reserved for each in degrees]
    assert sizes == sorted(sizes, reverse=True)


def test_memory_grows_with_micro_batch_and_length():
    sizes = [forecast_memory(make_run(micro_batch=size)).reserved for size in (1, 2, 4, 8, 16)]
    lengths = [forecast_memory(make_run(length=length)).reserved for length in (512, 2048, 8192, 32_768)]
    assert sizes == sorted(sizes)
    assert lengths == sorted(lengths)
    assert lengths[-1] > 1.5 * lengths[0]


def test_the_table_of_the_zero_paper_is_reproduced_exactly():
    # Rajbhandari et al. 2020, figure 1: 7.5 billion parameters, 64 ranks, 2 + 2 + 12 bytes each.
    shape = ModelShape("mpt", 1, 1, 1, 1, 1, 1, 1, tied=True)
    per_parameter = {}
    for strategy, mesh in (
        ("ddp", Mesh(dp_replicate=64)),
        ("zero1", Mesh(dp_replicate=64)),
        ("zero2", Mesh(dp_shard=64)),
        ("zero3", Mesh(dp_shard=64)),
    ):
        run = make_run(strategy=strategy, mesh=mesh, traits=DEEPSPEED).with_(shape=shape)
        (rank,) = ranks(shape, 1, "1f1b")
        held = states(run, rank)
        total = held.weights.amount + held.gradients.amount + held.optimizer.amount
        per_parameter[strategy] = total / count(run, rank).all
    gigabytes = {strategy: 7.5 * size for strategy, size in per_parameter.items()}
    assert gigabytes["ddp"] == pytest.approx(120)
    assert round(gigabytes["zero1"], 1) == 31.4
    assert round(gigabytes["zero2"], 1) == 16.6
    assert round(gigabytes["zero3"], 3) == 1.875


def test_bytes_per_parameter_of_each_precision_and_optimizer():
    counted = parameters(NAMED["llama3-8b"])

    def bytes_of(**settings):
        run = make_run(grad_accum_steps=2, **settings)
        (rank,) = ranks(run.shape, 1, "1f1b")
        held = states(run, rank)
        return (held.weights.amount + held.gradients.amount + held.optimizer.amount) / counted

    assert bytes_of() == 18  # fp32 master weight, bf16 compute copy, fp32 gradient, two fp32 moments
    assert bytes_of(strategy="fsdp", mesh=Mesh(dp_shard=8)) == 16 / 8
    assert bytes_of(precision="bf16-true") == 8
    assert bytes_of(precision="32-true") == 16
    assert bytes_of(optimizer="adamw8bit") == pytest.approx(12.03, abs=0.01)
    assert bytes_of(optimizer="sgd") == 14
    assert bytes_of(optimizer="lion") == 14
    assert bytes_of(strategy="zero1", mesh=Mesh(dp_replicate=8)) == 4 + 2 + 4 + 8 / 8


def test_one_micro_batch_on_one_device_keeps_gradients_in_bf16():
    one = plan("model.shape=llama3.2-1b", "hardware.gpu=h200", "train.global_batch=4", "train.micro_batch=4")
    two = plan("model.shape=llama3.2-1b", "hardware.gpu=h200", "train.global_batch=8", "train.micro_batch=4")
    step = {one.choice.run.grad_accum_steps: one, two.choice.run.grad_accum_steps: two}
    gradients = {
        grad_accum_steps: each.choice.memory.worst.moments[-1].tree.find("gradients")
        for grad_accum_steps, each in step.items()
    }
    assert gradients[1] is not None
    assert gradients[2] is not None
    assert gradients[1].amount * 2 == gradients[2].amount


def test_logits_are_the_peak_of_a_plain_loss_and_not_of_a_chunked_one():
    plain = forecast_memory(make_run("llama3.2-1b", micro_batch=8, loss="plain"))
    chunked = forecast_memory(make_run("llama3.2-1b", micro_batch=8, loss="chunked"))
    assert plain.worst.peak.name == "loss"
    head = plain.worst.peak.tree.find("head")
    assert head is not None
    assert head.amount > plain.allocated / 4
    assert chunked.allocated < plain.allocated * 0.8


def test_adapters_need_less_memory_and_quantized_weights_a_quarter():
    targets = ("q_proj", "v_proj")
    lora = make_run("llama2-7b", adapter=Adapter(8, targets), trained=FROZEN, precision="bf16-true")
    qlora = lora.with_(adapter=Adapter(8, targets, "nf4"))
    whole = make_run("llama2-7b", precision="bf16-true")
    sizes = [forecast_memory(run).allocated for run in (qlora, lora, whole)]
    assert sizes == sorted(sizes)
    assert (sizes[1] - sizes[0]) / GIB == pytest.approx(6.476 * (2 - 0.5625) / 1.0737, rel=0.05)


def test_fp8_matmuls_of_a_frozen_base_save_what_bf16_ones_do():
    """The adapter's inputs in bf16, and none in fp8."""
    lora = {"adapter": Adapter(8, ("q_proj", "v_proj")), "trained": FROZEN}
    one, other = (forecast_memory(make_run(precision=kind, **lora)).allocated for kind in ("fp8", "bf16-mixed"))
    assert one == other


def test_the_loss_on_a_gpu_is_the_same_whether_blocks_are_compiled_or_not():
    compiled, eager = (head(make_run("gpt2", length=8192, compiled=kind)).peak for kind in (True, False))
    assert compiled == eager
    assert head(make_run("gpt2", length=8192, gpu="cpu")).peak != compiled  # without the kernel


def test_a_vocabulary_that_tensor_cores_cannot_read_needs_a_padded_copy_of_the_head():
    run = make_run("gpt2", "h200", length=8192)
    aligned = run.with_(shape=replace(run.shape, vocab=50304))
    assert head(run).peak.amount - head(aligned).peak.amount == 50304 * 768 * 2
    for other in ({"precision": "32-true"}, {"gpu": GPUS["cpu"]}):
        assert head(run.with_(**other)).peak.amount <= head(aligned.with_(**other)).peak.amount


def test_eager_attention_saves_its_scores():
    scores = 32 * 32 * 8192 * 8192  # layers × heads × pairs of tokens
    for compiled, each in ((False, 4 + 2), (True, 2 + 2)):
        flash, eager = (
            forecast_memory(make_run(length=8192, attention=kind, compiled=compiled)).worst.moments[0].tree.amount
            for kind in ("fused", "scores")
        )
        # The softmax in fp32 and its copy in 16 bits; compiled, what one matmul computes and the other reads.
        # And the gradients of one block's, beside fewer other tensors.
        assert 0.99 * each < (eager - flash) / scores < 1.1 * each


def test_the_first_pipeline_stage_holds_the_activations_of_the_most_micro_batches():
    memory = forecast_memory(make_run(mesh=Mesh(pp=4), grad_accum_steps=16, strategy="ddp", length=8192))
    kept = []
    for pipeline_rank in memory.pipeline_ranks:
        found = pipeline_rank.moments[-4].tree.find("activations")
        assert found is not None
        kept.append(found.amount)
    assert kept[0] > kept[1] > kept[2] > kept[3]


def test_offloading_moves_state_to_the_host():
    common = {"strategy": "fsdp", "mesh": Mesh(dp_shard=8), "grad_accum_steps": 2}
    here, optimizer, everything = (
        forecast_memory(make_run(offload=offload, **common)) for offload in ("none", "optimizer", "cpu")
    )
    assert everything.allocated < optimizer.allocated < here.allocated
    assert here.host.amount < optimizer.host.amount < everything.host.amount


def test_offloaded_inputs_of_blocks_are_in_host_memory_except_for_two():
    full, offload = (
        forecast_memory(make_run(devices=1, micro_batch=4, precision="bf16-true", recompute=kind, gpu="h200"))
        for kind in ("full", "offload")
    )
    each = 4 * 2048 * 4096 * 2  # 64 MiB
    at = [moment.name for moment in full.worst.moments].index("start of the backward pass")
    on_device = [memory.worst.moments[at].tree.amount for memory in (full, offload)]
    assert on_device[0] - on_device[1] == 30 * each
    assert offload.host.amount - full.host.amount == 32 * each
    # torch rounds pinned memory up to a power of two.
    wider = forecast_memory(make_run(micro_batch=3, precision="bf16-true", recompute="offload", gpu="h200"))
    assert wider.host.amount == offload.host.amount
    (first, *_, last) = forecast_memory(
        make_run("llama3-70b", mesh=Mesh(pp=4), grad_accum_steps=8, recompute="offload")
    ).pipeline_ranks
    assert first.moments[0].tree.find("block inputs") == last.moments[-4].tree.find("block inputs")


def test_a_run_that_exceeds_host_memory_does_not_fit():
    arguments = ("model.shape=llama3-8b", *EIGHT_H100, "parallel.strategy=fsdp", "parallel.offload=cpu")
    assert plan(*arguments, "hardware.host_gib=2000").fits
    assert not plan(*arguments, "hardware.host_gib=64").fits


def test_frozen_parts_have_no_gradients_and_no_state():
    arguments = ("model.shape=llama2-7b", "hardware.gpu=h200", "train.micro_batch=1", "data.max_length=512")
    whole, half = (
        reserved(*arguments),
        reserved(*arguments, 'model.freeze=["model.layers.[0-9].*", "model.layers.1?.*"]'),
    )
    assert whole - half > 0.5 * 6.5 * 12 * 0.9  # more than half of the blocks, twelve bytes per parameter


def test_nothing_is_reduced_before_the_last_block_if_the_head_is_reduced_with_the_embedding():
    tied = make_run("llama3.2-1b", strategy="fsdp", mesh=Mesh(dp_shard=8), compiled=False)

    def reducing(run: Run) -> float:
        tree = next(one.tree for one in forecast_memory(run).worst.moments if one.name == "start of the backward pass")
        found = tree.find("gradients being reduced")
        assert found is not None
        return found.amount

    block = sum(one.parameters for one in linears(tied.shape)) + 2 * tied.shape.hidden
    tied_head = tied.shape.vocab * tied.shape.hidden
    # The head's gradient, which waits for the embedding's, and the last block's, in bf16.
    assert reducing(tied) == pytest.approx(2 * tied_head + 2 * block, rel=0.01)
    # Block inputs alone are less than the reduce-scatter input of a block, so that the block before it is the peak.
    inputs = tied.tokens * tied.shape.hidden * tied.residual_bytes
    assert reducing(replace(tied, recompute="full")) == pytest.approx(2 * tied_head + 6 * block - inputs, rel=0.01)


def test_what_is_trained_beside_adapters_has_gradients_and_optimizer_state():
    settings = ("model.shape=qwen2.5-3b", "hardware.gpu=h200", "train.micro_batch=2", "train.global_batch=2")
    lora = (*settings, "data.max_length=2048", "adapter.kind=lora", "train.recompute=none")
    tied = 151_936 * 2048 / 2**30

    def terms(*more: str) -> dict[str, float]:
        found = plan(*lora, *more).as_dict()["memory"]["terms"]
        return {name: leaves(term) for name, term in found.items()}

    without, also = terms(), terms("adapter.train_also=['*embed_tokens*']")
    # An fp32 weight beside its copy in 16 bits, and two moments.
    assert also["weights"] - without["weights"] == pytest.approx(4 * tied, rel=0.01)
    assert also["optimizer state"] - without["optimizer state"] == pytest.approx(8 * tied, rel=0.01)
    # Its gradient is the head's, in fp32 and then in 16 bits, when the logits are gone.
    assert 4 * tied < also["head"] - without["head"] < 6 * tied
