"""docs/performance.md: small models, and attention kernels."""

from typing import Any

from benchmarks.figures.results import (
    SMALL,
    Line,
    both,
    count,
    gib,
    json_lines,
    kernel_time,
    percent,
    result,
    speed,
    thousands,
)

FOLDER = "benchmarks/gpu/small_h200"
KERNELS = f"{FOLDER}/kernels_smollm2.txt"


def small_models() -> list[Line]:
    settings = result(f"{FOLDER}/compiler_settings.json")
    gained = max(one for one in settings.values() if isinstance(one, float)) / settings["none"] - 1
    profile = result(f"{FOLDER}/profile_graphs.json")["profile"]
    rows = result("benchmarks/gpu/sweep_h200/sweep.json")["rows"]
    half = next(one["measured"] for one in rows if one["row"] == "gpt2 64x512 16-mixed")
    return [
        ("Of the compiler's settings none gave more than {}%", [percent(gained)]),
        ("compiler_settings.json), {}k tokens/s without any", [thousands(settings["none"])]),
        *(
            (f"{words} | {{}} | {{}} | {{}} | {{}} |", both(f"{name}-ours", SMALL) + both(f"{name}-plain", SMALL))
            for words, name in (
                ("| GPT-2, 32 × 1024, without dropout", "gpt2"),
                ("| GPT-2, 32 × 1024, dropout 0.1", "gpt2-dropout"),
                ("| Pythia-160M, 16 × 1024", "pythia-160m"),
            )
        ),
        (
            "| SmolLM2-135M, 32 × 512 | {} | {} | {}, with CUDA graphs {} | {} |",
            [
                *both("smollm2-135m-ours", SMALL),
                speed("smollm2-135m-plain", SMALL),
                speed("smollm2-135m-plain-graphs", SMALL),
                gib("smollm2-135m-plain", SMALL),
            ],
        ),
        ("`recompute: selective` | {} | {} | | |", both("mistral-7b-ours", SMALL)),
        ("| Llama-1.24B, 2 × 4096, `32-true` | {} | {} | | |", both("fp32-ours", SMALL)),
        ("With the graph, {}% of a step", [percent(profile["terms"]["idle"] / profile["step_seconds"])]),
        (
            "64 × 512, reaches {} tokens/s in {} GiB",
            [count(half["tokens_per_second"]), f"{half['allocated_gib']:.1f}"],
        ),
        *smollm2(),
        *packed(),
    ]


def packed() -> list[Line]:
    small, _, large, final = (one for one in result(f"{FOLDER}/packed.json").values() if isinstance(one, dict))
    gate, heads = json_lines(f"{FOLDER}/packed_operators.jsonl")[:2]
    return [
        ("{} → {} tokens/s in one call for SmolLM2-135M", [count(small["separate"]), count(small["packed"])]),
        ("8 × 4096, {} → {}", [count(large["separate"]), count(large["packed"])]),
        ("which came after these calls, gives {} tokens/s", [count(final["smollm2-135m-ours"])]),
        ("forward and backward {} → {} µs", [f"{heads['separate_us']:.0f}", f"{heads['packed_us']:.0f}"]),
        ("gate and up {} → {}", [f"{gate['separate_us']:.0f}", f"{gate['packed_us']:.0f}"]),
    ]


def smollm2() -> list[Line]:
    """The host's time, the kernels, and what was tried for them."""
    eager = [one for one in result(f"{FOLDER}/host.json") if not one["graphs"]]
    host = [one["host_ms"]["forward and backward"] for one in eager]
    device = next(one["kernel_ms"] for one in eager if "kernel_ms" in one)
    tried = json_lines(f"{FOLDER}/tried.jsonl")
    steps = {one["tried"]: one["step_ms"] for one in tried if "tried" in one}
    alone, fused, unmixed, tuned = steps.values()
    micro = [one["microbenchmark, microseconds"] for one in tried if "tried" not in one]
    cudnn, flash, flex = (
        next(one["us"] for one in micro if one.get("be") == name and one.get("mode", "gqa") == "gqa")
        for name in ("CUDNN_ATTENTION", "FLASH_ATTENTION", "flex")
    )
    kinds = [kernel_time(KERNELS, one) for one in ("^nvjet|cublasLt", "^triton_", "cudnn", "^_adamw", "^_measure_row")]
    return [
        (
            "the host needed {} to {} ms for the forward and backward pass, by machine, of a step that has {} ms of",
            [f"{one:.0f}" for one in (min(host), max(host), device)],
        ),
        (
            "With the graph it is bound by its {} ms of kernels: matmuls {}, elementwise kernels {}, attention {}, "
            "AdamW {}, softmax and its gradient {}",
            [f"{one:.1f}" for one in (kernel_time(KERNELS, ""), *kinds)],
        ),
        ("by concatenating their matrices ({} instead of {} ms", [f"{fused:.1f}", f"{alone:.1f}"]),
        ("coordinate descent tuning ({}% faster", [percent(1 - tuned / fused)]),
        ("no mixed-order reductions ({}% slower)", [percent(unmixed / fused - 1)]),
        (
            "flex or flash attention ({}% and {}% slower than cuDNN",
            [percent(one / cudnn - 1, 0) for one in (flex, flash)],
        ),
    ]


def attention() -> list[Line]:
    found = _cases("attention")
    flash4 = _cases("flash4")
    one_b, packed = "llama3.2-1b 4x4096", "llama3.2-1b 4x4096 packed"
    mistral, full, wide = "mistral-7b 1x8192 window", "llama3.2-1b 2x4096 fp32", "gemma 2x4096 head 256 window"

    def both_passes(shape: str, *cases: str, digits: int = 1) -> list[str]:
        return [f"{found[shape, one]['both_ms']:.{digits}f}" for one in cases]

    before, now = found[full, "what SDPA selects"], found[full, "efficient, repeated keys"]
    return [
        (
            "cuDNN {} ms, flex attention {} ({} with tiles of 128 × 64), flash attention 2 {}",
            both_passes(one_b, "cuDNN, causal", "flex", "flex, tiles of 128 × 64", "flash, causal", digits=2),
        ),
        (
            "`FLASH` backend takes {} ms where cuDNN takes {} in the same call, and {} for packed documents where our "
            "flex attention takes {}",
            [
                f"{flash4[one]['both_ms']:.2f}"
                for one in (
                    (one_b, "flex, FLASH backend"),
                    (one_b, "cuDNN, causal"),
                    (packed, "flex, FLASH backend"),
                    (packed, "shoal, compiled"),
                )
            ],
        ),
        (
            "window 4096, bf16 | {} to {} (dense mask) | {} (flex) | flash with a window {}; cuDNN without one {} |",
            both_passes(
                mistral, "cuDNN, dense mask", "efficient, dense mask", "flex", "flash operator", "cuDNN, causal"
            ),
        ),
        (
            "2 × 4096, fp32 | {}, and keeps {} GiB | {}, and keeps {} GiB | flex {} |",
            [
                *(figure for one in (before, now) for figure in (f"{one['both_ms']:.1f}", f"{one['kept_gib']:.2f}")),
                f"{found[full, 'flex']['both_ms']:.0f}",
            ],
        ),
        (
            "heads of 256, 2 × 4096, window, bf16 | {} (dense mask) | {} (flash) | flex {} |",
            both_passes(wide, "cuDNN, dense mask")
            + both_passes(wide, "flash operator", digits=2)
            + both_passes(wide, "flex"),
        ),
    ]


def _cases(name: str) -> dict[tuple[str, str], dict[str, Any]]:
    """By shape and kernel."""
    lines = json_lines(f"benchmarks/gpu/attention_h200/{name}.jsonl")
    return {(one["shape"], one["case"]): one for one in lines if "case" in one}
