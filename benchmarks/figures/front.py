"""README.md and docs/measured.md."""

import statistics

from benchmarks.figures.results import (
    ADAPTERS,
    EARLIER,
    Line,
    all_three,
    both,
    forecast,
    gib,
    legal,
    percent,
    restart,
    result,
    small,
    speed,
    unsloth,
)
from benchmarks.gpu.sweeps.forecast import Compared, compare

ONE_B = "model.shape=llama3.2-1b hardware.gpu=h200 hardware.devices=1 data.max_length=4096"
ONE_B += " train.micro_batch=4 train.global_batch=4"


def readme() -> list[Line]:
    errors = result("benchmarks/plan/published/errors.json")
    first = result("benchmarks/plan/published/first.json")
    described = first["the sixth held-out set"]["all"]
    asked = first["the eighth to the eleventh together"]["all"]

    def medians(cells: list[str]) -> list[str]:
        return [cells[index].rstrip("%") for index in (1, 2, 4, 5)]

    return [
        (
            "on our own runs | memory **{}%** ({}%), speed **{}%** ({}%) | on systems that it models: "
            "memory {}% ({}%), speed {}% ({}%); on published runs that it had not seen, with what is known of their "
            "code: {}% ({}%), {}% ({}%); by the name of their system and its options: {}% ({}%), {}% ({}%); ",
            [figure for group in ("our own runs", "systems that are modelled") for figure in medians(errors[group])]
            + medians(described)
            + medians(asked),
        ),
        (
            "| full training, Llama-1.24B shape, 4 × 4096 | **{}** tokens/s in {} GiB (fp8: {}) | "
            "hand-written loop {} in "
            "{}; LitGPT {} in {}; HF Trainer + Liger {} in {} |",
            [
                *both("1b-ours-4"),
                speed("1b-ours-fp8-4"),
                *both("1b-hand-4"),
                *both("1b-litgpt-4"),
                *both("1b-hf-trainer-liger-4"),
            ],
        ),
        (
            "**{}** tokens/s in {} GiB | hand-written loop with PEFT {} in {} |",
            [*both("lora-ours", ADAPTERS), *both("lora-hand", EARLIER)],
        ),
        (
            "**{}** tokens/s in {} GiB | Unsloth {} in {} |",
            [*both("qlora-ours", ADAPTERS), *unsloth("unsloth-nf4-r8qv-none")],
        ),
        (
            "| GPT-2 124M, 32 × 1024 | **{}k** tokens/s | transformers under `torch.compile` {}k |",
            small("gpt2-ours", "gpt2-plain"),
        ),
        ("two CPU cores | **{} s** |", [restart()]),
        (
            "two CPU cores | **{}%** | untrained {}%, bigram table {}% |",
            legal("trained", "untrained", "bigram table"),
        ),
    ]


def measured() -> list[Line]:
    checkpoints = result("benchmarks/checkpoints/two_shared_cores.json")
    difference = result("benchmarks/gpu/speed_h200/speed.json")["difference_from_fp32"]
    waiting = checkpoints["waiting"]
    return [
        (
            "accepts {}% from the untrained model, {}% from a bigram table of the same games and **{}%** from",
            legal("untrained", "bigram table", "trained"),
        ),
        (
            "| **shoal** | **{}** ({}% MFU) | {} | **{}** ({}% MFU) | {} |",
            all_three("1b-ours-4", "1b-ours-8"),
        ),
        ("| **shoal**, fp8 | **{}** | {} | **{}** | {} |", both("1b-ours-fp8-4") + both("1b-ours-fp8-8")),
        (
            "| a good hand-written loop (fp8: torchao) | {} | {} | {} ({}) | {} ({}) |",
            [*both("1b-hand-4"), speed("1b-hand-8"), speed("1b-hand-fp8-8"), gib("1b-hand-8"), gib("1b-hand-fp8-8")],
        ),
        ("| LitGPT | {} | {} | {} | {} |", both("1b-litgpt-4") + both("1b-litgpt-8")),
        (
            "| HF Trainer + Liger | {} | {} | {} | {} |",
            both("1b-hf-trainer-liger-4") + both("1b-hf-trainer-liger-8"),
        ),
        ("| HF Trainer | {} | {} | | |", both("1b-hf-trainer-4")),
        (
            "4 sequences of 2048: **{}** tokens/s in {} GiB (a hand-written loop with PEFT, in an "
            "earlier call: {} in {}, "
            "ours then {}); QLoRA: **{}** in {} (Unsloth: {} in {})",
            [
                *both("lora-ours", ADAPTERS),
                *both("lora-hand", EARLIER),
                speed("lora-ours", EARLIER),
                *both("qlora-ours", ADAPTERS),
                *unsloth("unsloth-nf4-r8qv-none"),
            ],
        ),
        (
            "two CPU cores in {} minutes: {} of {} held-out questions right before, {}% after",
            [
                f"{result('benchmarks/finetune/lora.json')['after']['training']['wall_seconds'] / 60:.0f}",
                f"{result('benchmarks/finetune/lora.json')['before']['score'] * 64:.0f}",
                str(result("benchmarks/finetune/lora.json")["before"]["examples"]),
                percent(result("benchmarks/finetune/lora.json")["after"]["score"], 0),
            ],
        ),
        (
            "GPT-2 (32 × 1024) **{}k** tokens/s ({}k), with dropout **{}k** ({}k); Pythia-160M (16 "
            "× 1024) **{}k** ({}k); "
            "SmolLM2-135M (32 × 512) **{}k** ({}k with CUDA graphs)",
            small("gpt2-ours", "gpt2-plain", "gpt2-dropout-ours", "gpt2-dropout-plain", "pythia-160m-ours")
            + small("pythia-160m-plain", "smollm2-135m-ours", "smollm2-135m-plain-graphs"),
        ),
        (
            "as close to fp32 as those of HF Trainer: {} and {} mean absolute difference",
            [f"{difference[name]['mean']:.5f}" for name in ("numerics-ours", "numerics-hf-trainer")],
        ),
        (
            "blocked for {}% of its time ({}% without the writer thread). A save reaches {}% of the throughput",
            [percent(waiting[name]["share_of_training"]) for name in ("async", "sync")]
            + [percent(checkpoints["writing"]["share"], 0)],
        ),
        ("All ranks train again {} s after", [restart()]),
        ("at micro-batch 4 it predicts {} GiB and {} tokens/s", forecast(ONE_B)[::-1]),
        *sweep(),
    ]


def sweep() -> list[Line]:
    """The errors of today's forecast, and those of the forecast at the time on runs that came after its rules."""
    rows = result("benchmarks/gpu/sweep_h200/sweep.json")["rows"]
    today = compare(rows)
    recorded = [one for one in compare(rows, recorded=True) if one.held_out]

    def errors(some: list[Compared], figure: str) -> list[str]:
        sizes = [abs(one.error) for one in some if one.figure == figure]
        return [percent(statistics.median(sizes)), percent(max(sizes))]

    return [
        (
            "On {} runs on one H200, 124M to 8B parameters in five precisions, reserved memory is off by {}% at the "
            "median and {}% at worst, tokens per second by {}% and {}%",
            [
                str(len({one.row for one in today})),
                *errors(today, "reserved_gib"),
                *errors(today, "tokens_per_second"),
            ],
        ),
        (
            "on the {} of them that were measured after the rules of their forecast had been set, at that time by "
            "{}% and {}%, and by {}% and {}%",
            [
                str(len({one.row for one in recorded})),
                *errors(recorded, "reserved_gib"),
                *errors(recorded, "tokens_per_second"),
            ],
        ),
    ]
