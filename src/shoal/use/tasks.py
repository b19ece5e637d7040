"""Evaluates a model on tasks of lm-evaluation-harness, with its Python API and without the network."""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import shoal.offline  # noqa: F401
from shoal.mistakes import UserMistake, shortened, suggestion
from shoal.models.emulate import emulated_dtypes, emulated_matmuls
from shoal.use.load import able_to_write, load_run

# Names that the harness adds to each metric: acc,none and acc_stderr,none.
_STDERR = "_stderr"


@dataclass(frozen=True)
class TaskEvaluation:
    """The metrics of each task or group, by the harness's names without its filter `none`."""

    run: str
    step: int | None
    tasks: dict[str, dict[str, float | None]]
    examples: dict[str, int]
    fewshot: dict[str, int]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def text(self) -> str:
        """Human-readable form: a line for each metric."""
        step = "" if self.step is None else f", step {self.step}"
        lines = [f"{self.run}{step}:"]
        width = max(map(len, self.tasks), default=0)
        for name, metrics in self.tasks.items():
            for metric, value in metrics.items():
                if metric.endswith(_STDERR) or value is None:
                    continue
                error = metrics.get(metric + _STDERR)
                shown = f"{value:.4f}" + ("" if error is None else f" ± {error:.4f}")
                some = f" ({self.examples[name]:,} examples)" if name in self.examples else ""
                lines.append(f"{name:{width}}  {metric} {shown}{some}")
        return "\n".join(lines)


def evaluate_tasks(
    run: Path,
    tasks: Sequence[str],
    *,
    folder: Path | None = None,
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
    """Evaluate a run or a Hugging Face folder on the harness's own `tasks`, or on those defined in `folder`.

    A task is a program: its templates and functions are run, so `folder` needs `allow_code`. `examples`: only the
    first ones of each task. `chat`: prompts are put into the chat template. Datasets must be on this machine.
    """
    if find_spec("lm_eval") is None:
        raise UserMistake("--tasks needs the package lm-eval: pip install 'shoal[eval]'.")
    if folder is not None and not folder.is_dir():
        raise UserMistake(f"--task-path {folder} is not a folder.")
    if folder is not None and not allow_code:
        raise UserMistake(
            f"--task-path runs the tasks in {folder}, which are code; add --allow-code if you trust them."
        )
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=None if folder is None else str(folder))
    _refuse_unknown(manager, tasks)
    loaded = able_to_write(load_run(run, step=step, device=device, dtype=dtype))
    if chat and not loaded.tokenizer.chat_template:
        raise UserMistake(f"The tokenizer of {run} has no chat template; omit --chat.")
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    report(f"Evaluating {', '.join(tasks)} with lm-evaluation-harness.")
    model = HFLM(
        pretrained=loaded.model,
        tokenizer=loaded.tokenizer.hugging_face,
        backend="causal",
        batch_size=batch,
        max_length=loaded.positions,
    )
    try:
        with emulated_matmuls(emulated_dtypes(loaded.device, loaded.model.dtype)):
            found = simple_evaluate(
                model=model,
                tasks=list(tasks),
                task_manager=manager,
                num_fewshot=fewshot,
                limit=examples,
                apply_chat_template=chat,
                log_samples=False,
                confirm_run_unsafe_code=False,
            )
    except _failures() as error:
        raise UserMistake(
            f"The harness could not evaluate {', '.join(tasks)} ({_reason(error)}); its data must be on this machine, "
            "in the local Hugging Face cache or in files that the task names."
        ) from None
    assert found is not None
    return _result(run, loaded.step, found)


def _refuse_unknown(manager: Any, tasks: Sequence[str]) -> None:
    for name in tasks:
        if not manager.match_tasks([name]):
            raise UserMistake(
                f"lm-evaluation-harness has no task {name}; lm-eval ls tasks lists them, and --task-path FOLDER adds "
                f"your own.{suggestion(name, manager.all_tasks)}"
            )


def _failures() -> tuple[type[Exception], ...]:
    """What the harness raises if a task cannot be loaded or run: it has no exceptions of its own."""
    return (OSError, ValueError, KeyError, AssertionError, ImportError, NotImplementedError, RuntimeError, TypeError)


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split()).rstrip(".") or "no message"
    return shortened(f"{type(error).__name__}: {text}")


def _result(run: Path, step: int | None, found: Any) -> TaskEvaluation:
    tasks: dict[str, dict[str, float | None]] = {}
    for name, metrics in found["results"].items():
        kept: dict[str, float | None] = {}
        for key, value in metrics.items():
            metric, _, applied = key.partition(",")
            if not applied or not isinstance(value, int | float | str):
                continue
            number = float(value) if isinstance(value, int | float) else math.nan  # the harness writes N/A
            label = metric if applied == "none" else f"{metric},{applied}"
            kept[label] = number if math.isfinite(number) else None
        tasks[name] = kept
    counted = {name: int(some["effective"]) for name, some in (found.get("n-samples") or {}).items()}
    shots = {name: int(some) for name, some in (found.get("n-shot") or {}).items() if some is not None}
    return TaskEvaluation(str(run), step, tasks, counted, shots)
