"""A dry run: what is known of a run without an accelerator and without a step."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from shoal.data.inspect.spans import CLOSE, OPEN, decode_spans, mark, shorten
from shoal.data.loader import IGNORED
from shoal.objectives import Objective, find_objective
from shoal.observe.figures import counted
from shoal.plan.resolved import describe_accumulation, describe_degrees
from shoal.train.inputs import Inputs
from shoal.train.preflight import Preflight
from shoal.train.schedule import make_schedule, peak_lr

MOST_CHARACTERS = 700
COLUMNS, LINES = 60, 8


@dataclass(frozen=True)
class Preview:
    """The result of a dry run."""

    parameters: int
    trained_parameters: int
    matmul_parameters: int
    precision: str
    strategy: str
    reason: str
    devices: int
    mesh: dict[str, int]
    micro_batch: int
    grad_accum_steps: int
    global_batch: int
    steps: int
    training_sequences: int | None  # None: the data is streamed
    validation_sequences: int
    tokens: int  # loss tokens of the complete run, about
    learning_rates: list[float]  # the learning rate at evenly spaced steps
    sample: str  # the first sequence of the first batch, decoded, with loss tokens marked

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def text(self) -> str:
        """Human-readable form."""
        frozen = self.parameters - self.trained_parameters
        devices = f"{self.devices} device{'s' if self.devices > 1 else ''}"
        return "\n".join(
            [
                f"model      {self.parameters:,} parameters, {self.matmul_parameters:,} of them in matmuls"
                + (f", {frozen:,} frozen" if frozen else ""),
                f"precision  {self.precision}",
                f"strategy   {self.strategy}{describe_degrees(self.mesh)} ({self.reason}) on {devices}",
                f"batch      {self.global_batch} sequences per step: micro-batch {self.micro_batch}, "
                f"{describe_accumulation(self.grad_accum_steps)}",
                f"length     {self.steps:,} steps, about {self.tokens:,} loss tokens; "
                f"{_counted(self.training_sequences)} training sequences, "
                f"{counted(self.validation_sequences, 'validation sequence')}",
                "",
                "learning rate",
                *draw(self.learning_rates, self.steps),
                "",
                f"first sequence of the first step; loss tokens are between {OPEN} and {CLOSE}",
                "",
                self.sample,
            ]
        )


def preview(checked: Preflight) -> Preview:
    """What a run that passed its preflight would do, and its first sequence."""
    inputs, prepared, resolved = checked.inputs, checked.prepared, checked.resolved
    config = resolved.config
    factor_at = make_schedule(config.train.schedule, inputs.steps)
    peak = peak_lr(config.train)
    shown = min(COLUMNS, inputs.steps)
    steps = [index * (inputs.steps - 1) // max(1, shown - 1) for index in range(shown)]
    sets = inputs.sets
    return Preview(
        parameters=prepared.parameters,
        trained_parameters=prepared.trained_parameters,
        matmul_parameters=prepared.matmul_parameters,
        precision=config.train.precision,
        strategy=resolved.strategy,
        reason=resolved.reason,
        devices=resolved.world_size,
        mesh=asdict(resolved.mesh),
        micro_batch=resolved.micro_batch,
        grad_accum_steps=resolved.grad_accum_steps,
        global_batch=resolved.global_batch,
        steps=inputs.steps,
        training_sequences=sets.order.training_count,
        validation_sequences=sets.order.validation_count,
        tokens=round(inputs.steps * resolved.global_batch * sets.mean_loss_tokens),
        learning_rates=[peak * factor_at(step) for step in steps],
        sample=mark_loss_tokens(inputs, find_objective(config, inputs.tokenizer, sets.training.summary.classes)),
    )


def _counted(number: int | None) -> str:
    return "streamed" if number is None else f"{number:,}"


def mark_loss_tokens(inputs: Inputs, objective: Objective) -> str:
    """The first training sequence as text, with its loss tokens marked."""
    training = inputs.sets.training
    first = inputs.sets.order.training_sequences(0, 1)
    tokens, _ = training[int(first[0])]
    batch = objective.collate(training, first, pad=inputs.tokenizer.pad, positions=np.zeros(1, np.int64))
    labels = batch.labels[0].tolist()
    if training.summary.encoder:  # labels stand where their tokens are; one of a class stands nowhere
        tokens = tokens[:-1]
        trained = [label != IGNORED for label in labels] if len(labels) > 1 else [False] * len(tokens)
    else:
        # Labels are shifted by one: a label's index is that of the token before it.
        trained = [False, *(label != IGNORED for label in labels[: len(tokens) - 1])]
    spans, shortened = shorten(decode_spans(inputs.tokenizer, tokens, trained), MOST_CHARACTERS)
    return mark(spans) + (" …" if shortened else "")


def draw(values: Sequence[float], steps: int) -> list[str]:
    """A text plot with one column per value."""
    highest = max(values)
    eighths = " ▁▂▃▄▅▆▇█"
    lines = []
    for line in reversed(range(LINES)):
        filled = (max(0.0, min(1.0, value / highest * LINES - line)) for value in values)
        label = f"{highest:.2e} " if line == LINES - 1 else " " * 9
        lines.append(label + "".join(eighths[round(8 * share)] for share in filled).rstrip())
    last = f"  step {steps}" if steps > 1 else ""
    return [*lines, f"{'':9}step 1{last:>{max(1, len(values) - 6)}}".rstrip()]
