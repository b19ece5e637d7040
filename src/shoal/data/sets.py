"""The sets of a run: training and validation sequences of one source or several, and their one global order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from shoal.catalogue.objectives import objective_facts
from shoal.config.schema import DataConfig
from shoal.data.cache import Report
from shoal.data.mixture import MixedOrder, MixedSequences, rates_of, summarize
from shoal.data.order import Order, ShuffledOrder, key_of
from shoal.data.prepare import prepare
from shoal.data.sequences import Sequences
from shoal.data.stream.stream import Stream, StreamOrder, StreamSequences, open_stream
from shoal.data.tokenizer_base import Tokenizer

Prepare = Callable[..., Sequences]  # `prepare`, with all that is the same for every source


@dataclass(frozen=True)
class Sets:
    """Training and validation sequences, and the order over both. `validation` is None without validation."""

    training: Sequences
    validation: Sequences | None
    order: Order
    mean_length: float  # inputs of a training sequence
    mean_loss_tokens: float
    streams: Sequence[Stream] = ()

    def stand_by(self) -> None:
        """This process reads no more data, but others of the run will."""
        for stream in self.streams:
            stream.stand_by()

    def close(self) -> None:
        """Nothing is read any more: a process that tokenizes a stream ends."""
        for stream in self.streams:
            stream.close()


def prepare_sets(
    data: DataConfig,
    tokenizer: Tokenizer,
    *,
    seed: int,
    cache: Path | None = None,
    report: Report,
    not_apart: str | None = None,
    objective: str = "causal_lm",
    classes: Sequence[str] | None = None,
) -> Sets:
    """The data of a run. `data.validation` is a fraction to hold out, the path of a separate set, or 0. `not_apart` is
    the reason if the model cannot keep packed documents apart. `objective`: `train.objective`. `classes`: of a
    model that has some already."""
    prepare_one = partial(
        prepare, tokenizer=tokenizer, cache=cache, report=report, not_apart=not_apart, objective=objective
    )
    if objective_facts(objective).classes:
        return _with_classes(data, prepare_one, seed, classes)
    share, validation = data.validation, None
    if isinstance(share, str):
        validation, share = prepare_one(data, path=share), 0.0
    separate = None if validation is None else len(validation)
    blocks = data.blocks()
    parts: list[Sequences] = []
    orders: list[Order] = []
    streams: list[Stream] = []
    for number, (block, _) in enumerate(blocks):
        own_seed = seed if len(blocks) == 1 else key_of("shoal", "source", seed, number)
        own_separate = separate if len(blocks) == 1 else None
        if data.streaming:
            stream = open_stream(
                block,
                tokenizer,
                seed=own_seed,
                cache=cache,
                report=report,
                not_apart=not_apart,
                objective=objective,
            )
            streams.append(stream)
            parts.append(StreamSequences(stream))
            orders.append(StreamOrder(stream, own_seed, own_separate))
        else:
            part = prepare_one(block)
            parts.append(part)
            orders.append(ShuffledOrder(len(part), own_seed, share, own_separate))
    if len(parts) == 1:
        training, order, shares = parts[0], orders[0], np.ones(1)
    else:
        weights = [weight for _, weight in blocks]
        rates = rates_of(parts, weights, data.mixing.by)
        repeat = data.mixing.when_exhausted == "repeat"
        order = mixed = MixedOrder(orders, rates, seed=seed, repeat=repeat, separate=separate)
        training = MixedSequences(parts, summarize(parts, weights, data.mixing))
        shares = mixed.shares
        report(describe_mixture(data, parts, mixed))
    lengths = float(np.dot(shares, [part.summary.mean_length for part in parts]))
    loss_tokens = float(np.dot(shares, [part.summary.mean_loss_tokens for part in parts]))
    return Sets(training, training if share else validation, order, lengths, loss_tokens, streams)


def _with_classes(data: DataConfig, prepare_one: Prepare, seed: int, classes: Sequence[str] | None) -> Sets:
    """Examples of one source, each with a class. Those of separate validation data are the training data's. `classes`
    of a model keep their numbers if they include those of the data."""
    training = prepare_one(data)
    found = training.summary.classes or []
    if classes is not None and found != list(classes) and set(found) <= set(classes):
        training = prepare_one(data, classes=classes)
    share, validation, separate = data.validation, None, None
    if isinstance(share, str):
        validation = prepare_one(data, path=share, classes=training.summary.classes)
        share, separate = 0.0, len(validation)
    elif share:
        validation = training
    order = ShuffledOrder(len(training), seed, share, separate)
    return Sets(training, validation, order, training.summary.mean_length, training.summary.mean_loss_tokens)


def describe_mixture(data: DataConfig, parts: Sequence[Sequences], order: MixedOrder) -> str:
    """How much of each source an epoch has, in one sentence."""
    tokens = order.shares * [part.summary.mean_length for part in parts]
    named = []
    for number, ((block, _), some) in enumerate(zip(data.blocks(), tokens, strict=True)):
        path = block.path if isinstance(block.path, str) else f"{block.path[0]} …" if block.path else block.source
        times = "" if order.training_count is None else f" {order.times_read(number):.2f} times"
        named.append(f"{path}{times} ({some / tokens.sum():.0%} of the tokens)")
    epoch = "Mixed" if order.training_count is None else f"An epoch of {order.training_count:,} sequences has"
    return f"{epoch}: {', '.join(named)}; weights are shares of {data.mixing.by}."
