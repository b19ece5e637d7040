"""Evaluate a trained model: by loss, by generated answers, by tasks of lm-evaluation-harness."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.api.arguments import as_list, check_at_least
from shoal.config.given_run import run_folder
from shoal.imports import importing
from shoal.paths import user_path

if TYPE_CHECKING:
    from shoal.use.evaluate import Evaluation
    from shoal.use.evaluate_answers import AnswerEvaluation
    from shoal.use.score import Score
    from shoal.use.tasks import TaskEvaluation


def evaluate(
    run: Path | str,
    overrides: Sequence[str] = (),
    *,
    step: int | None = None,
    batches: int | None = None,
    device: str = "auto",
    report: Callable[[str], None] = lambda _: None,
) -> Evaluation:
    """Compute loss and perplexity on the run's held-out sequences, or on other data: `["data.path=FILE"]`."""
    check_at_least("batches", batches, 1)
    run = run_folder(run)
    with importing("torch"):
        from shoal.use.evaluate import evaluate_run

    return evaluate_run(run, as_list(overrides), step=step, batches=batches, device=device, report=report)


def evaluate_answers(
    run: Path | str,
    overrides: Sequence[str] = (),
    *,
    score: Score | str | None = None,
    allow_code: bool = False,
    examples: int | None = None,
    tokens: int | None = None,
    batch: int = 16,
    step: int | None = None,
    device: str = "auto",
    dtype: str | None = None,
    output: Path | str | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> AnswerEvaluation:
    """Generate answers to the run's held-out prompts, or to those of other data, and score them against the data's.

    `score(answer, expected, record)` returns a number; it may be named as "module:function" with `allow_code`. Without
    it, an answer counts if it is exactly the expected one. `run` may be a Hugging Face folder, with a data.path.
    """
    check_at_least("batch", batch, 1)
    check_at_least("examples", examples, 1)
    check_at_least("tokens", tokens, 1)
    from shoal.use.score import exact_match, load_score

    named = score if isinstance(score, str) else getattr(score, "__name__", "score")
    chosen = load_score(score, allow_code=allow_code) if isinstance(score, str) else score
    run = run_folder(run)
    with importing("torch"):
        from shoal.use.evaluate_answers import evaluate_answers

    return evaluate_answers(
        run,
        as_list(overrides),
        score=chosen or exact_match,
        metric="exact_match" if chosen is None else named,
        examples=examples,
        tokens=tokens,
        batch=batch,
        step=step,
        device=device,
        dtype=dtype,
        output=None if output is None else user_path(output, "--output"),
        report=report,
    )


def evaluate_tasks(
    run: Path | str,
    tasks: Sequence[str],
    *,
    folder: Path | str | None = None,
    allow_code: bool = False,
    examples: int | None = None,
    fewshot: int | None = None,
    chat: bool = False,
    batch: int = 16,
    step: int | None = None,
    device: str = "auto",
    dtype: str | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> TaskEvaluation:
    """Evaluate a run or a Hugging Face folder on tasks of lm-evaluation-harness, its own or those in `folder`."""
    check_at_least("batch", batch, 1)
    check_at_least("examples", examples, 1)
    check_at_least("fewshot", fewshot, 0)
    run = run_folder(run)
    with importing("torch"):
        from shoal.use.tasks import evaluate_tasks

    return evaluate_tasks(
        run,
        as_list(tasks),
        folder=None if folder is None else user_path(folder, "--task-path"),
        allow_code=allow_code,
        examples=examples,
        fewshot=fewshot,
        chat=chat,
        batch=batch,
        step=step,
        device=device,
        dtype=dtype,
        report=report,
    )
