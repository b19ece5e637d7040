"""Comments of the recipes: what was measured with them."""

from benchmarks.figures.results import Line, count, legal, percent, result

RANKS = ("pythia-1b", "codellama-7b-chess", "llama2-7b-lora", "llama2-70b-lora", "llama3.1-405b-lora")


def rank_of(name: str) -> list[Line]:
    """One rank of the recipe on one GPU."""
    found = result("benchmarks/gpu/ranks_h200/ranks.json")[name]
    return [
        (
            "# Measured, rank 0 of {} on one NVIDIA H200 with random weights (benchmarks/gpu/ranks.py): {} GiB.",
            [str(found["world_size"]), f"{found['rank']['allocated_gib']:.1f}"],
        )
    ]


def finetuned(name: str) -> list[str]:
    """Minutes, and the scores before and after with the standard error."""
    found = result(f"benchmarks/finetune/{name}.json")
    before, after = found["before"], found["after"]
    minutes = f"{after['training']['wall_seconds'] / 60:.0f}"
    return [minutes, f"{before['score']:.2f}", f"{after['score']:.2f}", f"{after['stderr']:.2f}"]


def control(name: str) -> list[str]:
    return [f"{result(f'benchmarks/finetune/{name}.json')['control']['score']:.2f}"]


def smollm2_lora() -> list[Line]:
    return [
        ("in {} minutes: score of the task {} before, {} ± {} after", finetuned("lora")),
        ("shuffled answers stays at {}.", control("lora")),
    ]


def smollm2_dpo() -> list[Line]:
    return [
        ("in {} minutes: {} of the answers are a bare number before, {} ± {} after", finetuned("dpo")),
        ("a control with shuffled pairs {}.", control("dpo")),
    ]


def cells_pretrain() -> list[Line]:
    genes = result("examples/cells/results.json")["masked_genes"]
    return [
        (
            "{}% of masked genes of held-out cells, the most frequent gene {}%",
            [percent(genes[name]) for name in ("model", "most_frequent_gene")],
        )
    ]


def cells_finetune() -> list[Line]:
    types = result("examples/cells/results.json")["cell_types"]
    return [
        (
            "{}% of held-out cells, majority class {}%",
            [percent(types[name]["accuracy"]) for name in ("fine_tuned", "majority_class")],
        ),
        ("components {}%", [percent(types["logistic_regression_on_50_components"]["accuracy"])]),
    ]


def chess_tiny() -> list[Line]:
    return [
        ("temperature 1, {} moves each", [count(result("benchmarks/chess/legal.json")["trained"]["moves"])]),
        ("untrained {}%", legal("untrained")),
        ("a bigram table of the same games {}%, trained {}% legal", legal("bigram table", "trained")),
    ]
