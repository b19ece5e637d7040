"""A traced step, compared with hand-computed bytes and with the forecast."""

import pytest

from shoal.bench.forecast import compared_terms, forecast_memory
from shoal.bench.trace import EMBEDDING, LOSS, STEP
from shoal.plan.terms import GIB
from tests.bench.tracing import NEOX, SMALL, UNALIGNED, WIDE, relative_error, trace_run
from tests.harness import slow

FSDP = "parallel.strategy=fsdp"


@pytest.fixture(scope="module")
def sharded():
    return trace_run(8, SMALL, FSDP)


def test_one_rank_of_eight_holds_an_eighth_of_sixteen_bytes_per_parameter(sharded):
    _, traced = sharded
    terms, each = traced.moments[STEP].terms, traced.parameters / 8
    assert relative_error(terms["weights"], 4 * each) < 0.001
    assert relative_error(terms["optimizer state"], 8 * each) < 0.001
    assert relative_error(terms["gradients"], 4 * each) < 0.001
    # Plus a few small tensors, such as positions and step counters.
    assert relative_error(traced.moments[STEP].bytes, 16 * each) < 0.01


def test_between_steps_gradients_are_gone(sharded):
    _, traced = sharded
    assert "gradients" not in traced.moments[LOSS].terms


def test_gathered_weights_are_freed_after_their_block(sharded):
    _, traced = sharded
    gathered = [moment.terms.get("gathered weights", 0) for moment in traced.moments.values()]
    # At most the head and its all-gather buffer: never the embedding too, nor all blocks.
    assert max(gathered) == pytest.approx(2 * 2 * 32000 * 512, rel=0.01)
    assert traced.moments[STEP].terms.get("gathered weights", 0) == 0


def test_the_terms_of_a_moment_add_up_to_its_bytes(sharded):
    _, traced = sharded
    for moment in traced.moments.values():
        assert sum(moment.terms.values()) == moment.bytes


@pytest.mark.parametrize(("kind", "block_bytes"), [slow("lora", 2.0), ("qlora", 0.5 + 4 / 64)])
def test_a_frozen_base_has_its_bytes_and_nothing_else(kind, block_bytes):
    """No master weights, compute copies, gradients or optimizer state: those are the adapter's."""
    _, traced = trace_run(8, WIDE.replace("layers: 3", "layers: 1"), FSDP, f"adapter.kind={kind}", "adapter.rank=8")
    terms = traced.moments[STEP].terms
    inputs_and_outputs = 4 * 1024 + 2 * (1024 + 256) + 3 * (1024 + 4096)
    adapter, embedding = 8 * inputs_and_outputs, 16000 * 1024
    base = (traced.parameters - embedding) * block_bytes + embedding * 2
    assert relative_error(terms["weights"], (base + 4 * adapter) / 8) < 0.01
    assert relative_error(terms["gradients"], 4 * adapter / 8) < 0.01
    assert relative_error(terms["optimizer state"], 8 * adapter / 8) < 0.01


def check_forecast(choice, traced):
    """Within 2% for weights, gradients and optimizer state, 5% for activations at the loss, 8% for the peak."""
    stepping = compared_terms(traced.moments[STEP].terms)
    forecast = forecast_memory(choice, STEP)["terms"]
    for term in ("weights", "gradients", "optimizer state"):
        assert relative_error(stepping[term], forecast[term]) < 0.02, term
    kept, expected = traced.moments[LOSS].terms["activations"], forecast_memory(choice, LOSS)["terms"]["activations"]
    assert relative_error(kept / GIB, expected) < 0.05
    allocated = forecast_memory(choice, traced=True)["allocated_gib"]
    assert relative_error(traced.moments[traced.peak].bytes / GIB, allocated) < 0.08


def test_fsdp_is_forecast_correctly(sharded):
    check_forecast(*sharded)


@pytest.mark.parametrize(
    ("ranks", "shape", "overrides"),
    [
        (8, WIDE, ["parallel.strategy=ddp"]),
        (1, UNALIGNED, []),
        # Odd on both tensor-parallel ranks: the forecast is that of the largest, and the trace that of the first.
        pytest.param(
            8,
            UNALIGNED.replace("50257", "50262"),
            [FSDP, "parallel.tp=2", "train.global_batch=4"],
            marks=pytest.mark.slow,
        ),
        pytest.param(1, WIDE, ["adapter.kind=lora", "adapter.dora=true"], marks=pytest.mark.slow),
        pytest.param(8, WIDE, [FSDP, "train.recompute=full"], marks=pytest.mark.slow),
        pytest.param(1, SMALL, [], marks=pytest.mark.slow),
        pytest.param(1, SMALL, ["train.global_batch=2"], marks=pytest.mark.slow),
        pytest.param(8, SMALL, ["parallel.strategy=zero1", "train.global_batch=16"], marks=pytest.mark.slow),
        pytest.param(8, SMALL, ["parallel.strategy=zero2", "train.global_batch=16"], marks=pytest.mark.slow),
        pytest.param(8, NEOX, ["parallel.strategy=zero3"], marks=pytest.mark.slow),
        pytest.param(16, SMALL, [FSDP, "parallel.sharding=hybrid_shard"], marks=pytest.mark.slow),
        pytest.param(8, SMALL, [FSDP, "train.recompute=selective"], marks=pytest.mark.slow),
        pytest.param(
            8,
            SMALL.replace("layers: 2", "layers: 4"),
            [FSDP, "train.recompute={every: 2}"],
            marks=pytest.mark.slow,
        ),
        pytest.param(8, SMALL, [FSDP, "parallel.tp=2", "train.global_batch=4"], marks=pytest.mark.slow),
        pytest.param(8, SMALL, [FSDP, "train.precision=bf16-true"], marks=pytest.mark.slow),
        pytest.param(8, SMALL, [FSDP, "train.precision=16-mixed"], marks=pytest.mark.slow),
        pytest.param(8, SMALL, [FSDP, "train.optimizer.name=adamw8bit"], marks=pytest.mark.slow),
        pytest.param(8, SMALL, [FSDP, "train.optimizer.name=sgd"], marks=pytest.mark.slow),
    ],
)
def test_every_strategy_and_precision_is_forecast_correctly(ranks, shape, overrides):
    check_forecast(*trace_run(ranks, shape, *overrides))


@pytest.mark.slow
def test_full_activation_checkpointing_keeps_only_the_inputs_of_blocks():
    choice, traced = trace_run(8, SMALL.replace("layers: 2", "layers: 3"), FSDP, "train.recompute=full")
    run = choice.run
    each = run.tokens * run.shape.hidden * 4
    # Less than a third of an input more: the other saved tensors.
    assert 3 * each <= traced.moments[LOSS].terms["activations"] < (3 + 0.3) * each


@pytest.mark.slow
def test_8_bit_moments_are_two_bytes_per_parameter():
    _, traced = trace_run(8, SMALL, FSDP, "train.optimizer.name=adamw8bit")
    assert (
        relative_error(traced.moments[STEP].terms["optimizer state"], 2 * (1 + 4 / 256) * traced.parameters / 8) < 0.01
    )


@pytest.mark.slow
def test_context_parallelism_over_two_ranks_halves_the_activations():
    whole, half = (
        trace_run(8, SMALL, FSDP, *more)[1].moments[LOSS].terms["activations"]
        for more in ((), ("parallel.cp=2", "train.global_batch=4"))
    )
    assert 0.5 < half / whole < 0.65  # plus gathered keys and values, and the attention output in two parts


@pytest.mark.slow
def test_packed_sequences_have_an_attention_mask():
    plain, packed = (
        trace_run(8, WIDE, FSDP, "data.source=json", "data.path=x.json", f"data.pack={pack}")[1].moments[LOSS]
        for pack in ("false", "true")
    )
    assert packed.bytes - plain.bytes >= 2048 * 2048


@pytest.mark.slow
def test_a_cpu_needs_temporary_copies_that_a_gpu_does_not():
    on_gpu, on_cpu = (trace_run(8, SMALL, FSDP, f"hardware.gpu={name}")[1].moments for name in ("h100-80gb", "cpu"))
    assert on_cpu[STEP].bytes > 1.2 * on_gpu[STEP].bytes, "square roots of the second moments"
    # A chunk of the head gradient too, but not at the peak of the loss.
    assert on_cpu[LOSS].bytes >= on_gpu[LOSS].bytes


def test_the_embedding_gradient_is_reduced_separately_and_without_gathering_its_weight(sharded):
    _, traced = sharded
    terms, embedding = traced.moments[EMBEDDING].terms, 32000 * 512
    assert relative_error(terms["gradients being reduced"], embedding * (2 + 4)) < 0.01
    assert terms.get("gathered weights", 0) == 0
