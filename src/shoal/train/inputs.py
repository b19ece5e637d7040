"""The inputs of a run: model config, tokenizer and datasets. Read before any process group exists."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

from shoal.catalogue.causal_models import why_no_new_tokens, why_not_packed
from shoal.catalogue.objectives import objective_facts
from shoal.catalogue.shapes import VOCABULARY_MULTIPLE
from shoal.config.schema import Config
from shoal.data.cells.make_tokenizer import are_cells
from shoal.data.formats.chat_template import end_ids, read_template
from shoal.data.masks import loss_share
from shoal.data.sets import Sets, prepare_sets
from shoal.data.tokenizer_base import Tokenizer
from shoal.mistakes import UserMistake
from shoal.models.prepare import Blueprint, blueprint
from shoal.observe.progress import Reporter
from shoal.plan.batches import count_steps
from shoal.train.schedule import doubts
from shoal.train.tokenizer import check_sizes, load_model_tokenizer


@dataclass(frozen=True)
class Inputs:
    """The inputs of a run."""

    blueprint: Blueprint
    tokenizer: Tokenizer
    sets: Sets
    steps: int


def read_inputs(config: Config, reporter: Reporter) -> Inputs:
    """Read model config, tokenizer and datasets. Needs no accelerator and no other rank."""
    objective = config.train.objective
    plan = blueprint(config.model, objective)
    tokenizer = load_model_tokenizer(config.model, plan.folder, config.data, reporter.say)
    if config.model.add_tokens:
        plan = _with_tokens(plan, tokenizer, config.model.add_tokens, reporter)
    if config.data.chat_template is not None:
        tokenizer.chat_template = read_template(config.data.chat_template)  # so that it is saved and exported
    check_sizes(plan.vocabulary, plan.positions, tokenizer, config.data)
    if plan.folder is None:
        # A model built from a shape has no special tokens; generation from an export needs the tokenizer's.
        plan.settings.bos_token_id, plan.settings.eos_token_id = tokenizer.begin, tokenizer.end
        if objective_facts(objective).encoder:
            plan.settings.pad_token_id = tokenizer.pad
    if config.data.cells.tokens == "binned" and are_cells(config.data):
        _give_token_types(plan, config)
    not_apart = why_not_packed(plan.model_type)
    sets = prepare_sets(
        config.data,
        tokenizer,
        seed=config.seed,
        report=reporter.say,
        not_apart=not_apart,
        objective=objective,
        classes=plan.classes,
    )
    if (classes := sets.training.summary.classes) is not None:
        plan = plan.with_classes(classes)
    if "chat" in sets.training.summary.format:
        # Generation has to stop where a turn ends, which may be another token than the one that ends a text.
        present = plan.settings.eos_token_id
        present = present if isinstance(present, list | tuple) else [present]
        ends = list(dict.fromkeys([*(int(token) for token in present if token is not None), *end_ids(tokenizer)]))
        plan.settings.eos_token_id = ends if len(ends) > 1 else ends[0]
    sequences = sets.order.training_count or sets.training.summary.sequences  # of a stream, those of its first chunk
    steps = count_steps(
        epochs=config.train.epochs,
        steps=config.train.steps,
        tokens=config.train.tokens,
        sequences=sequences,
        loss_tokens=round(sets.mean_loss_tokens * sequences * loss_share(config)),
        global_batch=config.train.global_batch,
    )
    for doubt in doubts(config, steps, sets.order.training_count):
        reporter.warn(doubt)
    return Inputs(plan, tokenizer, sets, steps)


def _give_token_types(plan: Blueprint, config: Config) -> None:
    """Bins of expression are token types: BERT adds an embedding of these to that of the gene, as scGPT does."""
    needed = config.data.cells.bins
    present = getattr(plan.settings, "type_vocab_size", 0)
    if not objective_facts(config.train.objective).encoder or not present:
        raise UserMistake(
            "data.cells.tokens binned gives bins as token types, which only encoders of the BERT family have; use "
            "train.objective masked_lm or classify with model.shape {family: bert}, or data.cells.tokens rank_value."
        )
    if plan.folder is None:
        plan.settings.type_vocab_size = needed
    elif present != needed:
        raise UserMistake(
            f"data.cells.bins is {needed}, but the model has {present} token types; set data.cells.bins: {present}."
        )


def _with_tokens(plan: Blueprint, tokenizer: Tokenizer, tokens: Sequence[str], reporter: Reporter) -> Blueprint:
    """The model with rows for the added tokens; says what became of them."""
    vocabulary, ids = plan.vocabulary, {token: tokenizer.id_of(token) for token in tokens}
    # A tokenizer may have been given its tokens already, and the model not.
    new = [ids[token] for token in tokens if token in tokenizer.added or ids[token] >= vocabulary]
    if present := [token for token in tokens if token not in tokenizer.added]:
        reporter.say(f"model.add_tokens: the tokenizer has {', '.join(present)} already.")
    if not new:
        return plan
    if (reason := why_no_new_tokens(plan.model_type, plan.settings.get_text_config())) is not None:
        raise UserMistake(
            f"model.add_tokens: {reason}, for which shoal has no new rows; leave it out, or use another model."
        )
    known = tokenizer.size - len(new)
    if known > vocabulary:  # by tokens that are not listed
        return plan
    plan = plan.with_tokens(new, known)
    room = f"the vocabulary of {vocabulary:,} has spare rows for them"
    if plan.vocabulary > vocabulary:
        multiple = gcd(vocabulary, VOCABULARY_MULTIPLE)
        rounded = f", a multiple of {multiple} as before" if plan.vocabulary > tokenizer.size else ""
        room = f"the vocabulary grows from {vocabulary:,} to {plan.vocabulary:,}{rounded}"
    start = "" if plan.folder is None else f", and each new row starts as the mean of the {known:,} rows before"
    reporter.say(f"model.add_tokens: {len(new)} new {'tokens' if len(new) > 1 else 'token'}; {room}{start}.")
    return plan
