"""The mean loss of a held-out set in a custom loop: every rank computes its share of the batches."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shoal.mistakes import UserMistake
from shoal.parallel.ranks import Ranks

Compute = Callable[[Any], Any]  # from a batch to its mean loss, or to that and what it is the mean over


def evaluate_batches(
    compute: Compute, batches: Iterable[Any], modules: list[nn.Module], ranks: Ranks, *, seed: int
) -> float:
    """The mean over the batches of all ranks, by weight: by default the number of samples in a batch.

    Batches are dealt to the ranks in turn. FSDP needs all ranks in every forward pass, so those that have got one batch
    less compute their last one again, with a weight of zero.
    """
    total = torch.zeros(2, dtype=torch.float64)
    rounds, mine = 0, None
    with _evaluating(modules, seed, ranks.device):
        for index, batch in enumerate(batches):
            turn = index % ranks.world_size
            if turn == ranks.rank or mine is None:
                mine = batch
            if turn == ranks.rank:
                total += _weighted(compute, batch, ranks.device)
            rounds = index + 1
        if not rounds:
            raise UserMistake("run.evaluate got a loader without a batch.")
        if rounds % ranks.world_size and ranks.rank >= rounds % ranks.world_size:
            _weighted(compute, mine, ranks.device)
    total = ranks.sum(total)
    if not total[1]:
        raise UserMistake("run.evaluate got weights of zero only: no batch counts.")
    return float(total[0] / total[1])


@contextmanager
def _evaluating(modules: list[nn.Module], seed: int, device: torch.device) -> Iterator[None]:
    """Without dropout and gradients, and without a trace in training's random numbers. Every rank shuffles alike."""
    trained = [part for module in modules for part in module.modules() if part.training]
    # Of this rank's device alone: all others of the node would be asked, with a warning.
    devices = [device] if device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        for module in modules:
            module.eval()
        try:
            yield
        finally:
            for part in trained:
                part.training = True


def _weighted(compute: Compute, batch: Any, device: torch.device) -> Tensor:
    """Loss times weight, and weight, on the host."""
    moved = to_device(batch, device)
    found = compute(moved)
    loss, weight = found if isinstance(found, tuple) and len(found) == 2 else (found, _samples(moved))
    if isinstance(loss, Tensor) and loss.numel() != 1:
        raise UserMistake(
            f"The loss has shape {tuple(loss.shape)}; run.evaluate takes the mean over the batch, a single number, or "
            "a pair of it and its weight."
        )
    pair = [torch.as_tensor(one, dtype=torch.float64).detach().cpu().reshape(()) for one in (loss, weight)]
    return torch.stack([pair[0] * pair[1], pair[1]])


def _samples(batch: Any) -> int:
    """The length of the first tensor in a batch."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.dim() else 1
    inside = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, tuple | list) else ()
    for one in inside:
        if isinstance(one, Tensor):
            return _samples(one)
    raise UserMistake(
        f"run.evaluate cannot count the samples of a {type(batch).__name__}; return a pair of the loss and its weight."
    )


def to_device(value: Any, device: torch.device) -> Any:
    """Tensors inside tuples, lists and mappings, and objects that move themselves, on `device`."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_device(one, device) for one in value))
    if isinstance(value, tuple | list):
        return type(value)(to_device(one, device) for one in value)
    if type(value) is dict:
        return {key: to_device(one, device) for key, one in value.items()}
    return value.to(device) if hasattr(value, "to") else value
