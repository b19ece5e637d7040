"""docs/performance.md: what each optimization gave, what was considered, and the time of a step by kernel."""

from typing import Any

from benchmarks.figures.results import SPEED, Line, case, count, json_lines, kernel_time, percent, result

FOLDER = "benchmarks/gpu/ideas_h200"
BEFORE, DEFAULT, IN_PLACE = (f"{FOLDER}/kernels_{name}_4.txt" for name in ("before", "default", "grad_in_place"))
LOSS_KERNEL = f"{FOLDER}/kernels_loss_kernel_4.txt"
TORCHAO, FP8 = f"{FOLDER}/kernels_torchao_8.txt", f"{FOLDER}/kernels_fp8_8.txt"
# Patterns of kernel names.
MATMULS, ATTENTION, SOFTMAX = r"^nvjet|cublasLt", r"cudnn", r"log_softmax__to_copy_arange|prepare_softmax_online"


def optimizations() -> list[Line]:
    return [*step_times(), *loss_kernels(), *larger_models(), *considered(), *time_by_kernel()]


def idea(machine: int, title: str) -> dict[str, Any]:
    found: list[dict[str, Any]] = result(f"{FOLDER}/ideas.json")["ideas"]
    return next(one for one in found if (one["machine"], one["title"]) == (machine, title))


def times(*ideas: tuple[int, str], digits: int = 1) -> list[str]:
    return [f"{idea(*one)['milliseconds']:.{digits}f}" for one in ideas]


def memory(*ideas: tuple[int, str]) -> list[str]:
    return [f"{idea(*one)['allocated_gib']:.1f}" for one in ideas]


def gaps(machine: int) -> dict[str, Any]:
    found: list[dict[str, Any]] = result(f"{FOLDER}/ideas.json")[
        "milliseconds a step in which no kernel ran, by the profiler"
    ]
    return next(one for one in found if one["machine"] == machine and one["title"].startswith("default 4"))


def step_times() -> list[Line]:
    packed, padded = (3, "packed instructions 8"), (2, "padded instructions 8, the last of three repetitions")
    packed_tokens, padded_tokens = (idea(*one)["loss_tokens_per_second"] for one in (packed, padded))
    transposing = kernel_time(TORCHAO, "^triton_red_fused__scaled_mm")
    return [
        (
            "baseline of this page: {} ms (8: {} ms)",
            times((1, "default 4")) + times((1, "cudnn 8"), digits=0),
        ),
        (
            "Kernels of the optimizer, clipping and casts: {} → {} ms | {} → {} (8: {} → {})",
            [
                f"{kernel_time(BEFORE, 'multi_tensor_apply|direct_copy_kernel'):.1f}",
                f"{kernel_time(DEFAULT, 'multi_tensor_apply|^_adamw'):.1f}",
                *times((1, "default 4"), (2, "default 4")),
                *times((1, "cudnn 8"), (2, "default 8"), digits=0),
            ],
        ),
        ("gaps between kernels {} → {} ms", [f"{gaps(machine)['gaps']:.1f}" for machine in (2, 3)]),
        ("This removes 16 × {} ms of one such kernel", [f"{transposing / 16:.1f}"]),
        (
            "8: {} (torchao) → {} → {};",
            times((1, "torchao float8 tensorwise 8")) + times((2, "fp8 8"), (3, "fp8 8"), digits=0),
        ),
        ("{} → {}: reverted", times((3, "fp8 8"), (4, "fp8 8"), digits=0)),
        (
            "{} → {} ms, {} → {} GiB (8: {} → {}, {} → {})",
            times((4, "default 4"), (4, "recompute cheap 4"))
            + memory((4, "default 4"), (4, "recompute cheap 4"))
            + times((4, "default 8"), (4, "recompute cheap 8"), digits=0)
            + memory((4, "default 8"), (4, "recompute cheap 8")),
        ),
        (
            "8: {} → {}, {} → {} GiB | no |",
            times((3, "default 8"), (3, "activation_memory_budget 0.8, 8"))
            + memory((3, "default 8"), (3, "activation_memory_budget 0.8, 8")),
        ),
        (
            "8 packed sequences of 2048 take {} ms, and give {}k loss tokens per second where batches padded to their "
            "longest sequence gave {}k",
            times(packed, digits=0) + [f"{one / 1e3:.1f}" for one in (packed_tokens, padded_tokens)],
        ),
        ("| {} × loss tokens |", [f"{packed_tokens / padded_tokens:.1f}"]),
    ]


def loss_kernels() -> list[Line]:
    found = {one["name"]: one for one in json_lines(f"{FOLDER}/microbenchmarks.jsonl")}
    rows, head = found["loss and gradient of 2048 rows"], found["head gradient, scaled and cast"]
    return [
        (
            "128,256 logits take {} ms where the compiled form took {}",
            [f"{rows[one]:.2f}" for one in ("kernel", "compiled")],
        ),
        (
            "the head's gradient is multiplied and cast in {} ms instead of {}",
            [f"{head[one]:.2f}" for one in ("kernel", "torch")],
        ),
        (
            "softmax and its gradient {} → {} ms per step at micro-batch 4, {} → {} GiB",
            [
                f"{kernel_time(DEFAULT, SOFTMAX):.1f}",
                f"{kernel_time(LOSS_KERNEL, '^_measure_row'):.1f}",
                *memory((4, "default 4"), (6, "default 4")),
            ],
        ),
        (
            "one kernel became two, {} → {} ms",
            [f"{kernel_time(one, SOFTMAX):.1f}" for one in (DEFAULT, IN_PLACE)],
        ),
    ]


def larger_models() -> list[Line]:
    title = "one rank of FSDP over 8 (llama3-8b, rows of 8192, micro-batch 2, recompute selective; shoal bench rank)"
    every_second, widening, expandable, _ = result(f"{FOLDER}/ideas.json")[title]
    one_unit = result(f"{FOLDER}/rank_embedding_and_head_one_unit.json")["rank-ours"]
    apart = case(SPEED, "rank-ours")

    def both(machine: int, title: str) -> list[str]:
        found = idea(machine, title)
        return [f"{found['tokens_per_second'] / 1e3:.1f}", f"{found['allocated_gib']:.1f}"]

    def pair(old: dict[str, Any], new: dict[str, Any], figure: str) -> list[str]:
        return [f"{one[figure]:.1f}" for one in (old, new)]

    def speeds(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
        return [f"{one['tokens_per_second'] / 1e3:.2f}" for one in (old, new)]

    return [
        (
            "with `{every: 2}` {}k tokens/s in {} GiB, with `full` {}k in {}, with `selective` {}k in {}; AdamW with "
            "`cheap` {}k in {} GiB, without {}k in {}",
            both(4, "8b 8-bit AdamW, every 2, also cheap")
            + both(3, "8b 8-bit AdamW, full")
            + both(4, "8b 8-bit AdamW, selective")
            + both(4, "8b AdamW, cheap")
            + both(2, "8b AdamW"),
        ),
        (
            "instead of every second matmul: {} → {} GiB, {}k → {}k tokens/s",
            pair(every_second, widening, "allocated_gib") + speeds(every_second, widening),
        ),
        (
            "allocates {} instead of {} GiB and reserves {} instead of {}; {}k → {}k tokens/s on two machines",
            pair(apart, one_unit, "allocated_gib") + pair(apart, one_unit, "reserved_gib") + speeds(one_unit, apart),
        ),
        (
            "the same rank reserves {} instead of {} GiB for the same {} allocated",
            [*pair(expandable, widening, "reserved_gib"), f"{expandable['allocated_gib']:.1f}"],
        ),
    ]


def considered() -> list[Line]:
    idle = gaps(5)
    burst = result(f"{FOLDER}/ideas.json")["one burst and in a row"]
    fused = {one["name"]: one for one in json_lines(f"{FOLDER}/microbenchmarks.jsonl")}
    # Forward and backward pass of 4 × 4096 tokens: "6 · 1,235,746,816 matrix parameters + …".
    matmul_flops = 6 * int(case(SPEED, "1b-ours-4")["mfu_formula"].split()[2].replace(",", "")) * 4 * 4096
    query = fused["query, key, value, 16384 tokens"]
    separate, together = (
        sum(query[f"{part}_{how}"] for part in ("forward", "inputs", "weights")) for how in ("separate", "fused")
    )
    return [
        (
            "the GPU is idle for {} of {} ms, in {} gaps",
            [f"{idle['gaps']:.1f}", f"{idle['of']:.0f}", count(idle["number"])],
        ),
        ("matrices saves {} of {} ms per block", [f"{separate - together:.2f}", f"{separate:.2f}"]),
        (
            "the same step takes {} ms in a short burst after a pause, and {} ms continuously",
            [
                f"{burst['milliseconds, two steps after a pause, by the profiler']:.0f}",
                f"{burst['milliseconds, the best round of four steps']:.0f}",
            ],
        ),
        (
            "Two thirds of a step are matmuls, at {} of the GPU's 989 TFLOP/s",
            [f"{matmul_flops / kernel_time(LOSS_KERNEL, MATMULS) / 1e9:.0f}"],
        ),
        (
            "at head size 64, where attention is {}% of the kernels' time",
            [percent(kernel_time(LOSS_KERNEL, ATTENTION) / kernel_time(LOSS_KERNEL, ""), 0)],
        ),
    ]


def time_by_kernel() -> list[Line]:
    parts = [
        kernel_time(LOSS_KERNEL, one)
        for one in (MATMULS, ATTENTION, "^triton_", "^_adamw", "^_measure_row|^_multiply", "multi_tensor_apply")
    ]
    whole = kernel_time(LOSS_KERNEL, "")
    float8 = [kernel_time(FP8, one) for one in ("", "^nvjet_sm90_q", ATTENTION, "^nvjet_sm90_t", "^_round_tile")]
    return [
        (
            "{} ms of kernels, of which matmuls {}, attention {}, elementwise kernels of the blocks {}, AdamW {}, "
            "softmax and its gradient {}, the gradient norm {}, the rest {}",
            [f"{one:.0f}" for one in (whole, *parts, whole - sum(parts))],
        ),
        (
            "of {} ms, {} are fp8 matmuls, {} attention, {} the head's matmuls and {} casts",
            [f"{one:.0f}" for one in float8],
        ),
    ]
