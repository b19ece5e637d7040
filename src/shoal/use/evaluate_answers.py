"""Evaluates generated answers: greedy decoding of the held-out prompts in batches, scored against the answers."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from shoal.catalogue.causal_models import why_not_packed
from shoal.config.load import load_config
from shoal.config.run import RunDirectory
from shoal.config.schema import Config
from shoal.data.progress import Progress
from shoal.files import write_atomically
from shoal.mistakes import UserMistake
from shoal.models.emulate import emulated_dtypes, emulated_matmuls
from shoal.observe.figures import counted
from shoal.use.evaluate import names_other_data, read_config
from shoal.use.examples import Example, held_out_examples
from shoal.use.generate import end_tokens, refuse_unknown_tokens
from shoal.use.load import LoadedRun, able_to_write, load_run
from shoal.use.prompt import room_for_answer
from shoal.use.score import Score, call_score, exact_match

# The limit of an answer's tokens, unless one is given: as a multiple of the longest answer in the data, and at least.
LIMIT, LEAST = 2, 16


@dataclass(frozen=True)
class AnswerEvaluation:
    """The mean score of the generated answers, with its standard error."""

    run: str
    step: int | None
    metric: str  # exact_match, or the name of the user's function
    score: float
    stderr: float
    examples: int
    tokens: int  # the most that an answer could have
    cut_off: int  # answers that reached it

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def text(self) -> str:
        """Human-readable form."""
        step = "" if self.step is None else f", step {self.step}"
        cut_off = f"; cut off at {self.tokens} tokens: {self.cut_off:,}" if self.cut_off else ""
        score = f"{self.metric} {self.score:.4f} ± {self.stderr:.4f}"
        return f"{self.run}{step}: {score} ({counted(self.examples, 'example')}{cut_off})"


def evaluate_answers(
    run: Path,
    overrides: Sequence[str] = (),
    *,
    score: Score = exact_match,
    metric: str = "exact_match",
    examples: int | None = None,
    tokens: int | None = None,
    batch: int = 16,
    step: int | None = None,
    device: str = "auto",
    dtype: str | None = None,
    output: Path | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> AnswerEvaluation:
    """Generate an answer to each held-out prompt of a run (the first `examples`), or to all prompts of another
    data.path, and score it. `run` may be a Hugging Face folder, if the overrides name data.

    `tokens`: the most an answer may have. `output`: a file for every answer, as JSON Lines.
    """
    config, every = _read_config(run, overrides)
    if output is not None and not output.parent.is_dir():
        raise UserMistake(f"{output} cannot be written: {output.parent} is not a folder.")
    loaded = able_to_write(load_run(run, step=step, device=device, dtype=dtype))
    asked = held_out_examples(config, loaded, every=every, most=examples, report=report)
    limit = tokens or _limit(loaded, asked)
    answered = counted(len(asked), "answer")
    report(f"Generating {answered} of at most {limit} tokens, {min(batch, len(asked))} at a time.")
    answers: list[str] = [""] * len(asked)
    cut_off = 0
    progress, done = Progress(report), 0
    for indices in _batches(loaded, asked, batch):
        for index, ids in zip(indices, _generate(loaded, [asked[one].prompt for one in indices], limit), strict=True):
            answers[index] = loaded.tokenizer.decode(ids, keep_special=False).strip()
            cut_off += len(ids) >= limit
        done += len(indices)
        progress.tick("Generating", done, "answers", done / len(asked))
    scores = [
        call_score(score, metric, answer, one.answer, one.record.fields, one.record.where)
        for one, answer in zip(asked, answers, strict=True)
    ]
    if output is not None:
        _write(output, loaded, asked, answers, scores)
    mean = sum(scores) / len(scores)
    variance = sum((one - mean) ** 2 for one in scores) / max(len(scores) - 1, 1)
    return AnswerEvaluation(
        run=str(run),
        step=loaded.step,
        metric=metric,
        score=mean,
        stderr=math.sqrt(variance / len(scores)),
        examples=len(scores),
        tokens=limit,
        cut_off=cut_off,
    )


def _read_config(run: Path, overrides: Sequence[str]) -> tuple[Config, bool]:
    """The config of the data, and whether all of it is evaluated rather than what was held out."""
    if RunDirectory(run).exists or not (run / "config.json").is_file():
        config = read_config(run, overrides)
        return config, names_other_data(load_config(RunDirectory(run).config), config, overrides)
    config = load_config(None, overrides, needs_model=False)
    if config.data.path is None and isinstance(config.data.source, str):
        raise UserMistake(
            f"{run} is a Hugging Face folder, which has no held-out data; name some, such as data.path=FILE."
        )
    return config, True


def _limit(loaded: LoadedRun, asked: Sequence[Example]) -> int:
    longest = max(len(ids) for ids in loaded.tokenizer.encode_many([one.answer for one in asked]))
    return max(LIMIT * longest, LEAST)


def _batches(loaded: LoadedRun, asked: Sequence[Example], batch: int) -> Iterator[list[int]]:
    """Examples of similar length together; the longest first, so that a lack of memory shows at once."""
    # Padding would change the state of a model that reads its tokens one after another.
    alike = why_not_packed(loaded.model.config.get_text_config().model_type) is not None
    waiting: list[int] = []
    for index in sorted(range(len(asked)), key=lambda one: -len(asked[one].prompt)):
        other_length = bool(waiting) and len(asked[waiting[0]].prompt) != len(asked[index].prompt)
        if len(waiting) == batch or (alike and other_length):
            yield waiting
            waiting = []
        waiting.append(index)
    yield waiting


def _generate(loaded: LoadedRun, prompts: Sequence[list[int]], tokens: int) -> list[list[int]]:
    """The tokens that greedy decoding appends to each prompt, without the end token."""
    from transformers import GenerationConfig

    for prompt in prompts:
        refuse_unknown_tokens(loaded, prompt)
    longest = max(prompts, key=len)
    ends, pad = end_tokens(loaded), loaded.tokenizer.pad
    settings = GenerationConfig(
        max_new_tokens=room_for_answer(loaded, longest, tokens),
        eos_token_id=sorted(ends),
        pad_token_id=pad,
        do_sample=False,
    )
    # Padded on the left: new tokens follow the last one of each prompt.
    missing = [len(longest) - len(prompt) for prompt in prompts]
    ids = torch.tensor([[pad] * some + prompt for some, prompt in zip(missing, prompts, strict=True)])
    mask = torch.tensor([[0] * some + [1] * len(prompt) for some, prompt in zip(missing, prompts, strict=True)])
    with torch.no_grad(), emulated_matmuls(emulated_dtypes(loaded.device, loaded.model.dtype)):
        made = loaded.model.generate(
            ids.to(loaded.device), attention_mask=mask.to(loaded.device), generation_config=settings
        )
    answers: list[list[int]] = []
    for row in made[:, len(longest) :].tolist():
        end = next((index for index, token in enumerate(row) if token in ends), len(row))
        answers.append(row[:end])
    return answers


def _write(
    output: Path, loaded: LoadedRun, asked: Sequence[Example], answers: Sequence[str], scores: Sequence[float]
) -> None:
    lines = [
        json.dumps(
            {
                "record": one.record.where,
                "prompt": loaded.tokenizer.decode(one.prompt),
                "expected": one.answer,
                "answer": answer,
                "score": score,
            },
            ensure_ascii=False,
        )
        for one, answer, score in zip(asked, answers, scores, strict=True)
    ]
    try:
        write_atomically(output, "\n".join(lines) + "\n")
    except OSError as error:
        raise UserMistake(f"{output} cannot be written: {error.strerror}.") from None
