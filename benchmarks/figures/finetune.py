"""docs/finetune.md."""

from decimal import Decimal

from benchmarks.figures.recipes import control, finetuned
from benchmarks.figures.results import ADAPTERS, EARLIER, Line, both, case, count, forecast, result, speed, unsloth
from benchmarks.pictures.forecast import gib as in_gib
from benchmarks.pictures.forecast import plan_file

ONE_H200 = "model.shape=llama3-8b hardware.gpu=h200 hardware.devices=1 data.max_length=2048"
ONE_H200 += " train.micro_batch=4 train.global_batch=4"
LORA = f"{ONE_H200} adapter.kind=lora adapter.rank=8 adapter.targets=[q_proj,v_proj]"
ALL = f"{ONE_H200} adapter.kind=lora adapter.rank=16"
DOUBLE = "adapter.kind=qlora adapter.quantize=nf4-dq"


def finetune() -> list[Line]:
    return [*merges(), *adapters(), *several_gpus(), *learnt()]


def merges() -> list[Line]:
    """What merging costs, and the smallest difference of a wrong merge."""
    rows = {
        "| LoRA r16 on all linear layers": "lora",
        "| the same, learning rate 3e-3": "strong",
        "| LoRA r8 on q and v, learning rate 2e-4": "qv",
        "| DoRA r8": "dora",
        "| QLoRA `nf4` r16": "qlora",
    }

    def figures(name: str) -> list[str]:
        found = result("benchmarks/finetune/merge.json")["adapters"][name]
        right = {dtype: found[dtype]["right"] for dtype in ("bf16", "fp16", "fp32")}
        effect = right["fp32"][0]["adapter_effect"]
        cost = [max(one["relative_difference"] for one in right[dtype]) for dtype in right]
        wrong = min(rows[0]["relative_difference"] for kind, rows in found["fp32"].items() if kind != "right")
        return [format(Decimal(f"{100 * value:.2g}"), "f") for value in (effect, *cost, wrong)]

    return [(words + " | {}% | {}% | {}% | {}% | {}% |", figures(name)) for words, name in rows.items()]


def adapters() -> list[Line]:
    """On one H200, beside the forecast."""
    others = {one["settings"]: one for one in result("benchmarks/gpu/adapters_h200/dora_and_fp8.json")["rows"]}
    stochastic = case("adapters_h200/full_8b", "8b-ours-stochastic")

    def bench(settings: str) -> list[str]:
        return [count(others[settings]["tokens_per_second"]), f"{others[settings]['allocated_gib']:.1f}"]

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
    ]


def several_gpus() -> list[Line]:
    """Recipes: the forecast, and the memory of one rank on one GPU."""

    def recipe(name: str) -> list[str]:
        choice = plan_file(f"recipes/{name}.yaml").choice
        memory = f"{in_gib(choice.memory.worst.allocated):.1f}"
        ranks = result("benchmarks/gpu/ranks_h200/ranks.json")
        measured = [f"{ranks[name]['rank']['allocated_gib']:.1f}"] if name in ranks else []
        return [memory, *measured, count(choice.speed.tokens_per_second_per_gpu)]

    return [
        ("LoRA r8 on q and v, 4 × A100-40GB | {} | {} | {} |", recipe("llama2-7b-lora")),
        ("LoRA r8 on q and v, 8 × A100-80GB | {} | {} | {} |", recipe("llama2-70b-lora")),
        ("LoRA r16 on q and v, 64 × H100 | {} | {} | {} |", recipe("llama3.1-405b-lora")),
        ("chess games, 2 × A100-80GB | {} | {} | {} |", recipe("codellama-7b-chess")),
        ("Pythia 1B in full, 2 × L40 | {} | {} | {} |", recipe("pythia-1b")),
        ("offload to the host, 4 × RTX 4090 | {} | not run | {} |", recipe("llama2-7b-full")),
    ]


def learnt() -> list[Line]:
    def scores(name: str) -> list[str]:
        _, before, after, error = finetuned(name)
        return [before, after, error, *control(name)]

    return [
        ("reverse a list of words | {} | {} ± {} | {}, trained on shuffled answers |", scores("lora")),
        ("prefer the bare number | {} | {} ± {} | {}, trained on shuffled pairs |", scores("dpo")),
    ]
