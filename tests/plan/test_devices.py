"""What limits single kernels on consumer and workstation devices, compared with what was published of them."""

from dataclasses import replace

import pytest

from shoal.catalogue.efficiency import FAMILIES, efficiency
from shoal.catalogue.gpus import GPUS
from shoal.catalogue.shapes import parameters
from shoal.plan.run.run import FROZEN, Adapter, Run
from shoal.plan.speed.adapters import dequantization_seconds
from shoal.plan.speed.attention import attention_seconds
from shoal.plan.speed.cache import cached_rate
from shoal.plan.speed.compute import block_compute
from shoal.plan.speed.kernels import bandwidth, matmul_seconds, streamed_bandwidth
from shoal.plan.speed.optimizer import optimizer_seconds
from shoal.plan.systems.modelled import SYSTEMS
from tests.plan.planning import make_run

HUGGING_FACE = SYSTEMS["huggingface"]


def run_on(gpu: str, **settings: object) -> Run:
    return make_run(**{"gpu": gpu, "compiled": False, "traits": HUGGING_FACE, **settings})


def matmul_tflops(gpu: str, rows: int, inner: int, columns: int, precision: str) -> float:
    run = run_on(gpu, precision=precision)
    return 2 * rows * inner * columns / matmul_seconds(run, rows, inner, columns) / 1e12


@pytest.mark.parametrize(
    ("gpu", "precision", "sizes"),
    [
        # zzc0721/torch-performance-test-data, issues 66, 114, 131, 140, 145 and 171; relative to matrices of 8,192.
        ("rtx4060", "bf16-mixed", {1024: 27.9 / 30.7, 2048: 30.1 / 30.7}),
        ("rtx4060ti-16gb", "bf16-mixed", {1024: 41.4 / 47.5}),
        ("rtx3060", "bf16-mixed", {1024: 19.0 / 25.4, 2048: 23.7 / 25.4}),
        ("rtx3070", "bf16-mixed", {1024: 29.5 / 37.0, 2048: 35.5 / 37.0}),
        ("rtx3080", "bf16-mixed", {1024: 50.1 / 63.6, 2048: 58.9 / 63.6}),
        ("v100-16gb", "16-mixed", {1024: 57.3 / 93.4, 2048: 78.2 / 93.4}),
        ("v100-16gb", "32-true", {1024: 10.6 / 14.4, 2048: 12.7 / 14.4, 4096: 13.9 / 14.4}),
        # XiaoJianyu219/llm-infra-bench, 08-single-gpu-profiling: gemm_peak.log.
        ("rtx4090", "bf16-mixed", {1024: 120.5 / 146.9, 4096: 138.4 / 146.9}),
    ],
)
def test_square_matmuls_lose_as_much_of_their_speed_as_was_measured(gpu, precision, sizes):
    for size, share in sizes.items():
        relative = matmul_tflops(gpu, *[size] * 3, precision) / matmul_tflops(gpu, *[8192] * 3, precision)
        assert relative == pytest.approx(share, rel=0.13)


def test_fp32_matmuls_do_not_need_long_inner_dimensions_where_they_are_published():
    for gpu in ("v100-32gb", "t4", "rtx3090", "a100-80gb"):
        short, long = (matmul_tflops(gpu, 16384, inner, 4096, "32-true") for inner in (1024, 8192))
        assert short > 0.97 * long
    assert efficiency(GPUS["h200"]).wide_inner_half == 256
    assert efficiency(GPUS["cpu"]).wide_inner_half == 0


def test_kernels_whose_tensors_fit_the_cache_do_not_wait_for_memory():
    card, memory = GPUS["rtx4090"], 0.9 * 1008e9
    inside, beyond = cached_rate(card, 40e6, memory), cached_rate(card, 400e6, memory)
    assert inside > 2 * memory
    assert beyond == pytest.approx(memory, rel=0.02)
    assert cached_rate(card, 100e6, memory) > cached_rate(card, 150e6, memory) > memory
    # An A100's memory is as fast as its cache; a 3090 has a small one.
    for other in ("a100-80gb", "h200", "rtx3090"):
        assert cached_rate(GPUS[other], 40e6, memory) == memory
    for compiled, most in ((False, 4), (True, 3)):
        short, long = (
            block_compute(run_on("rtx4090", length=length, precision="bf16-true", compiled=compiled)).elementwise.both
            for length in (512, 16384)
        )
        assert 1.9 < long / short / 32 < most


def test_memory_without_error_correction_is_streamed_at_nine_tenths():
    assert streamed_bandwidth(run_on("rtx4090")) == 0.9 * 1008e9
    assert streamed_bandwidth(run_on("l4")) == 0.78 * 300e9
    assert streamed_bandwidth(run_on("h200")) == 0.8 * 4.8e12
    fused = {
        gpu: bandwidth(run_on(gpu)) / GPUS[gpu].memory_bandwidth for gpu in ("rtx5090", "a6000", "l40s", "v100-32gb")
    }
    assert fused == pytest.approx({"rtx5090": 0.76, "a6000": 0.76, "l40s": 0.64, "v100-32gb": 0.64})


def test_an_l40_reaches_an_l20s_speed_per_watt():
    reached = {name: FAMILIES[name].matmuls * GPUS[name].fp16 for name in ("l20", "l40")}
    assert reached["l40"] / 300 == pytest.approx(reached["l20"] / 275, rel=0.01)


def test_bitsandbytes_steps_eight_bit_states_by_their_elements():
    # 106 million elements of SmolLM2-135M in 3.56 ms on an H200: benchmarks/gpu/trainer_h200/kernels.jsonl.
    for gpu, rate in (("h200", 29.8e9), ("rtx3090", 15.4e9)):
        plain = replace(HUGGING_FACE, wide_embedding_state=False)
        run = run_on(gpu, optimizer="adamw8bit", precision="bf16-true", traits=plain, clips=False)
        assert optimizer_seconds(run, 1e9) == pytest.approx(1e9 / rate, rel=0.05)
        # Ours streams, and Hugging Face's Trainer keeps the embedding's state in fp32.
        assert optimizer_seconds(run.with_(traits=SYSTEMS["shoal"]), 1e9) < 0.4 * 1e9 / rate
        embedding = run.shape.vocab * run.shape.hidden / parameters(run.shape)
        wide = optimizer_seconds(run.with_(traits=HUGGING_FACE), 1e9)
        assert wide == pytest.approx((1 - embedding) * 1e9 / rate, rel=0.05)


def test_attention_in_fp32_needs_shared_memory_for_long_heads():
    def relative(gpu: str, heads: int) -> float:
        run = run_on(gpu, precision="32-true")
        run = run.with_(shape=replace(run.shape, heads=heads, kv_heads=heads, head_size=4096 // heads))
        return attention_seconds(run).both * GPUS[gpu].fp32 * (efficiency(run.gpu).fp32 or 0.825)

    assert relative("rtx4090", 32) / relative("h200", 32) == pytest.approx(0.72 / 0.31, rel=0.02)
    assert relative("rtx4090", 64) / relative("h200", 64) == pytest.approx(1.0, rel=0.02)


def test_dequantized_matrices_stay_in_the_cache_until_their_matmul_reads_them():
    adapter = Adapter(8, ("q_proj",), quantize="nf4")
    once = {
        gpu: dequantization_seconds(run_on(gpu, shape="llama3.2-1b", adapter=adapter, trained=FROZEN), adapter, 7e7)[0]
        for gpu in ("rtx4090", "rtx3090")
    }
    # As fast as a multiprocessor's share of an H200's, 2.1 TB/s; or as memory.
    moved = 7e7 * (0.5 + 4 / 64 + 2)
    assert once["rtx4090"] == pytest.approx(moved / 1.97e12, rel=0.04)
    assert once["rtx3090"] == pytest.approx(moved / (0.87 * 936e9), rel=0.01)
