"""docs/encoders.md."""

from benchmarks.figures.results import Line, count, percent, result


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
