"""Lines of README.md and docs/ with measured figures, and the committed results that these come from."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.pictures.forecast import gib as in_gib
from benchmarks.pictures.forecast import plan, plan_file

ROOT = Path(__file__).parents[1]
# Words with {} for each figure, and the figures.
Line = tuple[str, list[str]]


@cache
def result(path: str) -> Any:
    return json.loads((ROOT / path).read_text())


def case(folder: str, name: str) -> dict[str, Any]:
    """One case of benchmarks/gpu/speed.py."""
    found: dict[str, Any] = result(f"benchmarks/gpu/{folder}.json")["cases"][name]
    return found


def count(value: float) -> str:
    return f"{value:,.0f}"


def thousands(value: float) -> str:
    return f"{value / 1000:.0f}"


def percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f}"


def speed(name: str, folder: str = "speed_h200/speed") -> str:
    return count(case(folder, name)["tokens_per_second"])


def gib(name: str, folder: str = "speed_h200/speed") -> str:
    return f"{case(folder, name)['allocated_gib']:.1f}"


def mfu(name: str) -> str:
    return percent(case("speed_h200/speed", name)["mfu"])


def both(name: str, folder: str = "speed_h200/speed") -> list[str]:
    return [speed(name, folder), gib(name, folder)]


def all_three(*names: str) -> list[str]:
    return [one for name in names for one in (speed(name), mfu(name), gib(name))]


SMALL, ADAPTERS, EARLIER = "small_h200/speed", "adapters_h200/adapters", "adapters_h200/lora_and_hand_loop"


def unsloth(name: str) -> list[str]:
    found = result("benchmarks/gpu/adapters_h200/unsloth.json")[name]
    return [count(found["tok_s"]), f"{found['peak_gib']:.1f}"]


def small(*names: str) -> list[str]:
    return [thousands(case(SMALL, name)["tokens_per_second"]) for name in names]


def legal(*names: str) -> list[str]:
    return [percent(result("benchmarks/chess/legal.json")[name]["legal_share"]) for name in names]


def restart() -> str:
    return f"{result('benchmarks/checkpoints/two_shared_cores.json')['restart']['kill_to_training_seconds']:.1f}"


def readme() -> list[Line]:
    errors = result("benchmarks/plan/published/errors.json")
    held_out = [cell.strip() for cell in result("benchmarks/plan/published/held_out.json")["line"].split("|")[2:-1]]

    def medians(cells: list[str]) -> list[str]:
        return [cells[index].rstrip("%") for index in (1, 2, 4, 5)]

    return [
        (
            "on our own runs | memory **{}%** ({}%), speed **{}%** ({}%) | on systems that it models: "
            "memory {}% ({}%), speed {}% ({}%); on other published results, in view while its terms were "
            "corrected: {}% ({}%), {}% ({}%); on sources that were held out: {}% ({}%), {}% ({}%); ",
            [
                figure
                for group in ("our own runs", "systems that are modelled", "other sources")
                for figure in medians(errors[group])
            ]
            + medians(held_out),
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
    ]


def performance() -> list[Line]:
    speeds = result("benchmarks/gpu/speed_h200/speed.json")
    packed = speeds["packed_relative_to_padded"]
    head = {(one["shape"], one["loss_tokens"]): one for one in result("benchmarks/gpu/head_h200/head.json")["losses"]}
    loop = result("benchmarks/loop/two_shared_cores.json")

    def milliseconds(shape: str, share: float, *names: str) -> list[str]:
        return [f"{head[shape, share][name]['milliseconds']:.1f}" for name in names]

    def other(name: str) -> list[str]:
        return [*all_three(name), f"{case('speed_h200/speed', name)['reserved_gib']:.1f}"]

    def relative(new: str, old: str, folder: str = "speed_h200/speed") -> str:
        return f"{case(folder, new)['tokens_per_second'] / case(folder, old)['tokens_per_second']:.2f}"

    def difference(name: str, digits: tuple[int, int], path: str = "speed_h200/speed") -> list[str]:
        found = result(f"benchmarks/gpu/{path}.json")["difference_from_fp32"][name]
        return [f"{found['mean']:.{digits[0]}f}", f"{found['maximum']:.{digits[1]}f}"]

    packing = [case("speed_h200/speed", f"packing-{name}") for name in ("packed", "padded", "padded-32")]
    fp8_head = "fp8_head_h200/speed"
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
                relative("1b-ours-fp8-head-8", "1b-ours-8", fp8_head),
                *both("1b-ours-fp8-head-8", fp8_head),
                speed("1b-ours-8", fp8_head),
                speed("1b-ours-fp8-8", fp8_head),
            ],
        ),
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
        ("| GPT-2, 32 × 1024 | all | {} | {} | | {} |", milliseconds("gpt2", 1.0, "unpadded", "padded", PLAIN)),
        (
            "| | 30% | {} | {} | {} | {} |",
            milliseconds("gpt2", 0.3, "unpadded", "padded", "padded, skipping", PLAIN),
        ),
        ("| Llama 3.2 1B, 4 × 4096 | all | {} | | | {} |", milliseconds("llama3.2-1b", 1.0, "unpadded", PLAIN)),
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
        ("| HF Trainer, `bf16=True` | {} | {} |", difference("numerics-hf-trainer", (5, 4))),
        ("| shoal, `bf16-mixed` | {} | {} |", difference("numerics-ours", (5, 4))),
        ("| shoal, `fp8` | {} | {} |", difference("numerics-ours-fp8", (5, 4))),
        (
            "numerics.json)) | {} | {} |",
            difference("numerics-ours-fp8-head", (5, 4), "fp8_head_h200/numerics"),
        ),
        ("| shoal, `32-true` | {} | {} |", difference("numerics-ours-fp32", (7, 7))),
        (
            "{} ms of CPU time per step with a line of metrics every ten steps, {} ms with one every step",
            [f"{loop[f'log every {every}']['overhead_milliseconds_median']:.1f}" for every in (10, 1)],
        ),
    ]


PLAIN = "compiled plain loss"
ONE_H200 = "model.shape=llama3-8b hardware.gpu=h200 hardware.devices=1 data.max_length=2048"
ONE_H200 += " train.micro_batch=4 train.global_batch=4"
ONE_B = "model.shape=llama3.2-1b hardware.gpu=h200 hardware.devices=1 data.max_length=4096"
ONE_B += " train.micro_batch=4 train.global_batch=4"
LORA = f"{ONE_H200} adapter.kind=lora adapter.rank=8 adapter.targets=[q_proj,v_proj]"
ALL = f"{ONE_H200} adapter.kind=lora adapter.rank=16"
DOUBLE = "adapter.kind=qlora adapter.quantize=nf4-dq"


def forecast(settings: str) -> list[str]:
    """Tokens per second and GiB by today's plan."""
    choice = plan(settings).choice
    return [count(choice.speed.tokens_per_second_per_gpu), f"{in_gib(choice.memory.worst.allocated):.1f}"]


def finetune() -> list[Line]:
    others = {one["settings"]: one for one in result("benchmarks/gpu/adapters_h200/dora_and_fp8.json")["rows"]}
    stochastic = case("adapters_h200/full_8b", "8b-ours-stochastic")

    def bench(settings: str) -> list[str]:
        return [count(others[settings]["tokens_per_second"]), f"{others[settings]['allocated_gib']:.1f}"]

    def scores(name: str) -> list[str]:
        found = result(f"benchmarks/finetune/{name}.json")
        after = found["after"]
        return [f"{one:.2f}" for one in (found["before"]["score"], after["score"], after["stderr"])] + [
            f"{found['control']['score']:.2f}"
        ]

    def recipe(name: str) -> list[str]:
        choice = plan_file(f"recipes/{name}.yaml").choice
        memory = f"{in_gib(choice.memory.worst.allocated):.1f}"
        ranks = result("benchmarks/gpu/ranks_h200/ranks.json")
        measured = [f"{ranks[name]['rank']['allocated_gib']:.1f}"] if name in ranks else []
        return [memory, *measured, count(choice.speed.tokens_per_second_per_gpu)]

    return [
        (
            "trains with AdamW in {} GiB at {} tokens/s on an",
            [f"{stochastic['allocated_gib']:.1f}", count(stochastic["tokens_per_second"])],
        ),
        (
            # Two rows: the words of the second are in the table twice.
            "| LoRA r8 on q and v | {} | {} | {} | {} | | the same, `train.recompute: cheap` | {} | {} | {} | {} |",
            [
                *both("lora-ours", ADAPTERS),
                *forecast(LORA),
                *both("lora-ours-cheap", ADAPTERS),
                *forecast(f"{LORA} train.recompute=cheap"),
            ],
        ),
        (
            "| the same with `adapter.dora: true` | {} | {} | {} | {} |",
            bench("adapter.dora=true") + forecast(f"{LORA} adapter.dora=true"),
        ),
        (
            "| … and `train.recompute: full` | {} | {} | {} | {} |",
            bench("adapter.dora=true train.recompute=full")
            + forecast(f"{LORA} adapter.dora=true train.recompute=full"),
        ),
        (
            "`train.precision: fp8` | {} | {} | {} | {} |",
            bench("train.precision=fp8") + forecast(f"{LORA} train.precision=fp8"),
        ),
        (
            "| LoRA r16 on all linear layers | {} | {} | {} | {} | | the same, `train.recompute: "
            "cheap` | {} | {} | {} | {} |",
            [
                *both("lora-all-ours", ADAPTERS),
                *forecast(ALL),
                *both("lora-all-ours-cheap", ADAPTERS),
                *forecast(f"{ALL} train.recompute=cheap"),
            ],
        ),
        (
            "| QLoRA `nf4-dq` r8 on q and v | {} | {} | {} | {} |",
            both("qlora-ours", ADAPTERS) + forecast(f"{LORA} {DOUBLE}"),
        ),
        ("| Unsloth, the same | {} | {} |", unsloth("unsloth-nf4-r8qv-none")),
        (
            "r16 on all, `recompute: offload` | {} | {} | {} | {} |",
            both("qlora-all-ours", ADAPTERS) + forecast(f"{ALL} {DOUBLE} train.recompute=offload"),
        ),
        ("with its own offloading | {} | {} |", unsloth("unsloth-nf4-r16all-unsloth")),
        (
            "had {} tokens/s in {} GiB in an earlier call, in which our first row had {}",
            [*both("lora-hand", EARLIER), speed("lora-ours", EARLIER)],
        ),
        ("LoRA r8 on q and v, 4 × A100-40GB | {} | {} | {} |", recipe("llama2-7b-lora")),
        ("LoRA r8 on q and v, 8 × A100-80GB | {} | {} | {} |", recipe("llama2-70b-lora")),
        ("LoRA r16 on q and v, 64 × H100 | {} | {} | {} |", recipe("llama3.1-405b-lora")),
        ("chess games, 2 × A100-80GB | {} | {} | {} |", recipe("codellama-7b-chess")),
        ("Pythia 1B in full, 2 × L40 | {} | {} | {} |", recipe("pythia-1b")),
        ("offload to the host, 4 × RTX 4090 | {} | not run | {} |", recipe("llama2-7b-full")),
        ("reverse a list of words | {} | {} ± {} | {}, trained on shuffled answers |", scores("lora")),
        ("prefer the bare number | {} | {} ± {} | {}, trained on shuffled pairs |", scores("dpo")),
    ]


def numbers() -> list[Line]:
    found = result("benchmarks/adamw8bit/drift.json")
    lines: list[Line] = []
    for betas in ("(0.9, 0.95)", "(0.9, 0.999)"):
        for name, one in found[f"betas {betas}"].items():
            loss = f"{one['validation_loss']:.3f}"
            if name == "AdamW":
                lines.append((f"| {betas} | {name} | | | {{}} |", [loss]))
            else:
                errors = [percent(one["update_error"]), percent(one["weight_error"])]
                lines.append((f"| {betas} | {name} | {{}}% | {{}}% | {{}} |", [*errors, loss]))
    return lines


def encoders() -> list[Line]:
    found = result("examples/encoders/results.json")
    masked, classes = found["masked_lm"], found["classify"]
    return [
        ("writes {} docstrings", [count(found["texts"])]),
        ("600 steps ({} seconds of CPU time)", [str(masked["cpu_seconds"])]),
        ("of eight ({} seconds); {} labelled", [str(classes["cpu_seconds"]), str(found["test"])]),
        ("most frequent token | {}% |", [percent(masked["most_frequent_token"])]),
        (
            "the pretrained model | {}%, loss {} |",
            [percent(masked["eval_masked_accuracy"]), f"{masked['eval_loss']:.2f}"],
        ),
        (
            "| package, {} held-out docstrings | majority class | {}% |",
            [str(found["test"]), percent(classes["majority"])],
        ),
        ("naive Bayes on words | {}% |", [percent(classes["naive_bayes"])]),
        (
            "the fine-tuned model | {}%, macro-F1 {} |",
            [percent(classes["eval_accuracy"]), f"{classes['eval_macro_f1']:.3f}"],
        ),
    ]


def cells() -> list[Line]:
    found = result("examples/cells/results.json")
    genes = found["masked_genes"]
    types = {
        "| majority class": "majority_class",
        "| logistic regression on 50 principal components": "logistic_regression_on_50_components",
        "| logistic regression on the pretrained embedding": "probe_on_embedding",
        "| `recipes/cells-finetune.yaml`": "fine_tuned",
    }
    return [
        ("| the most frequent gene | {}% |", [percent(genes["most_frequent_gene"])]),
        ("| the most frequent gene of each rank | {}% |", [percent(genes["most_frequent_gene_of_the_rank"])]),
        ("| `recipes/cells-pretrain.yaml` | {}% |", [percent(genes["model"])]),
        ("{} cells train and {} are held out", [str(found["cells"][one]) for one in ("training", "held_out")]),
        *(
            (f"{words} | {{}}% | {{}} |", [percent(one["accuracy"]), f"{one['macro_f1']:.2f}"])
            for words, one in ((words, found["cell_types"][name]) for words, name in types.items())
        ),
        *_reading_cells(),
    ]


def _reading_cells() -> list[Line]:
    found = result("benchmarks/data/cells_speed.json")
    rows = {
        "| `prepare`, one process": found["uncompressed"]["prepare_1_process"],
        "| `prepare`, two workers": found["uncompressed"]["prepare_2_workers"],
        "| `prepare` of a gzip file, one process": found["gzip"]["prepare_1_process"],
        "| `prepare` of a gzip file, two workers": found["gzip"]["prepare_2_workers"],
    }
    return [
        (
            f"{words} | {{}} | {{}} | {{}} | {{}} |",
            [
                f"{one['cells_per_cpu_second']:,}",
                f"{one['cells_per_second']:,}",
                f"{one['times_loader']:.1f}",
                f"{one['cores_wanted']:.1f}",
            ],
        )
        for words, one in rows.items()
    ]


def single_cells() -> list[Line]:
    found = result("examples/cells/results.json")
    genes, types = found["masked_genes"], found["cell_types"]
    return [
        (
            "It ends at {}%, where the most frequent gene is right for {}%",
            [percent(genes["model"]), percent(genes["most_frequent_gene"])],
        ),
        (
            "It is right for {}% of the held-out cells. A logistic regression on principal components reaches {}%",
            [percent(types[name]["accuracy"]) for name in ("fine_tuned", "logistic_regression_on_50_components")],
        ),
    ]


def first_run() -> list[Line]:
    return [
        (
            "{}% of the moves of an untrained model are legal, {}% of a bigram table of the same "
            "games, and {}% of this",
            legal("untrained", "bigram table", "trained"),
        )
    ]


def python() -> list[Line]:
    found = result("benchmarks/loop/custom_two_shared_cores.json")
    more = found["rest_of_custom_milliseconds"] - found["rest_of_plain_milliseconds"]
    return [
        (
            "it took {} ms more per step: {}% of a step of {} ms",
            [f"{more:.2f}", percent(found["overhead"]), f"{found['step_milliseconds']:.0f}"],
        )
    ]


def packing() -> list[Line]:
    found = sorted(result("benchmarks/gpu/speed_h200/speed.json")["packed_relative_to_padded"].values())
    return [("on one GPU {} to {} times the loss tokens", [f"{one:.1f}" for one in found])]


PAGES: dict[str, Callable[[], list[Line]]] = {
    "README.md": readme,
    "docs/measured.md": measured,
    "docs/performance.md": performance,
    "docs/finetune.md": finetune,
    "docs/numbers.md": numbers,
    "docs/encoders.md": encoders,
    "docs/cells.md": cells,
    "docs/python.md": python,
    "docs/tutorials/first-run.md": first_run,
    "docs/tutorials/single-cells.md": single_cells,
    "docs/howto/packing.md": packing,
}
