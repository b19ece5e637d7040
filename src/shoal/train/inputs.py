"""The inputs of a run: model config, tokenizer and datasets. Read before any process group exists."""

from dataclasses import dataclass

from shoal.catalogue.causal_models import why_not_packed
from shoal.config.schema import Config
from shoal.data.prepare import Sets, prepare_sets
from shoal.data.tokenizer_base import Tokenizer
from shoal.mistakes import UserMistake
from shoal.models.prepare import Blueprint, blueprint
from shoal.observe.progress import Reporter
from shoal.plan.batches import count_steps
from shoal.train.schedule import doubts
from shoal.train.tokenizer import load_model_tokenizer


@dataclass(frozen=True)
class Inputs:
    """The inputs of a run."""

    blueprint: Blueprint
    tokenizer: Tokenizer
    sets: Sets
    steps: int


def read_inputs(config: Config, reporter: Reporter) -> Inputs:
    """Read model config, tokenizer and datasets. Needs no accelerator and no other rank."""
    plan = blueprint(config.model)
    tokenizer = load_model_tokenizer(config.model, plan.folder)
    if tokenizer.size > plan.vocabulary:
        raise UserMistake(
            f"The tokenizer has {tokenizer.size} tokens, but the model's vocabulary is {plan.vocabulary}; "
            "give model.shape a vocab at least that large, or another model.tokenizer."
        )
    if plan.positions is not None and config.data.max_length > plan.positions:
        raise UserMistake(
            f"data.max_length is {config.data.max_length}, but the model supports {plan.positions} positions; "
            "lower it, or choose a model with a longer context."
        )
    if plan.folder is None:
        # A model built from a shape has no special tokens; generation from an export needs the tokenizer's.
        plan.settings.bos_token_id, plan.settings.eos_token_id = tokenizer.begin, tokenizer.end
    not_apart = why_not_packed(plan.model_type)
    sets = prepare_sets(config.data, tokenizer, seed=config.seed, report=reporter.say, not_apart=not_apart)
    steps = count_steps(
        epochs=config.train.epochs,
        steps=config.train.steps,
        tokens=config.train.tokens,
        sequences=sets.order.training_count,
        loss_tokens=sets.training.summary.loss_tokens * sets.order.training_count // len(sets.training),
        global_batch=config.train.global_batch,
    )
    for doubt in doubts(config, steps, sets.order.training_count):
        reporter.warn(doubt)
    return Inputs(plan, tokenizer, sets, steps)
