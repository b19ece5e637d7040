"""docs/performance.md; its table of optimizations, and its small models and attention, are in files of their own."""

from typing import Any

from benchmarks.figures.optimizations import optimizations
from benchmarks.figures.results import SPEED, Line, all_three, both, case, count, result, speed
from benchmarks.figures.small_models import attention, small_models

PLAIN = "compiled plain loss"
FP8_HEAD = "fp8_head_h200/speed"


def performance() -> list[Line]:
    return [
        *comparison(),
        *other_jobs(),
        *optimizations(),
        *head_and_loss(),
        *small_models(),
        *attention(),
        *numerics(),
        *loop_overhead(),
    ]


def comparison() -> list[Line]:
    return [
        (
            "| **shoal**, default settings | **{}** | {}% | {} | **{}** | {}% | {} |",
            all_three("1b-ours-4", "1b-ours-8"),
        ),
        ("cuDNN attention | {} | {}% | {} | {} | {}% | {} |", all_three("1b-hand-4", "1b-hand-8")),
        ("| LitGPT's loop | {} | {}% | {} | {} | {}% | {} |", all_three("1b-litgpt-4", "1b-litgpt-8")),
        (
            "| HF Trainer + Liger | {} | {}% | {} | {} | {}% | {} |",
            all_three("1b-hf-trainer-liger-4", "1b-hf-trainer-liger-8"),
        ),
        ("| HF Trainer | {} | {}% | {} | | | |", all_three("1b-hf-trainer-4")),
        (
            "`train.precision: fp8` | **{}** | {}% | {} | **{}** | {}% | {} |",
            all_three("1b-ours-fp8-4", "1b-ours-fp8-8"),
        ),
        ("float8, tensorwise | | | | {} | {}% | {} |", all_three("1b-hand-fp8-8")),
        (
            "fp8 is {} times as fast as bf16 at micro-batch 4 and {} times at micro-batch 8. With "
            "`train.fp8_head: true` "
            "it is {} times: {} tokens/s in {} GiB, where bf16 had {} and fp8 without it {} in the same call",
            [
                relative("1b-ours-fp8-4", "1b-ours-4"),
                relative("1b-ours-fp8-8", "1b-ours-8"),
                relative("1b-ours-fp8-head-8", "1b-ours-8", FP8_HEAD),
                *both("1b-ours-fp8-head-8", FP8_HEAD),
                speed("1b-ours-8", FP8_HEAD),
                speed("1b-ours-fp8-8", FP8_HEAD),
            ],
        ),
        (
            "{} × bf16 at micro-batch 8, {} × at 4",
            [relative("1b-ours-fp8-8", "1b-ours-8"), relative("1b-ours-fp8-4", "1b-ours-4")],
        ),
    ]


def relative(new: str, old: str, folder: str = SPEED) -> str:
    return f"{case(folder, new)['tokens_per_second'] / case(folder, old)['tokens_per_second']:.2f}"


def other_jobs() -> list[Line]:
    packed = result("benchmarks/gpu/speed_h200/speed.json")["packed_relative_to_padded"]
    packing = [case(SPEED, f"packing-{name}") for name in ("packed", "padded", "padded-32")]

    def other(name: str) -> list[str]:
        return [*all_three(name), f"{case(SPEED, name)['reserved_gib']:.1f}"]

    return [
        ("`recompute: {every: 2}` | **{}** | {}% | {} | {} |", other("8b-ours-small")),
        ("`bf16-true`, `recompute: cheap` | **{}** | {}% | {} | {} |", other("8b-ours-large")),
        ("8-bit AdamW, activation checkpointing | {} | {}% | {} | {} |", other("8b-hf-trainer-liger")),
        ("without communication | **{}** | {}% | {} | {} |", other("rank-ours")),
        (
            "packed, 8 sequences | **{}** | | {} | {} |",
            [count(packing[0]["tokens_per_second"])]
            + [f"{packing[0][f'{kind}_gib']:.1f}" for kind in ("allocated", "reserved")],
        ),
        (
            "8 sequences (32 sequences) | {} ({}) | | {} ({}) | {} ({}) |",
            [count(one["tokens_per_second"]) for one in packing[1:]]
            + [f"{one[f'{kind}_gib']:.1f}" for kind in ("allocated", "reserved") for one in packing[1:]],
        ),
        (
            "give {} times the loss tokens per second of padded ones at 8 sequences, and {} times at 32",
            [f"{packed[name]:.1f}" for name in ("packing-padded", "packing-padded-32")],
        ),
    ]


def head_and_loss() -> list[Line]:
    head: dict[tuple[str, float], Any] = {
        (one["shape"], one["loss_tokens"]): one for one in result("benchmarks/gpu/head_h200/head.json")["losses"]
    }

    def milliseconds(shape: str, share: float, *names: str) -> list[str]:
        return [f"{head[shape, share][name]['milliseconds']:.1f}" for name in names]

    return [
        ("| GPT-2, 32 × 1024 | all | {} | {} | | {} |", milliseconds("gpt2", 1.0, "unpadded", "padded", PLAIN)),
        (
            "| | 30% | {} | {} | {} | {} |",
            milliseconds("gpt2", 0.3, "unpadded", "padded", "padded, skipping", PLAIN),
        ),
        ("| Llama 3.2 1B, 4 × 4096 | all | {} | | | {} |", milliseconds("llama3.2-1b", 1.0, "unpadded", PLAIN)),
        (
            "| | 30% | {} | | {} (nothing to pad) | {} |",
            milliseconds("llama3.2-1b", 0.3, "unpadded", "unpadded, skipping", PLAIN),
        ),
    ]


def numerics() -> list[Line]:
    def difference(name: str, digits: tuple[int, int], path: str = SPEED) -> list[str]:
        found = result(f"benchmarks/gpu/{path}.json")["difference_from_fp32"][name]
        return [f"{found['mean']:.{digits[0]}f}", f"{found['maximum']:.{digits[1]}f}"]

    return [
        ("| HF Trainer, `bf16=True` | {} | {} |", difference("numerics-hf-trainer", (5, 4))),
        ("| shoal, `bf16-mixed` | {} | {} |", difference("numerics-ours", (5, 4))),
        ("| shoal, `fp8` | {} | {} |", difference("numerics-ours-fp8", (5, 4))),
        (
            "numerics.json)) | {} | {} |",
            difference("numerics-ours-fp8-head", (5, 4), "fp8_head_h200/numerics"),
        ),
        ("| shoal, `32-true` | {} | {} |", difference("numerics-ours-fp32", (7, 7))),
    ]


def loop_overhead() -> list[Line]:
    loop = result("benchmarks/loop/two_shared_cores.json")
    return [
        (
            "{} ms of CPU time per step with a line of metrics every ten steps, {} ms with one every step",
            [f"{loop[f'log every {every}']['overhead_milliseconds_median']:.1f}" for every in (10, 1)],
        ),
    ]
