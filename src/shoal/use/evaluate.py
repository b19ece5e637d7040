"""Loss and perplexity of any checkpoint, as training would have measured them."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from shoal.config.load import load_config
from shoal.config.mesh import length_multiple
from shoal.config.resolve import with_precision
from shoal.config.run import RunDirectory, differences
from shoal.config.schema import Config
from shoal.data.order import Order
from shoal.data.prepare import Sets, prepare, prepare_sets
from shoal.mistakes import UserMistake
from shoal.models.attention import choose_attention
from shoal.models.emulate import emulated_dtypes, emulated_matmuls
from shoal.models.loss import LanguageModel, choose_loss
from shoal.parallel.device import inspect_device
from shoal.parallel.evaluate import held_out_loss
from shoal.parallel.float8 import check_float8, use_float8
from shoal.parallel.passes import Passes
from shoal.parallel.precision import read_precision
from shoal.parallel.ranks import Ranks
from shoal.use.load import LoadedRun, choose_device, load_run, no_run

# What an override may change: which rows, and how they are computed. Everything else is as the run was trained.
CHANGEABLE = ("data", "train.precision", "train.micro_batch", "train.loss_impl", "model.attention")


@dataclass(frozen=True)
class Evaluation:
    """What was measured, of which weights, on how much."""

    run: str
    step: int
    eval_loss: float
    eval_perplexity: float
    tokens: int  # that the loss counts
    rows: int

    def as_dict(self) -> dict[str, Any]:
        """As `metrics.jsonl` has it: null where a number is none."""
        values = asdict(self)
        return {key: None if value != value else value for key, value in values.items()}


def evaluate_run(
    run: Path,
    overrides: Sequence[str] = (),
    *,
    step: int | None = None,
    batches: int | None = None,
    device: str = "auto",
    report: Callable[[str], None] = lambda _: None,
) -> Evaluation:
    """The mean loss on the rows that the run held out: on all of them, or on the first `batches` global batches.

    Another `data.path` among the overrides is evaluated whole, unless they also say what to hold out of it.
    """
    config = read_config(run, overrides)
    config = with_precision(config, inspect_device(choose_device(device)).auto_precision)
    precision = read_precision(config.train.precision, config.train.reduce_dtype)
    # Rounding the weights once to what training computes in is what training did in every step.
    loaded = load_run(run, step=step, device=device, dtype=precision.compute, vectors=precision.weights)
    assert loaded.step is not None
    if loaded.positions is not None and config.data.max_length > loaded.positions:
        raise UserMistake(
            f"data.max_length is {config.data.max_length}, but the model was made for {loaded.positions} positions; "
            "lower it."
        )
    sets = choose_rows(config, loaded, overrides, report)
    micro_batch = _micro_batch(RunDirectory(run), config)
    module = _with_loss(loaded, config, micro_batch, precision.compute if precision.mixed else None).eval()
    passes = Passes(module, lambda batch: batch.to(loaded.device), keeps_weights=False)
    with torch.no_grad(), emulated_matmuls(emulated_dtypes(loaded.device, precision.compute)):
        found = held_out_loss(
            passes.measure,
            sets,
            micro_batch=micro_batch,
            rows=None if batches is None else batches * config.train.global_batch,
            pad=loaded.tokenizer.pad,
            ranks=Ranks(rank=0, world_size=1, local_rank=0, device=loaded.device),
            multiple=length_multiple(config.parallel, config.train.precision),
        )
    return Evaluation(
        run=str(run),
        step=loaded.step,
        eval_loss=found.loss,
        eval_perplexity=found.perplexity,
        tokens=found.targets,
        rows=found.rows,
    )


def read_config(run: Path, overrides: Sequence[str]) -> Config:
    """The run's config with the overrides, which must be such that they change what is measured."""
    directory = RunDirectory(run)
    if not directory.exists:
        if (run / "config.json").is_file():
            raise UserMistake(
                f"{run} is a Hugging Face folder, which does not say what was held out; give the run it came from."
            )
        raise no_run(run)
    trained, config = load_config(directory.config), load_config(directory.config, overrides)
    for key in differences(trained.model_dump(by_alias=True), config.model_dump(by_alias=True)):
        if not any(key == name or key.startswith(name + ".") for name in CHANGEABLE):
            hint = "; use --batches" if key == "eval.batches" else ""
            raise UserMistake(
                f"{key} changes nothing in an evaluation{hint}. What does: keys of {', '.join(CHANGEABLE)}."
            )
    return config


def choose_rows(config: Config, loaded: LoadedRun, overrides: Sequence[str], report: Callable[[str], None]) -> Sets:
    """The rows held out in training; or all rows of other data, of which the run has seen none."""
    keys = {text.partition("=")[0].strip() for text in overrides}
    # `data=FILE` gives a path too.
    other = "data.path" in keys or (loaded.config is not None and config.data.path != loaded.config.data.path)
    if other and "data.validation" not in keys:
        rows = prepare(config.data, loaded.tokenizer, report=report)
        return Sets(rows, rows, Order(len(rows), config.seed, separate=len(rows)))
    if not config.data.validation:
        raise UserMistake(
            f"{loaded.path} held nothing out (data.validation is 0); give other data, as in data.path=FILE."
        )
    return prepare_sets(config.data, loaded.tokenizer, seed=config.seed, report=report)


def _with_loss(loaded: LoadedRun, config: Config, micro_batch: int, rounded: torch.dtype | None) -> LanguageModel:
    """The module that training calls, with its attention: whole rows need no cache, and packed ones masks of ours."""
    model, length = loaded.model, config.data.max_length
    model.set_attn_implementation(choose_attention(model, config.model.attention, length))
    if config.train.precision == "fp8":
        check_float8(model, inspect_device(loaded.device))
        use_float8(loaded.anatomy.block_modules(model))
    vocabulary = model.config.get_text_config().vocab_size
    loss = choose_loss(config.train.loss_impl, loaded.anatomy, micro_batch * length, vocabulary)
    return LanguageModel(model, loaded.anatomy, loss, rounded=rounded)


def _micro_batch(run: RunDirectory, config: Config) -> int:
    """Rows at once: as in training, which had to find room for gradients as well."""
    if config.train.micro_batch != "auto":
        return config.train.micro_batch
    try:
        return int(json.loads(run.plan.read_text())["chosen"]["micro_batch"])
    except (OSError, ValueError, KeyError, TypeError):
        return 1
