"""A user's own torch DataLoader in the global order: which sample is at which position, whatever the number of ranks.

The samples of a step, and the random numbers with which they are augmented, are functions of the seed and the position
alone. A run therefore resumes at the exact sample, on any world size, with any number of workers.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, SequentialSampler

from shoal.data.loader import share_of_rank
from shoal.data.order import Order, SequentialOrder, ShuffledOrder, Spans, around, key_of
from shoal.mistakes import UserMistake

# The order of this many steps is computed together: one step at a time would take longer than reading its samples.
STEPS_AT_ONCE = 64
# Micro-batches of a process in which draws from the generators are looked for.
ALWAYS_LOOKED, LOOKED_EVERY = 16, 16


def check_loader(loader: Any) -> None:
    """A UserMistake unless `loader` can be read in the global order."""
    if isinstance(loader, CustomLoader):
        raise UserMistake("The loader is prepared already: call run.prepare once.")
    if not isinstance(loader, DataLoader):
        raise UserMistake(f"run.prepare takes a torch DataLoader, not a {type(loader).__name__}.")
    if isinstance(loader.dataset, IterableDataset) or not hasattr(loader.dataset, "__len__"):
        raise UserMistake(
            f"The loader's dataset, a {type(loader.dataset).__name__}, has no length and no index, without which no "
            "order is the same on any number of ranks; give a dataset with __len__ and __getitem__."
        )
    sampler, samples = loader.sampler, len(loader.dataset)
    plain = type(sampler) is SequentialSampler or (
        type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == samples
    )
    if not plain or loader.batch_size is None:
        found = type(sampler).__name__ if not plain else type(loader.batch_sampler).__name__
        raise UserMistake(
            f"The loader has a {found} of its own; leave it out: run.prepare gives every rank its samples, in an order "
            "that shuffle=True shuffles anew in each epoch. To choose or weight samples, give torch.utils.data.Subset "
            "with their indices."
        )


def order_of(loader: "DataLoader[Any]", seed: int) -> Order:
    """The global order of a checked loader: shuffled by the seed if it shuffles."""
    samples = len(loader.dataset)  # type: ignore[arg-type]
    return ShuffledOrder(samples, seed) if isinstance(loader.sampler, RandomSampler) else SequentialOrder(samples)


@dataclass(frozen=True)
class Share:
    """Which samples of the order are this rank's."""

    order: Order
    global_batch: int
    micro_batch: int
    rank: int
    ranks: int
    seed: int


class CustomLoader:
    """The prepared loader. `run.steps` reads it."""

    def __init__(self, loader: "DataLoader[Any]", share: Share) -> None:
        self.loader = loader
        self.share = share

    def __iter__(self) -> Iterator[Any]:
        raise UserMistake("The loader is prepared: iterate over run.steps(loader), not over the loader itself.")

    def __len__(self) -> int:
        """Steps per epoch."""
        return -(-len(self.loader.dataset) // self.share.global_batch)  # type: ignore[arg-type]

    @property
    def dataset(self) -> Any:
        return self.loader.dataset

    def micro_batches(self, first_step: int, last_step: int, left_out: Spans = ()) -> Iterator[Any]:
        """This rank's micro-batches of the steps from `first_step` (counted from 0) up to `last_step`, as collated."""
        given = self.loader
        workers: dict[str, Any] = {}
        if given.num_workers:
            workers = {
                "num_workers": given.num_workers,
                "prefetch_factor": given.prefetch_factor,
                "worker_init_fn": given.worker_init_fn,
                "multiprocessing_context": given.multiprocessing_context,
                "timeout": given.timeout,
            }
        reader: DataLoader[Any] = DataLoader(
            _Positioned(given.dataset, self.share.seed),
            batch_sampler=_MicroBatches(self.share, range(first_step, last_step), left_out),
            collate_fn=given.collate_fn,
            pin_memory=given.pin_memory,
            # Otherwise it would draw a seed for its workers from the generator that dropout uses.
            generator=torch.Generator().manual_seed(self.share.seed),
            **workers,
        )
        return iter(reader)


class _MicroBatches(Sampler[list[tuple[int, int]]]):
    """(position, sample) of each sample of each micro-batch of this rank."""

    def __init__(self, share: Share, steps: range, left_out: Spans) -> None:
        self.share = share
        self.steps = steps
        self.left_out = left_out

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        share = self.share
        for start in range(self.steps.start, self.steps.stop, STEPS_AT_ONCE):
            steps = min(STEPS_AT_ONCE, self.steps.stop - start)
            first, count = start * share.global_batch, steps * share.global_batch
            spans = around(first, count, self.left_out)
            positions = np.concatenate([np.arange(begin, begin + length) for begin, length in spans])
            samples = share.order.training_sequences(first, count, self.left_out)
            mine, there = (
                share_of_rank(one, micro_batch=share.micro_batch, rank=share.rank, ranks=share.ranks).tolist()
                for one in (samples, positions)
            )
            for some, places in zip(mine, there, strict=True):
                yield list(zip(places, some, strict=True))


class _Positioned(Dataset[Any]):
    """The user's dataset, with random numbers that depend on the position alone: an augmentation is the same in any
    process, and leaves the generators of the training process alone.

    A generator is seeded for every sample once the dataset has been seen to draw from it: most draw nothing, and
    seeding all generators would take longer than reading a sample. Looking takes a third of a millisecond, so it is
    done for the first micro-batches and for some later ones.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self.seed = seed
        self.drawn = [False] * len(GENERATORS)
        self.read = 0

    def __getitems__(self, places: list[tuple[int, int]]) -> list[Any]:
        self.read += 1
        if self.read > ALWAYS_LOOKED and self.read % LOOKED_EVERY and not any(self.drawn):
            return self._read(places)
        before = [one.state() for one in GENERATORS]
        found = self._read(places)
        new = [
            not drawn and not one.equal(one.state(), state)
            for one, drawn, state in zip(GENERATORS, self.drawn, before, strict=True)
        ]
        if any(new):
            self.drawn = [drawn or first for drawn, first in zip(self.drawn, new, strict=True)]
            found = self._read(places)
        for one, drawn, state in zip(GENERATORS, self.drawn, before, strict=True):
            if drawn:
                one.restore(state)
        return found

    def _read(self, places: list[tuple[int, int]]) -> list[Any]:
        drawn = [one for one, draws in zip(GENERATORS, self.drawn, strict=True) if draws]
        if not drawn:
            return [self.dataset[sample] for _, sample in places]
        found = []
        for position, sample in places:
            key = key_of("shoal", "sample", self.seed, position)
            for one in drawn:
                one.seed(key)
            found.append(self.dataset[sample])
        return found


@dataclass(frozen=True)
class _Generator:
    """A generator of random numbers that a dataset may draw from."""

    state: Callable[[], Any]
    restore: Callable[[Any], object]
    seed: Callable[[int], object]
    equal: Callable[[Any, Any], bool]


GENERATORS = (
    _Generator(
        torch.get_rng_state,
        torch.set_rng_state,
        lambda key: torch.default_generator.manual_seed(key % 2**63),
        torch.equal,
    ),
    _Generator(
        np.random.get_state,
        np.random.set_state,
        lambda key: np.random.seed(key % 2**32),
        lambda one, other: one[2:] == other[2:] and bool((one[1] == other[1]).all()),
    ),
    _Generator(random.getstate, random.setstate, random.seed, lambda one, other: bool(one == other)),
)
