"""Evaluates loss and perplexity of a checkpoint exactly as training does."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shoal.catalogue.causal_models import why_not_packed
from shoal.catalogue.objectives import objective_facts
from shoal.config.given_run import no_run
from shoal.config.load import load_config
from shoal.config.mesh import length_multiple
from shoal.config.resolve import with_precision
from shoal.config.run import RunDirectory, differences
from shoal.config.schema import Config
from shoal.data.order import ShuffledOrder
from shoal.data.prepare import prepare
from shoal.data.sets import Sets, prepare_sets
from shoal.mistakes import UserMistake
from shoal.models.attention import choose_attention
from shoal.models.emulate import emulated_dtypes, emulated_matmuls
from shoal.models.loss import LanguageModel, choose_loss
from shoal.objectives import Objective, find_objective
from shoal.objectives.evaluate import evaluate_held_out
from shoal.objectives.preference import Preference
from shoal.objectives.references import References
from shoal.observe.figures import counted
from shoal.parallel.device import inspect_device
from shoal.parallel.micro_batches import MicroBatchRunner
from shoal.parallel.precision import read_precision
from shoal.parallel.ranks import Ranks
from shoal.use.load import LoadedRun, choose_device, load_run

# Keys that overrides may change: the data, and how the loss is computed. Everything else is as in training.
CHANGEABLE = ("data", "train.precision", "train.micro_batch", "train.loss_impl", "model.attention")


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation."""

    run: str
    step: int
    metrics: dict[str, float]  # of the objective: loss, perplexity, …
    tokens: int  # loss tokens, or pairs or examples
    sequences: int
    counted: str = "loss tokens"  # what `tokens` counts

    @property
    def eval_loss(self) -> float:
        return self.metrics["loss"]

    def as_dict(self) -> dict[str, Any]:
        """As in `metrics.jsonl`: null for a non-finite metric."""
        metrics = {f"eval_{key}": value if math.isfinite(value) else None for key, value in self.metrics.items()}
        return {"run": self.run, "step": self.step, **metrics, "tokens": self.tokens, "sequences": self.sequences}

    def text(self) -> str:
        """Human-readable form."""
        metrics = ", ".join(f"{name} {value:.4f}" for name, value in self.metrics.items())
        scored = f"{self.tokens:,} {self.counted} in {counted(self.sequences, 'sequence')}"
        return f"{self.run}, step {self.step}: {metrics} ({scored})"


def evaluate_run(
    run: Path,
    overrides: Sequence[str] = (),
    *,
    step: int | None = None,
    batches: int | None = None,
    device: str = "auto",
    report: Callable[[str], None] = lambda _: None,
) -> Evaluation:
    """Compute the mean loss on the run's held-out sequences: all, or those of the first `batches` global batches.

    If the overrides set `data.path`, all of that data is evaluated, unless they also set `data.validation`.
    """
    config = read_config(run, overrides)
    config = with_precision(config, inspect_device(choose_device(device)).auto_precision)
    adapted = config.adapter.kind != "none"
    precision = read_precision(config.train.precision, config.train.reduce_dtype, adapter=adapted)
    # Casting the weights once to the compute dtype gives what training computes with in every step.
    loaded = load_run(
        run,
        step=step,
        device=device,
        dtype=precision.compute,
        vectors=None if adapted else precision.weights,
        float8=config.train.precision == "fp8",
    )
    assert loaded.step is not None
    if loaded.positions is not None and config.data.max_length > loaded.positions:
        raise UserMistake(
            f"data.max_length is {config.data.max_length}, but the model has only {loaded.positions} positions; "
            "lower it."
        )
    sets = choose_sequences(config, loaded, overrides, report)
    micro_batch = _micro_batch(RunDirectory(run), config)
    objective = find_objective(config, loaded.tokenizer, sets.training.summary.classes)
    if isinstance(objective, Preference) and objective.precomputes:
        objective.references = References.read(run)
    module = _with_loss(loaded, config, objective, micro_batch, precision.autocast).eval()
    runner = MicroBatchRunner(module, lambda batch: batch.to(loaded.device), keeps_weights=False)
    with torch.no_grad(), emulated_matmuls(emulated_dtypes(loaded.device, precision.compute)):
        found = evaluate_held_out(
            runner.measure,
            sets,
            objective,
            micro_batch=micro_batch,
            sequences=None if batches is None else batches * config.train.global_batch,
            pad=loaded.tokenizer.pad,
            ranks=Ranks(rank=0, world_size=1, local_rank=0, device=loaded.device),
            multiple=length_multiple(config.parallel, config.train.precision),
        )
    return Evaluation(
        run=str(run),
        step=loaded.step,
        metrics=found.metrics,
        tokens=found.weight,
        sequences=found.sequences,
        counted=getattr(objective, "counted", "loss tokens"),
    )


def read_config(run: Path, overrides: Sequence[str]) -> Config:
    """Return the run's config with the overrides. Overrides that have no effect on an evaluation are refused."""
    directory = RunDirectory(run)
    if not directory.exists:
        if (run / "config.json").is_file():
            raise UserMistake(
                f"{run} is a Hugging Face folder, which has no held-out data; give the run it was exported from, or "
                "add --generate and data.path=FILE."
            )
        raise no_run(run)
    trained, config = load_config(directory.config), load_config(directory.config, overrides)
    for key in differences(trained.model_dump(by_alias=True), config.model_dump(by_alias=True)):
        if not any(key == name or key.startswith(name + ".") for name in CHANGEABLE):
            hint = "; use --batches" if key == "eval.batches" else ""
            raise UserMistake(f"{key} has no effect on an evaluation{hint}. Keys that have: {', '.join(CHANGEABLE)}.")
    return config


def names_other_data(trained: Config, config: Config, overrides: Sequence[str]) -> bool:
    """Whether the overrides name data other than that of training, all of which is evaluated."""
    keys = {text.partition("=")[0].strip() for text in overrides}
    # `data=FILE` sets the path too.
    other = "data.path" in keys or config.data.path != trained.data.path
    return other and "data.validation" not in keys


def choose_sequences(
    config: Config, loaded: LoadedRun, overrides: Sequence[str], report: Callable[[str], None]
) -> Sets:
    """Return the sequences held out in training, or all sequences of another dataset."""
    not_apart = why_not_packed(loaded.model.config.get_text_config().model_type)
    assert loaded.config is not None
    held_out = None if names_other_data(loaded.config, config, overrides) else config.data.validation
    objective = config.train.objective
    classes = class_names(loaded) if objective_facts(objective).classes else None
    if held_out is None or isinstance(held_out, str):  # training data is not needed, and may be a stream
        sequences = prepare(
            config.data,
            loaded.tokenizer,
            report=report,
            path=held_out,
            not_apart=not_apart,
            objective=objective,
            classes=classes,
        )
        order = ShuffledOrder(len(sequences), config.seed, separate=len(sequences))
        summary = sequences.summary
        return Sets(sequences, sequences, order, summary.mean_length, summary.mean_loss_tokens)
    if not config.data.validation:
        raise UserMistake(
            f"{loaded.path} has no held-out data (data.validation is 0); give other data, such as data.path=FILE."
        )
    return prepare_sets(
        config.data,
        loaded.tokenizer,
        seed=config.seed,
        report=report,
        not_apart=not_apart,
        objective=objective,
        classes=classes,
    )


def class_names(loaded: LoadedRun) -> list[str]:
    """The classes of a classifier, by their numbers."""
    known = loaded.model.config.id2label
    return [str(known[number]) for number in range(len(known))]


def _with_loss(
    loaded: LoadedRun, config: Config, objective: Objective, micro_batch: int, matmul_dtype: torch.dtype | None
) -> LanguageModel:
    """Return the module that training calls, with its attention: no KV cache, but masks for packed sequences."""
    model, length = loaded.model, config.data.max_length
    model.set_attn_implementation(choose_attention(model, config.model.attention, length))
    vocabulary = model.config.get_text_config().vocab_size
    loss = choose_loss(config.train.loss_impl, loaded.anatomy, micro_batch * length, vocabulary)
    return objective.module(model, loaded.anatomy, loss, matmul_dtype=matmul_dtype)


def _micro_batch(run: RunDirectory, config: Config) -> int:
    """Return the micro-batch size of training, which also had to fit the gradients in memory."""
    if config.train.micro_batch != "auto":
        return config.train.micro_batch
    try:
        return int(json.loads(run.plan.read_text())["chosen"]["micro_batch"])
    except (OSError, ValueError, KeyError, TypeError):
        return 1
