"""docs/encoders.md."""

from typing import Any

from benchmarks.figures.results import Line, count, percent, result
from shoal import api

MEASURED = "benchmarks/gpu/encoders_h200/encoders.json"


def encoders() -> list[Line]:
    return [*on_an_h200(), *learnt()]


def on_an_h200() -> list[Line]:
    rows = {
        "| masked LM, packed": "masked-lm",
        "| with dropout 0.1": "masked-lm-dropout",
        "| with activation checkpointing": "masked-lm-recompute",
        "| texts of 258 to 511 tokens, padded": "masked-lm-padded",
        "| classification of the same texts": "classify",
    }
    return [_row(words, result(MEASURED)[name]["measured"]) for words, name in rows.items()]


def _row(words: str, measured: dict[str, Any]) -> Line:
    planned = forecast_of(measured["config"])
    seconds = [one["step_seconds"] for one in (measured, planned["speed"])]
    memory = [one["allocated_gib"] for one in (measured, planned["memory"])]
    figures = [f"{1e3 * one:.1f}" for one in seconds] + [f"{one:.2f}" for one in memory]
    return f"{words} | {{}} ms | {{}} ms | {{}} GiB | {{}} GiB |", figures


def forecast_of(config: dict[str, Any]) -> dict[str, Any]:
    """Today's plan of a config as it was measured."""
    given = {
        "model": {key: config["model"][key] for key in ("shape", "tokenizer", "add_tokens", "dropout")},
        "data": {key: config["data"][key] for key in ("source", "path", "max_length", "pack", "label", "validation")},
        "train": {key: config["train"][key] for key in ("objective", "global_batch", "micro_batch", "recompute")},
        "hardware": {"gpu": "h200", "devices": 1},
    }
    return api.plan(api.config_from_mapping(given)).as_dict()


def learnt() -> list[Line]:
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
