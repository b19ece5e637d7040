"""The sets of a run: training and validation sequences of one source or several, and their one global order."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from shoal.config.schema import DataConfig
from shoal.data.cache import Report
from shoal.data.mixture import MixedOrder, MixedSequences, rates_of, summarize
from shoal.data.order import Order, ShuffledOrder, key_of
from shoal.data.prepare import prepare
from shoal.data.sequences import Sequences
from shoal.data.tokenizer_base import Tokenizer


@dataclass(frozen=True)
class Sets:
    """Training and validation sequences, and the order over both. `validation` is None without validation."""

    training: Sequences
    validation: Sequences | None
    order: Order
    mean_loss_tokens: float  # of a training sequence


def prepare_sets(
    data: DataConfig,
    tokenizer: Tokenizer,
    *,
    seed: int,
    cache: Path | None = None,
    report: Report,
    not_apart: str | None = None,
) -> Sets:
    """The data of a run. `data.validation` is a fraction to hold out, the path of a separate set, or 0. `not_apart` is
    the reason if the model cannot keep packed documents apart."""
    prepare_one = partial(prepare, tokenizer=tokenizer, cache=cache, report=report, not_apart=not_apart)
    share, validation = data.validation, None
    if isinstance(share, str):
        validation, share = prepare_one(data, path=share), 0.0
    separate = None if validation is None else len(validation)
    blocks = data.blocks()
    parts = [prepare_one(block) for block, _ in blocks]
    if len(parts) == 1:
        training, order = parts[0], ShuffledOrder(len(parts[0]), seed, share, separate)
        return Sets(training, training if share else validation, order, _mean_loss_tokens(training))
    weights = [weight for _, weight in blocks]
    rates = rates_of(parts, weights, data.mixing.by)
    mixed = MixedSequences(parts, summarize(parts, weights, data.mixing))
    orders = [
        ShuffledOrder(len(part), key_of("shoal", "source", seed, number), share) for number, part in enumerate(parts)
    ]
    repeat = data.mixing.when_exhausted == "repeat"
    order = MixedOrder(orders, rates, seed=seed, repeat=repeat, separate=separate)
    for sentence in describe_mixture(parts, weights, order, data.mixing.by):
        report(sentence)
    mean = float(np.dot(order.shares, [_mean_loss_tokens(part) for part in parts]))
    return Sets(mixed, mixed if share else validation, order, mean)
