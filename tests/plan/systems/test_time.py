"""What takes time in other systems' code: adapters, dequantization, casts, hooks, and their collectives."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.catalogue.gpus import GPUS, LINKS, find_gpu
from shoal.catalogue.shapes import parameters
from shoal.config.mesh import Mesh
from shoal.plan.memory.activations import block_kept
from shoal.plan.memory.head import fused_rows
from shoal.plan.memory.states import optimizer_bytes
from shoal.plan.run.blocks import linears
from shoal.plan.run.layout import ranks_of
from shoal.plan.run.run import FROZEN, Adapter, Run
from shoal.plan.speed.adapters import dequantization_seconds
from shoal.plan.speed.attention import attention_seconds, score_kernels
from shoal.plan.speed.communication import Group, collective_seconds, ring_speed
from shoal.plan.speed.compute import block_compute, head_seconds
from shoal.plan.speed.eager import kernel_seconds
from shoal.plan.speed.forecast import forecast_speed
from shoal.plan.speed.host import host_seconds, launch_gaps
from shoal.plan.speed.kernels import contiguous_rate, matmul_seconds
from shoal.plan.speed.optimizer import optimizer_seconds
from shoal.plan.systems.modelled import SYSTEMS
from tests.plan.planning import make_run
from tests.plan.systems.test_other_systems import DEEPSPEED, HUGGING_FACE, LINEARS, MEGATRON, adapted, seconds, term

GPU = Path(__file__).parents[3] / "benchmarks" / "gpu"
MEASURED = GPU / "adapters_h200" / "kernels.json"


def test_an_adapter_in_the_dtype_of_its_layer_launches_fewer_kernels_and_casts_nothing():
    wide, narrow = adapted(micro_batch=1), adapted(micro_batch=1, traits=replace(HUGGING_FACE, narrow_adapters=True))
    for length, share in ((128, 0.75), (4096, 0.95)):  # bound by the host, and by the device
        assert seconds(narrow.with_(length=length)) < share * seconds(wide.with_(length=length))


def test_adapters_that_are_not_pefts_launch_fewer_kernels_still():
    short = {"micro_batch": 1, "length": 16, "precision": "bf16-true"}
    for system in ("torchtune", "litgpt", "unsloth"):
        own = adapted(traits=SYSTEMS[system], **short)
        peft = replace(SYSTEMS[system], peft=True, narrow_adapters=True, fused_adapters=False)
        assert seconds(own.with_(traits=peft)) - seconds(own) == pytest.approx(32 * 7 * 0.10e-3, rel=0.02)


def test_the_kernels_of_an_adapter_are_those_that_peft_launches():
    traits = replace(SYSTEMS["llama-factory"], reentrant=False)
    peft = adapted(traits=traits, precision="bf16-true")
    inputs, outputs = (32 * peft.tokens * sum(one.local_sizes(1)[at] for one in linears(peft.shape)) for at in (0, 1))
    fused = peft.with_(traits=replace(traits, fused_adapters=True))
    narrow = peft.with_(traits=replace(traits, narrow_adapters=True))
    plain, up = 0.8 * 2039e9, 330e9 / (132 * 1.98) * 108 * 1.41
    # Each input is cast to fp32, and by autocast back; and so is its gradient.
    casts = inputs * 2 * (1 / up + 6 / plain)
    less = [32 * block_compute(one).matmuls.both for one in (peft, narrow)]
    assert less[0] - less[1] == pytest.approx(casts, rel=0.01)
    # Scaled, added, the gradient scaled; that of the input added; or a sum that reads what it adds to, in either pass.
    others = (outputs * (4 + 6 + 4) + inputs * 6 - (outputs + inputs) * 2) / plain
    less = [32 * block_compute(one).matmuls.both for one in (narrow, fused)]
    assert less[0] - less[1] == pytest.approx(others, rel=0.01)
    # And the MLP's activation and product are one kernel.
    assert block_compute(fused).elementwise.both < block_compute(narrow).elementwise.both
    # 4-bit layers are copied before; autocast casts what they read, without PEFT.
    nf4, gptq = (one.with_(adapter=Adapter(16, LINEARS, kind)) for one, kind in ((peft, "nf4"), (narrow, "gptq")))
    assert block_compute(nf4).matmuls.forward > block_compute(narrow).matmuls.forward
    assert seconds(gptq) > seconds(narrow)


def test_fp32_adapters_of_an_h200_take_what_was_measured():
    # Microseconds of 16,384 tokens, by rank, inputs and outputs: benchmarks/gpu/adapters_h200/kernels.json.
    run = adapted(traits=replace(HUGGING_FACE, autocasts=False), precision="bf16-true", gpu="h200")
    measured = {(16384, 16, 4096): 129, (16384, 32, 4096): 171, (16384, 256, 4096): 771, (16384, 4096, 16): 147}
    for (rows, inner, columns), microseconds in measured.items():
        assert matmul_seconds(run, rows, inner, columns, itemsize=4) == pytest.approx(microseconds * 1e-6, rel=0.16)


def test_matrices_are_read_and_dequantized_as_fast_as_was_measured_on_an_h200():
    run = adapted("h200", quantize="nf4", precision="bf16-true")
    # `A x` and `B A x` of 16,384 tokens and 14,336 elements, rank 16; a matrix of 14,336 × 4,096.
    assert matmul_seconds(run, 16384, 14336, 16) == pytest.approx(108e-6, rel=0.05)
    assert matmul_seconds(run, 16384, 16, 14336) == pytest.approx(143e-6, rel=0.25)
    assert run.adapter is not None
    assert dequantization_seconds(run, run.adapter, 14336 * 4096)[0] == pytest.approx(71e-6, rel=0.05)


def test_memory_that_corrects_errors_itself_is_slower():
    shares = {name: contiguous_rate(adapted(name)) / find_gpu(name).memory_bandwidth for name in ("l4", "rtx4090")}
    assert shares == pytest.approx({"l4": 0.78, "rtx4090": 0.87})


@pytest.mark.parametrize("autocasts", [False, True])
@pytest.mark.parametrize("kind", ["all", "all, r 64", "q v", "all, dropout", "all, narrow", "all, nf4"])
def test_a_block_with_pefts_adapters_takes_what_was_measured_on_an_h200(kind: str, autocasts: bool):
    found = json.loads(MEASURED.read_text())["blocks"]
    (row,) = (one for one in found if one["case"] == kind and one["autocast"] == autocasts)
    targets = ("q_proj", "v_proj") if kind == "q v" else LINEARS
    quantize = "nf4" if "nf4" in kind else None
    adapter = Adapter(64 if "64" in kind else 16, targets, quantize, quantize is not None, dropout="dropout" in kind)
    traits = replace(SYSTEMS["llama-factory"], autocasts=autocasts, narrow_adapters="narrow" in kind)
    run = adapted("h200", traits=traits, precision="bf16-true", micro_batch=4)
    block = block_compute(run.with_(shape=make_run("llama3-8b").shape, adapter=adapter))
    assert 1e3 * (block.forward + block.backward) == pytest.approx(row["4x2048"]["both ms"], rel=0.045)


def test_offloaded_inputs_may_be_copied_while_nothing_runs():
    run = adapted(traits=SYSTEMS["unsloth"], recompute="offload", length=4096, precision="bf16-true")
    one = run.tokens * 4096 * 2 / (0.8 * run.gpu.host_link.bytes_per_second) * 32
    for exposed, copies in (("back", 1), ("both", 2)):
        waiting = run.with_(traits=replace(run.traits, exposes_offload=exposed))
        assert seconds(waiting) - seconds(run) == pytest.approx(copies * one, rel=0.01)


def test_a_quantized_layer_that_casts_nothing_takes_the_host_a_quarter_of_the_time():
    short = adapted(quantize="nf4", micro_batch=1, length=16, traits=replace(HUGGING_FACE, autocasts=False))
    assert short.adapter is not None
    upcast = short.with_(adapter=replace(short.adapter, upcasts=True))
    more = 32 * 7 * 0.30e-3
    assert seconds(upcast) - seconds(short) == pytest.approx(more, rel=0.02)


def test_one_adapter_on_joined_queries_keys_and_values_replaces_three():
    joined = Adapter(16, ("attn", *LINEARS[3:]))
    run = adapted(length=128)
    assert seconds(run.with_(adapter=Adapter(16, LINEARS[3:]))) < seconds(run.with_(adapter=joined)) < seconds(run)


def test_gptq_is_dequantized_by_many_kernels_once_for_each_forward_pass():
    traits = replace(HUGGING_FACE, narrow_adapters=True)
    gptq, nf4 = (adapted(quantize=kind, traits=traits, length=1024) for kind in ("gptq", "nf4"))
    # Four kernels that compute an address for each weight and one that does not; NF4 moves 2.6 bytes in either pass.
    weights = 32 * sum(one.parameters for one in linears(gptq.shape))
    # And a 4-bit layer's output is copied before the adapter's is added.
    copied = 32 * gptq.tokens * 4 * sum(one.local_sizes(1)[1] for one in linears(gptq.shape)) / (0.8 * 2039e9)
    each = 4 / (330e9 / (132 * 1.98) * 108 * 1.41) + 2 / (0.8 * 2039e9)
    more = weights * (each - 2 * 2.5625 / (108 * 2.1e12 / 132)) - copied
    assert seconds(gptq) - seconds(nf4) == pytest.approx(more, rel=0.03)
    again = [seconds(run.with_(recompute="full")) - seconds(run) for run in (gptq, nf4)]
    assert again[0] > again[1] + 0.8 * weights * each


def test_zero3_of_deepspeed_waits_for_its_hooks_if_sequences_are_short():
    def step(length: int, strategy: str) -> float:
        return seconds(
            make_run(
                "llama2-7b",
                "a100-80gb",
                strategy=strategy,
                mesh=Mesh(dp_shard=2),
                devices=2,
                micro_batch=1,
                recompute="full",
                length=length,
                traits=DEEPSPEED,
                compiled=False,
                loss="plain",
            )
        )

    assert step(256, "zero3") > 1.7 * step(256, "zero2")
    assert step(256, "zero3") == pytest.approx(step(512, "zero3"), rel=0.02)
    assert step(8192, "zero3") < 1.1 * step(8192, "zero2")


def launched(run: Run) -> float:
    """Seconds of a micro-batch, of which a device that waits for its host has the host's."""
    step = forecast_speed(run).step
    apart = {"optimizer", "optimizer launch overhead", "communication per step", "stragglers"}
    slowdown = step.find("slowdown by overlapped collectives")
    whole = sum(part.amount for part in step.parts if part.name not in apart)
    return whole - (slowdown.amount if slowdown else 0.0)


def test_fsdp_waits_for_its_hooks_if_sequences_are_short():
    def waiting(strategy: str, **settings: object) -> float:
        short = {"mesh": Mesh(dp_shard=8), "micro_batch": 1, "length": 32, "loss": "plain"}
        return launched(make_run("tinyllama-1.1b", strategy=strategy, **short, **settings))

    for compiled in (False, True):
        settings = {"compiled": compiled, "traits": replace(SYSTEMS["torchtitan"], cuda_graphs=False)}
        assert waiting("fsdp", **settings) - waiting("ddp", **settings) == pytest.approx(22 * 2.6e-3)
    # DeepSpeed's are counted for each module, and XLA has none.
    planned = replace(SYSTEMS["torchtitan"], planned_memory=True)
    assert waiting("fsdp", traits=planned) == pytest.approx(waiting("ddp", traits=planned))


def test_the_host_goes_on_while_the_device_waits_for_collectives():
    short = {"mesh": Mesh(tp=8), "micro_batch": 1, "length": 32, "compiled": False, "loss": "plain"}
    run = make_run("llama3-8b", traits=SYSTEMS["torchtitan"], strategy="ddp", **short)
    name = "kernel launch overhead"
    assert term(forecast_speed(run), "tensor parallel") > 0
    assert launched(run) == pytest.approx(host_seconds(run, 32))
    # Slow collectives hide what the host takes to launch the next kernels.
    slow = run.with_(link=LINKS["pcie-host"], length=4096)
    assert term(forecast_speed(slow), name) == launch_gaps(slow, 32) < 0.05 * host_seconds(slow, 32)
    # ZeRO-3's host waits for what it has fetched.
    fetched = make_run("llama3-8b", traits=DEEPSPEED, strategy="zero3", **{**short, "mesh": Mesh(dp_shard=8)})
    faster = fetched.with_(link=LINKS["nvlink5"])
    assert term(forecast_speed(fetched), name) == pytest.approx(term(forecast_speed(faster), name))


def test_a_device_is_idle_for_a_moment_between_eager_kernels():
    run = make_run("llama3-8b", "h200", length=8192, micro_batch=4, compiled=False, traits=SYSTEMS["huggingface"])
    run = run.with_(precision="bf16-true")
    name = "kernel launch overhead"
    # 1.2 microseconds for each of the 171 operations of a Llama's block.
    assert term(forecast_speed(run), name) == pytest.approx(32 * 171 * 1.2e-6)
    assert term(forecast_speed(run.with_(recompute="full")), name) == pytest.approx(32 * 171 * 4 / 3 * 1.2e-6)
    assert term(forecast_speed(adapted(traits=SYSTEMS["axolotl"])), name) > 0
    assert term(forecast_speed(run.with_(compiled=True, traits=SYSTEMS["torchtitan"])), name) == 0


def test_dtensors_dispatch_every_operation_in_python():
    short = {"mesh": Mesh(tp=8), "micro_batch": 1, "length": 32, "compiled": False, "loss": "plain", "strategy": "ddp"}
    plain, parallel = (
        make_run("llama3-8b", traits=replace(SYSTEMS["torchtitan"], dtensors=dtensors), **short)
        for dtensors in (False, True)
    )
    assert launched(parallel) == pytest.approx(4.6 * launched(plain))
    assert launched(parallel.with_(sequence_parallel=False)) == pytest.approx(3.5 * launched(plain))
    # A compiled block has no such operations, and neither has a rank that shares its layers with none.
    for settings in ({"compiled": True}, {"mesh": Mesh(dp_shard=8)}):
        found = {launched(run.with_(**settings)) for run in (plain, parallel)}
        assert len(found) == 1


def test_megatrons_modules_take_the_host_longer_than_compiled_blocks():
    run = make_run("gpt2", traits=MEGATRON, micro_batch=1, length=64, compiled=True)
    assert launched(run) == pytest.approx(12 * 3.5e-3 + 10e-3, rel=0.01)
    assert launched(run.with_(precision="fp8")) - launched(run) == pytest.approx(12 * 1.2e-3, rel=0.01)
    assert launched(run.with_(traits=replace(MEGATRON, software=2021))) == pytest.approx(12 * 2.2e-3)


def test_layers_that_return_fp32_move_more_bytes():
    plain = adapted(quantize="nf4", micro_batch=4, length=4096)
    assert plain.adapter is not None
    upcast = plain.with_(adapter=replace(plain.adapter, upcasts=True))
    assert 1.1 < seconds(upcast) / seconds(plain) < 1.5


def test_without_autocast_what_is_upcast_computes_in_fp32():
    # A T4 sustains 4.2 TFLOP/s of matmuls in fp32 and 34.5 in fp16, of which training reaches 0.93.
    plain = adapted("t4", quantize="nf4", length=2048, recompute="none")
    assert plain.adapter is not None
    run = plain.with_(adapter=replace(plain.adapter, upcasts=True))
    loop = run.with_(traits=replace(HUGGING_FACE, autocasts=False))
    assert loop.head_bytes == loop.attention_bytes == loop.adapter_bytes == 4
    assert run.head_bytes == run.attention_bytes == run.adapter_bytes == 2
    head = 4 * loop.tokens * 4096 * 32_000 / (0.93 * 4.2e12)
    assert term(forecast_speed(loop), "head and loss") == pytest.approx(head, rel=0.15)
    assert term(forecast_speed(loop), "attention") > 2 * term(forecast_speed(run), "attention")
    scores = [term(forecast_speed(one.with_(attention="scores")), "attention") for one in (loop, run)]
    assert scores[0] > 1.3 * scores[1]
    # Adapters in fp32 also without a quantized base.
    lora = adapted("t4", length=2048)
    assert seconds(lora.with_(traits=replace(HUGGING_FACE, autocasts=False))) > 1.1 * seconds(lora)


def test_autocast_computes_layer_norm_in_fp32_and_quantized_layers_with_it():
    gpt2 = make_run("gpt2", "a100-80gb", traits=HUGGING_FACE, compiled=False, loss="plain", trained=FROZEN)
    names = tuple(one.name for one in linears(gpt2.shape))
    run = gpt2.with_(adapter=Adapter(16, names, "nf4"))
    assert run.layer_bytes == run.residual_bytes == 4
    assert run.with_(traits=replace(HUGGING_FACE, autocasts=False)).layer_bytes == 2
    # An RMSNorm that is written out returns the dtype of its input.
    assert adapted(quantize="nf4").layer_bytes == 2


def test_blocks_that_are_checkpointed_around_fsdp_units_are_gathered_once_more():
    slow = {"strategy": "fsdp", "mesh": Mesh(dp_shard=2), "devices": 1}
    around = make_run("llama2-7b", "a100-80gb", recompute="full", traits=HUGGING_FACE, **slow)
    around = around.with_(network=LINKS["ethernet-10"])
    within = around.with_(traits=replace(HUGGING_FACE, checkpoints_units=False))
    name = "exposed FSDP collectives"
    more = term(forecast_speed(around), name) - term(forecast_speed(within), name)
    assert more > 0.2 * term(forecast_speed(within), name)
    saved = (run.with_(recompute="none") for run in (around, within))
    assert len({seconds(run) for run in saved}) == 1


def test_lists_of_shards_cost_more_the_more_ranks_there_are():
    def exposed(ranks: int, *, lists: bool) -> float:
        traits = replace(MEGATRON, lists_shards=lists)
        run = make_run("llama2-70b", "a100-80gb", strategy="zero3", mesh=Mesh(dp_shard=ranks), traits=traits)
        return term(forecast_speed(run), "exposed FSDP collectives")

    assert exposed(8, lists=True) > exposed(8, lists=False)
    # In each of 80 blocks two all-gathers and a reduce-scatter of five matrices, with 8 microseconds for every rank.
    assert exposed(1024, lists=True) - exposed(512, lists=True) > 80 * 3 * 5 * 512 * 8e-6


def test_the_protocol_of_a_collective_is_the_fastest_for_its_size():
    run, within, all_ranks = make_run(), Group(8, 1), Group(1024, 128)
    # LL: 3.6 microseconds, and 0.85 for each hop.
    assert collective_seconds(run, "all-gather", within, 8) == pytest.approx(3.6e-6 + 7 * 0.85e-6, rel=0.01)
    # Simple: 3.4 for each hop within a node, and 9.6 between nodes.
    size = 1e10
    large = collective_seconds(run, "all-gather", all_ranks, size)
    hops = 8.4e-6 + 896 * 3.4e-6 + 128 * 9.6e-6
    assert large == pytest.approx(hops + 1023 / 1024 * size / ring_speed(run, all_ranks), rel=0.001)


def test_a_host_steps_weights_in_16_bits_in_half_the_time():
    settings = {"strategy": "fsdp", "mesh": Mesh(dp_shard=8), "offload": "cpu", "traits": SYSTEMS["torchtune"]}
    wide, narrow = (make_run("llama2-7b", precision=one, **settings) for one in ("bf16-mixed", "bf16-true"))
    name = "CPU optimizer step"
    assert term(forecast_speed(narrow), name) == pytest.approx(term(forecast_speed(wide), name) / 2, rel=0.01)


def score_traffic(run: Run) -> tuple[float, float]:
    """Bytes that the kernels between the matmuls of attention move per score, forward and backward."""
    ahead, back = score_kernels(run)
    return sum(one.moved for one in ahead), sum(one.moved for one in back)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_kernels_on_scores_take_what_was_measured(dtype):
    """Each chain of kernels of an eager block, with what an H200 took for each of them."""
    found = json.loads((GPU / "scores_h200" / "kernels.json").read_text())["kernels"]
    precision = {"bfloat16": "bf16-true", "float16": "16-mixed", "float32": "32-true"}[dtype]
    for keys in (384, 1024, 4096):
        times = {one["kernel"]: one["ps"] for one in found if one["dtype"] == dtype and one["keys"] == keys}
        names = ["scale", "padding mask", "softmax", "dropout"], ["dropout backward", "softmax backward", "scale"]
        settings = {"attention": "scores", "compiled": False, "attention_dropout": True, "precision": precision}
        run = make_run("bert-base", "h200", length=keys, traits=DEEPSPEED, **settings)
        for kernels, chain in zip(score_kernels(run), names, strict=True):
            measured = sum(times[name] for name in chain)
            assert kernel_seconds(run, kernels, 1.0) * 1e12 == pytest.approx(measured, rel=0.17), (keys, chain)


def test_materialized_scores_are_moved_by_every_kernel_in_the_dtype_that_it_computes_in():
    eager: dict[str, object] = {"attention": "scores", "compiled": False, "attention_dropout": True}
    bert = make_run("bert-base", length=384, micro_batch=96, **eager)
    # Scale, mask, softmax, which is slower than its bytes, and dropout with its mask and random numbers; backward the
    # mask has no kernel, and softmax reads two tensors, after a product of the two.
    assert score_traffic(replace(bert, precision="bf16-true")) == (4 + 4 + 7 + 5 + 2, 4 + 6 + 6 + 5)
    # Autocast casts scores to fp32 before the softmax, and what dropout leaves back to 16 bits.
    autocast = replace(bert, precision="bf16-mixed", traits=HUGGING_FACE)
    assert score_traffic(autocast) == (2 * 4 + 8 + 2 * 6 + 9 + 2, 4 + 12 + 12 + 2 * 6 + 9)
    # With 16-bit weights there is no autocast, and Megatron's softmax is one kernel with scale and mask.
    assert score_traffic(replace(bert, precision="16-mixed", traits=DEEPSPEED)) == (22, 21)
    assert score_traffic(replace(bert, precision="16-mixed", traits=MEGATRON)) == (4 + 5 + 2, 6 + 5)
    # Llama's code asks for a softmax in fp32, whose kernel reads fp16; of bf16 there is a copy first.
    llama = make_run("llama3-8b", **{**eager, "attention_dropout": False}, precision="bf16-true", traits=DEEPSPEED)
    llama = replace(llama, length=1024)
    half = replace(llama, traits=replace(DEEPSPEED, half=True))
    assert score_traffic(half) == score_traffic(replace(llama, precision="16-mixed")) == (8 + 7 + 6, 4 + 10 + 12 + 6)
    assert score_traffic(llama) == (8 + 6 + 8 + 6, 4 + 12 + 6 + 12 + 6)
    assert score_traffic(replace(llama, length=4096)) == (8 + 6 + 12 + 6, 4 + 12 + 6 + 12 + 6)
    # The matmuls of scores have a short inner dimension.
    short = attention_seconds(replace(bert, precision="bf16-true"))
    flops = 4 * bert.tokens * bert.length * bert.shape.query_width / (bert.peak * 0.75)
    assert short.forward > 2.5 * flops


def test_early_libraries_multiplied_heads_that_are_not_aligned_without_tensor_cores():
    def scores(head_size: int, software: int) -> float:
        run = make_run("llama2-7b", "a100-80gb", traits=replace(MEGATRON, software=software), attention="scores")
        both = attention_seconds(run.with_(shape=replace(run.shape, heads=32, kv_heads=32, head_size=head_size)))
        return both.forward + both.backward

    assert scores(108, 2022) > 4 * scores(112, 2022)
    assert scores(104, 2022) < scores(112, 2022)
    assert scores(108, 2023) < scores(112, 2023)
    assert scores(108, 0) < scores(112, 0)


def test_reentrant_checkpointing_recomputes_the_last_matmul_too():
    run = make_run("llama3-8b", recompute="full", compiled=False, traits=replace(HUGGING_FACE, reentrant=True))
    early = run.with_(traits=HUGGING_FACE)
    again = [block_compute(one).recomputed for one in (run, early)]
    forward = block_compute(run).forward
    assert again[0] == pytest.approx(forward)
    # The others stop before it, and before its sum with the residual stream.
    down = linears(run.shape)[-1]
    least = 2 * run.tokens * down.inputs * down.outputs / run.peak
    assert again[0] - again[1] > least
    assert SYSTEMS["megatron"].reentrant
    assert not SYSTEMS["shoal"].reentrant


def test_attention_does_not_reach_beyond_a_packed_document():
    packed = make_run("llama2-7b", "a100-80gb", length=4096, traits=MEGATRON)
    apart, short = packed.with_(document_length=256), packed.with_(length=256)
    assert attention_seconds(apart).forward == pytest.approx(16 * attention_seconds(short).forward)
    assert attention_seconds(apart).forward < attention_seconds(packed).forward / 8


def test_the_backward_pass_of_attention_takes_longer_than_its_matmuls_say():
    found = attention_seconds(make_run("llama3-8b", "h200", length=8192))
    assert found.backward == pytest.approx(2.75 * found.forward)


def test_a_gelu_that_is_written_out_is_several_kernels():
    run = make_run("gpt2", "h200", length=1024, micro_batch=16, compiled=False, precision="bf16-true")
    mixed, fused = (run.with_(precision="bf16-mixed"), run.with_(traits=replace(run.traits, fused_activation=True)))
    inner = run.tokens * run.shape.ffn / run.gpu.memory_bandwidth
    written = block_compute(run).elementwise.forward - block_compute(fused).elementwise.forward
    assert inner * 36 < written < 1.5 * inner * 36
    # Autocast computes the power in fp32, and what follows.
    assert block_compute(mixed).elementwise.forward > 1.6 * block_compute(run).elementwise.forward


def test_flash_attention_2_is_as_fast_with_earlier_libraries():
    run = make_run("llama3-8b", "b200", traits=replace(SYSTEMS["torchtitan"], flash2=True))
    earlier = run.with_(traits=replace(run.traits, software=2025))
    assert attention_seconds(earlier) == attention_seconds(run)
    newer, before = (one.with_(traits=replace(one.traits, flash2=False)) for one in (run, earlier))
    assert attention_seconds(newer).both == pytest.approx(0.9 * attention_seconds(before).both)


def test_flash_attention_2_is_no_faster_on_blackwell_than_its_instructions():
    run = make_run("llama3-8b", "b200", micro_batch=1, length=16384, traits=replace(HUGGING_FACE, flash2=True))
    work = 3.5 * 4 * 16384 * (16384 / 2) * run.shape.query_width
    assert work / attention_seconds(run).both == pytest.approx(333e12, rel=0.03)
    hopper, ours = run.with_(gpu=make_run("llama3-8b", "h200").gpu), run.with_(traits=HUGGING_FACE)
    assert attention_seconds(hopper).both < 1.3 * attention_seconds(run).both
    assert attention_seconds(ours).both < 0.4 * attention_seconds(run).both
    consumer = make_run("llama3-8b", "rtx5090", micro_batch=1, length=16384)  # which has no other kernel
    flash2 = consumer.with_(traits=replace(consumer.traits, flash2=True))
    assert attention_seconds(consumer) == attention_seconds(flash2)


def test_fp8_matmuls_of_weights_in_16_bits_leave_the_step_as_short_as_without():
    run = make_run("llama3-8b", "h100-80gb", traits=SYSTEMS["litgpt"], compiled=True, precision="fp8")
    narrow, plain = run.with_(traits=replace(run.traits, narrow_weights=True)), run.with_(precision="bf16-true")
    steps = [term(forecast_speed(one), "optimizer") for one in (run, narrow, plain)]
    assert steps[1] == steps[2] < 0.45 * steps[0]
    states = [optimizer_bytes(one, ranks_of(one)[0]) for one in (run, narrow, plain)]
    assert states[1] == states[2] == states[0] / 2
    assert block_compute(narrow).matmuls == block_compute(run).matmuls


def test_encoders_of_transformers_do_not_cast_their_logits():
    run = make_run("bert-base", "h200", traits=HUGGING_FACE, compiled=False, loss="plain", precision="16-mixed")
    narrow = run.with_(traits=replace(HUGGING_FACE, narrow_loss=True))
    assert head_seconds(run) == head_seconds(narrow)
    other = run.with_(traits=replace(HUGGING_FACE, peft=False))
    assert head_seconds(other).both > head_seconds(run).both


def test_pytorchs_own_kernels_do_not_reach_a_b200s_bandwidth():
    eager = make_run("llama3-8b", "b200", traits=HUGGING_FACE, compiled=False, loss="plain", precision="bf16-true")
    hopper = eager.with_(gpu=make_run("llama3-8b", "h200").gpu)
    for run, faster in ((eager, 148 / 132), (eager.with_(compiled=True), 7700 / 4800)):
        before = block_compute(run.with_(gpu=hopper.gpu)).elementwise.both
        assert before / block_compute(run).elementwise.both == pytest.approx(faster, rel=0.01)
    foreach = [one.with_(traits=replace(HUGGING_FACE, foreach_step=True)) for one in (hopper, eager)]
    steps = [optimizer_seconds(one, 1e9) for one in foreach]
    assert steps[0] / steps[1] == pytest.approx(148 / 132, rel=0.01)


def test_ligers_loss_reads_and_casts_the_head_for_every_part_of_the_tokens():
    run = make_run("llama3-8b", "h200", micro_batch=4, length=1024, loss="fused", traits=HUGGING_FACE)
    assert fused_rows(run) == 128  # logits as large as the hidden states: 4,096 tokens in 32 parts
    weight, rate = run.shape.vocab * run.shape.hidden, 0.8 * run.gpu.memory_bandwidth
    once = head_seconds(run.with_(traits=replace(HUGGING_FACE, fused_rows=4096)))
    assert head_seconds(run).forward - once.forward > 32 * weight * 6 / rate
    # Under adapters neither copy of a frozen head is kept, and there is no gradient to add to.
    frozen = run.with_(adapter=Adapter(16, ("q_proj",)), trained=FROZEN, traits=replace(HUGGING_FACE, wide_base=True))
    narrow = frozen.with_(traits=HUGGING_FACE)
    more = head_seconds(frozen).both - head_seconds(narrow).both
    assert more == pytest.approx(2 * 32 * weight * 6 / rate, rel=0.01)
    summed = run.with_(traits=replace(HUGGING_FACE, sums_head_gradient=True))
    assert head_seconds(summed).backward - head_seconds(run).backward > 32 * weight * 12 / run.gpu.memory_bandwidth


def test_eager_kernels_stream_their_bytes_or_compute_an_address_for_each_element():
    run = make_run("llama3-8b", "h200", traits=HUGGING_FACE, compiled=False, loss="plain", precision="bf16-true")
    fused = run.with_(traits=replace(HUGGING_FACE, unfused_norms=False))
    elements, memory = 2 * run.tokens * run.shape.hidden, run.gpu.memory_bandwidth
    # Of an RMSNorm that is written out, three kernels forward and five backward are not vectorized: 330e9 elements a
    # second on an H200. The others move 18 and 68 bytes per element at 0.8 of the bandwidth.
    less = [block_compute(one).elementwise for one in (run, fused)]
    forward = elements * (3 / 330e9 + 18 / (0.8 * memory) - 4 / (0.64 * memory))
    backward = elements * (5 / 330e9 + 68 / (0.8 * memory) - 8 / (0.64 * memory))
    assert less[0].forward - less[1].forward == pytest.approx(forward, rel=0.02)
    assert less[0].backward - less[1].backward == pytest.approx(backward, rel=0.02)
    # An A6000's multiprocessors keep up with its memory: every kernel moves its bytes.
    card = [block_compute(one.with_(gpu=GPUS["a6000"])).elementwise for one in (run, fused)]
    streamed = elements * ((18 + 18) / 0.9 - 4 / 0.76) / 768e9
    assert card[0].forward - card[1].forward == pytest.approx(streamed, rel=0.02)
    # A compute unit of AMD's issues for half as many lanes: 403e9 elements a second on an MI300X.
    amd = [block_compute(one.with_(gpu=GPUS["mi300x"])).elementwise for one in (run, fused)]
    slower = elements * (3 / 403e9 + 18 / (0.8 * 5.3e12) - 4 / (0.64 * 5.3e12))
    assert amd[0].forward - amd[1].forward == pytest.approx(slower, rel=0.02)


def test_matmuls_are_faster_where_power_limits_them_and_other_kernels_draw_less():
    def faster(gpu: str, shape: str, **settings: bool) -> float:
        run = make_run(shape, gpu, traits=SYSTEMS["autocast"], **settings)
        sizes = [(one.inputs, one.outputs) for one in linears(run.shape)]
        shapes = [
            each
            for inputs, outputs in sizes
            for each in ((run.tokens, inputs, outputs), (run.tokens, outputs, inputs), (inputs, run.tokens, outputs))
        ]
        return sum(matmul_seconds(run, *each) for each in shapes) / block_compute(run).matmuls.both

    assert faster("h200", "smollm2-135m", compiled=False) == pytest.approx(1.16, rel=0.01)
    assert 1.03 < faster("h200", "smollm2-135m", compiled=True) < 1.13
    for compiled in (False, True):
        assert faster("h200", "llama3-70b", compiled=compiled) < (1.01 if compiled else 1.08)  # matmuls take most of it
        assert faster("a100-80gb", "smollm2-135m", compiled=compiled) == pytest.approx(1)


def test_a_loss_of_16_bit_logits_is_computed_in_16_bits_under_autocast_too():
    run = make_run("gpt2", "h200", traits=SYSTEMS["autocast"], compiled=False, loss="plain", precision="bf16-mixed")
    logits = run.tokens * 50257
    for precision, bytes_less in (("bf16-mixed", 29 - 12.1), ("bf16-true", None)):
        wide = run.with_(precision=precision)
        narrow = wide.with_(traits=replace(wide.traits, narrow_loss=True))
        less = head_seconds(wide).both - head_seconds(narrow).both
        if bytes_less is None:  # nor are logits cast, and their gradient begins as zeros of 16 bits
            assert less == pytest.approx(logits * ((29 + 4 + 6 - 12.1 - 2) / (0.8 * 4.8e12) + 1 / 330e9), rel=0.02)
        else:
            assert less == pytest.approx(logits * bytes_less / (0.8 * 4.8e12), rel=0.02)


def test_the_trainer_waits_for_the_loss_and_its_host_prepares_the_step_meanwhile():
    run = make_run("llama3-8b", "h200", traits=HUGGING_FACE, compiled=False, loss="plain", precision="bf16-true")
    own_loop = run.with_(traits=replace(HUGGING_FACE, waits_for_loss=False))
    assert seconds(run) - seconds(own_loop) == pytest.approx(4e-3 + 32 * 9 * 0.02e-3, rel=0.01)
    # Adafactor launches its kernels tensor by tensor, while others run.
    factored = [forecast_speed(one.with_(optimizer="adafactor")) for one in (run, own_loop)]
    launched = 32 * 9 * 0.45e-3 - term(factored[0], "optimizer")
    waited = factored[0].step_seconds - factored[1].step_seconds
    assert waited == pytest.approx(4e-3 + 32 * 9 * 0.02e-3 + max(0.0, launched), rel=0.01)


def test_a_loss_scale_is_read_by_the_host_before_each_step():
    traits = replace(SYSTEMS["autocast"], foreach_step=True)
    run = make_run("gpt2", "t4", precision="16-mixed", traits=traits, compiled=False, loss="plain")
    assert term(forecast_speed(run), "optimizer launch overhead") == pytest.approx(4e-3 + 12 * 6 * 0.02e-3)
    # Neither in bf16, nor if the optimizer's kernel reads it.
    fused = run.with_(traits=replace(traits, foreach_step=False))
    for other in (fused, run.with_(precision="bf16-mixed", gpu=GPUS["l4"])):
        assert term(forecast_speed(other), "optimizer launch overhead") == 0


def test_composer_removes_padding_where_there_is_none():
    run = make_run("mpt-7b", "a100-80gb", traits=SYSTEMS["composer"], compiled=False)
    kept = run.with_(traits=replace(run.traits, unpads=False))
    # Copies of queries, keys and values in either pass, each of 192e9 elements a second, and zeros for the output.
    copied = run.tokens * 4096 * (3 / (330e9 * 108 * 1.41 / (132 * 1.98)) + 2 / (0.8 * 2039e9))
    more = block_compute(run).elementwise.both - block_compute(kept).elementwise.both
    assert more == pytest.approx(2 * copied, rel=0.02)


def test_accelerate_casts_logits_that_nobody_reads():
    run = make_run("llama3-8b", "h200", traits=HUGGING_FACE, compiled=False, loss="plain", precision="bf16-true")
    kept = run.with_(traits=replace(HUGGING_FACE, widens_outputs=False))
    more = run.tokens * run.shape.vocab / 330e9
    assert seconds(run) - seconds(kept) == pytest.approx(more, rel=0.02)


def test_opt_upcasts_its_softmax_in_fp16_and_saves_clamped_scores():
    fp16 = make_run("gpt2", "v100-32gb", precision="16-mixed", attention="scores", compiled=False, traits=DEEPSPEED)
    opt = fp16.with_(shape=replace(fp16.shape, model_type="opt"))
    assert opt.shape.model_type == "opt"
    assert score_traffic(opt) > score_traffic(fp16)
    scores = opt.tokens * opt.shape.heads * opt.length
    saved = [block_kept(one).find("attention scores") for one in (opt, fp16)]
    assert [one.amount for one in saved if one] == [8 * scores, 2 * scores]  # in fp32, its copy, and what was clamped


def test_a_gelu_by_its_definition_is_five_kernels():
    run = make_run("bert-large", "v100-16gb", length=512, micro_batch=8, compiled=False, precision="bf16-true")
    written = run.with_(traits=replace(run.traits, erf_gelu=True))
    moved = run.tokens * run.shape.ffn / (run.gpu.memory_bandwidth * 0.8)
    more = block_compute(written).elementwise.forward - block_compute(run).elementwise.forward
    assert more == pytest.approx(18 * moved)
    assert block_compute(written.with_(compiled=True)) == block_compute(run.with_(compiled=True))


def test_a_loss_scale_is_divided_out_in_a_pass_over_the_gradients():
    foreach = replace(HUGGING_FACE, foreach_step=True)
    run = make_run("gpt2", "v100-32gb", compiled=False, precision="16-mixed", traits=foreach)
    # As if it were bf16, which has no loss scale.
    more = term(forecast_speed(run), "optimizer") - term(forecast_speed(run.with_(precision="bf16-mixed")), "optimizer")
    held = optimizer_bytes(run, ranks_of(run)[0]) / 8
    assert more == pytest.approx(held * 8 / (run.gpu.memory_bandwidth * 0.8))
    assert term(forecast_speed(run.with_(traits=SYSTEMS["shoal"])), "optimizer") == pytest.approx(
        term(forecast_speed(run.with_(traits=SYSTEMS["shoal"], precision="bf16-mixed")), "optimizer")
    )


def test_gradients_are_copied_to_the_buckets_of_ddp_and_back():
    settings = {"strategy": "ddp", "mesh": Mesh(dp_shard=8), "precision": "bf16-true", "compiled": False}
    run = make_run("tinyllama-1.1b", "a100-40gb", devices=8, reduce_bytes=2, traits=SYSTEMS["litgpt"], **settings)
    views = run.with_(traits=replace(run.traits, copies_to_buckets=False))
    passes = 4 * 2 * parameters(run.shape) / (run.gpu.memory_bandwidth * 0.8)
    assert seconds(run) - seconds(views) == pytest.approx(passes)


def test_ranks_that_take_turns_at_muon_orthogonalize_a_share_of_the_matrices_each():
    run = make_run("gpt2", "h100-80gb", strategy="ddp", mesh=Mesh(dp_shard=8), devices=8, optimizer="muon")
    turns = run.with_(traits=replace(run.traits, shares_muon=True))
    alone, shared = forecast_speed(run), forecast_speed(turns)
    plain = term(forecast_speed(run.with_(optimizer="sgd")), "optimizer")
    assert (term(shared, "optimizer") - plain) < (term(alone, "optimizer") - plain) / 6
    assert 0 < term(shared, "all-reduce of updates") < 2e-3


def test_kernels_for_the_activation_and_the_rotation_move_less():
    run = make_run("tinyllama-1.1b", "a100-80gb", compiled=False, precision="bf16-true", traits=SYSTEMS["huggingface"])
    shape, bandwidth = run.shape, run.gpu.memory_bandwidth

    def forward(**traits: bool) -> float:
        return block_compute(run.with_(traits=replace(run.traits, **traits))).elementwise.forward

    # One kernel reads both factors and writes their product, where PyTorch's two stream five tensors.
    less = forward() - forward(fused_activation=True)
    assert less == pytest.approx(run.tokens * shape.ffn * 2 * (5 / 0.8 - 3 / 0.6) / bandwidth)
    # One rotates queries and keys, where PyTorch has five, none of which is vectorized.
    turned = run.tokens * (shape.query_width + shape.kv_width) * 2
    assert forward() - forward(fused_rotary=True) > 3 * turned * 2 / (0.6 * bandwidth)


def test_what_the_compiler_does_not_fuse_with_the_loss_is_written_and_read():
    traits = replace(SYSTEMS["autocast"], loss_kernel="compiled")
    run = make_run("llama3.2-1b", "rtx4090", compiled=True, loss="plain", traits=traits)
    each = run.tokens * run.shape.vocab / (0.76 * run.gpu.memory_bandwidth)

    def more(**changed: object) -> float:
        return head_seconds(run.with_(traits=replace(traits, **changed))).both - head_seconds(run).both

    assert more(compiles_loss=True) == pytest.approx((8 - 10) * each)
    assert more(compiles_loss=True, returns_logits=True) == pytest.approx(0, abs=1e-9)
    assert more(software=2023) == pytest.approx(8 * each)
    # A kernel that overwrites the logits moves as much as ours.
    assert more(loss_kernel="always", loss_in_place=True) == pytest.approx((7 - 10) * each)
