"""Explain an out-of-memory error: measured memory beside the forecast, and settings that need less."""

import re
import resource
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.mistakes import RunFailed, UserMistake
from shoal.parallel.ranks import Ranks
from shoal.plan.advise import Change, Question, savings
from shoal.plan.resolved import ResolvedRun
from shoal.plan.terms import GIB

FIXES = 3
# A term is reported as larger than forecast above this relative difference.
BLAMED = 0.05
# Memory outside of PyTorch's allocator that is attributed to the driver and NCCL, not to other processes.
DRIVERS_GIB = 2.0
_TRIED = re.compile(r"Tried to allocate ([\d.]+) ([KMG]i?B)")
# What errors say if the memory of the host, and of a GPU, is full.
_SAID = (
    ("DefaultCPUAllocator: can't allocate memory",),
    ("CUDA error: out of memory", "CUDA out of memory", "[CUDA]: out of memory", "STATUS_ALLOC_FAILED"),
)
_UNITS = {"K": 2**-20, "M": 2**-10, "G": 1.0}


@dataclass(frozen=True)
class Smaller:
    """A run that needs less memory: the config keys to replace, and the resulting batch."""

    overrides: dict[str, Any]
    micro_batch: int
    grad_accum_steps: int
    global_batch: int


class OutOfMemory(RunFailed):
    """The run failed: a device ran out of memory. `report` says what it held and which settings need less."""

    def __init__(self, sentence: str, report: str, smaller: Smaller | None) -> None:
        super().__init__(sentence, report, smaller)
        self.sentence = sentence
        self.report = report
        self.smaller = smaller  # the run to start instead; None: the micro-batch is 1

    def __str__(self) -> str:
        return f"{self.sentence}\n{self.report}"

    def as_dict(self) -> dict[str, Any]:
        smaller = None if self.smaller is None else asdict(self.smaller)
        return {"sentence": self.sentence, "report": self.report, "smaller": smaller}


@dataclass(frozen=True)
class Held:
    """Memory of a device, in GiB. None where it is unknown."""

    allocated: float
    reserved: float | None
    device: float
    others: float  # of other processes; 0 if small
    weights: float | None = None
    gradients: float | None = None
    optimizer: float | None = None

    @property
    def rest(self) -> float | None:
        if self.weights is None or self.gradients is None or self.optimizer is None:
            return None
        return max(0.0, self.allocated - self.weights - self.gradients - self.optimizer)


@dataclass(frozen=True)
class InUse:
    """The tensors of a run that is set up, for the explanation."""

    weights: Iterable[Tensor]
    optimizer: Iterable[Tensor]
    stage: int  # of the pipeline


@contextmanager
def explained(
    resolved: ResolvedRun,
    ranks: Ranks,
    *,
    when: Callable[[], str] = lambda: "during setup",
    in_use: Callable[[], InUse] | None = None,
    before: Callable[[], object] = lambda: None,
) -> Iterator[None]:
    """Turn an error that memory ran out into `OutOfMemory`, after calling `before`. `when` says what was running."""
    try:
        yield
        return
    except Exception as error:
        if not is_out_of_memory(error, ranks.device):
            raise
        # The error's traceback keeps the tensors of the step alive: what is held now is what was held then.
        tensors = None if in_use is None else in_use()
        held = measure(error, ranks.device, resolved, tensors)
        wanted = _TRIED.search(str(error))
    with suppress(Exception):  # another rank may have died
        before()
    sentence = (
        f"Rank {ranks.rank} ran out of memory {when()}, with micro-batch {resolved.micro_batch}: "
        f"{held.allocated:.1f} of {held.device:.1f} GiB were allocated"
    )
    if wanted is not None:
        sentence += f", and {float(wanted[1]) * _UNITS[wanted[2][0]]:.2f} GiB more were requested"
    report = "\n".join([*_table(resolved, held, 0 if tensors is None else tensors.stage), "", *_fixes(resolved)])
    raise OutOfMemory(f"{sentence}.", report, smaller_run(resolved)) from None


def is_out_of_memory(error: BaseException, device: torch.device) -> bool:
    """Whether `error`, or one that it follows from, says that the memory of `device` is full. PyTorch's allocator has
    an error of its own; cuBLAS, cuDNN, NCCL and Triton allocate by themselves, and the compiler wraps errors."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, torch.OutOfMemoryError):
            return True
        if isinstance(found, RuntimeError) and any(text in str(found) for text in _SAID[device.type == "cuda"]):
            return True
        found = found.__cause__ or found.__context__
    return False


def measure(error: Exception, device: torch.device, resolved: ResolvedRun, in_use: InUse | None) -> Held:
    """Measure what the device holds."""
    reserved, others = None, 0.0
    total = resolved.machine.gpu.memory_gib
    if device.type == "cuda":
        free, whole = (size / GIB for size in torch.cuda.mem_get_info(device))
        reserved, total = torch.cuda.memory_reserved(device) / GIB, whole
        others = whole - free - reserved
        # The error's own figure, if it has one, is of the moment of the failure.
        said = re.search(r"([\d.]+) GiB is allocated by PyTorch", str(error))
        allocated = float(said[1]) if said else torch.cuda.memory_allocated(device) / GIB
    else:
        allocated = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    held = Held(allocated, reserved, total, others if others > DRIVERS_GIB else 0.0)
    if in_use is None:
        return held
    weights = list(in_use.weights)
    gradients = [one.grad for one in weights if one.grad is not None]
    sizes = [_gib(some, device) for some in (weights, gradients, in_use.optimizer)]
    return Held(held.allocated, held.reserved, held.device, held.others, *sizes)


def _gib(tensors: Iterable[Tensor], device: torch.device) -> float:
    """Size of these tensors on a device. A storage that several views share is counted once."""
    found: dict[int, int] = {}
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if local.device.type == device.type:
            with suppress(RuntimeError, NotImplementedError):  # a tensor subclass without storage
                storage = local.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values()) / GIB


def _table(resolved: ResolvedRun, held: Held, stage: int) -> Iterator[str]:
    """The forecast's terms beside the measured ones."""
    memory = resolved.memory.pipeline_ranks[min(stage, len(resolved.memory.pipeline_ranks) - 1)]
    tree = memory.peak.tree
    known = {"weights": held.weights, "gradients": held.gradients, "optimizer state": held.optimizer}
    expected = {name: sum(term.amount for term in tree.parts if term.name == name) / GIB for name in known}
    others = [term for term in tree.parts if term.name not in known and term.amount]
    rows = [(name, expected[name], known[name], "") for name in known]
    parts = ", ".join(f"{term.name} {term.amount / GIB:.2f}" for term in others)
    rows.append(("the rest", sum(term.amount for term in others) / GIB, held.rest, parts))
    like = "" if resolved.exact else ", for a model that resembles this one"
    yield f"GiB             forecast   found   (forecast at the peak, {memory.peak.name}{like})"
    for name, wanted, found, note in (*rows, ("allocated", memory.allocated / GIB, held.allocated, "")):
        seen = f"{found:8.2f}" if found is not None else f"{'–':>8}"
        yield f"{name:16}{wanted:8.2f}{seen}" + (f"   {note}" if note else "")
    if held.reserved is not None:
        yield f"{'reserved':16}{memory.reserved / GIB:8.2f}{held.reserved:8.2f}"
    larger = [
        (found - wanted, name)
        for name, wanted, found, _ in rows
        if found is not None and found > wanted * (1 + BLAMED) + 0.01
    ]
    if held.others:
        yield f"Other processes hold {held.others:.1f} GiB of this device."
    elif larger:
        most, name = max(larger)
        yield f"Larger than forecast: {name}, by {most:.2f} GiB."
    elif not resolved.fits:
        yield "The forecast was that it does not fit."
    else:
        yield "No term is larger than forecast."


def _fixes(resolved: ResolvedRun) -> Iterator[str]:
    """The cheapest changes, as settings to paste."""
    found: list[Change] = []
    with suppress(UserMistake):
        for change in savings(resolved, Question(resolved.config, resolved.run.shape, resolved.machine)):
            keys = [setting.partition("=")[0] for setting in change.settings]
            if keys not in [[one.partition("=")[0] for one in each.settings] for each in found] and change.built:
                found.append(change)
    if not found:
        yield "No setting would need less memory; use a smaller model, shorter sequences or more devices."
        return
    found.sort(key=lambda change: not change.choice.fits)  # changes that do not save enough come last
    yield "Settings that need less memory, cheapest first:"
    width = max(len(" ".join(change.settings)) for change in found[:FIXES])
    for change in found[:FIXES]:
        cost = "same speed" if abs(change.slower) < 0.005 else f"{change.slower:+.0%} time per token"
        touches = "" if change.affects == "execution" else f"; changes {change.affects}"
        yield f"  {' '.join(change.settings):{width}}  saves {change.saves_gib:.1f} GiB, {cost}{touches}"


def smaller_batch(micro_batch: int, grad_accum_steps: int) -> int | None:
    """The next smaller micro-batch that divides the same global batch: half, if that divides it."""
    sequences = micro_batch * grad_accum_steps
    return max((size for size in range(1, micro_batch // 2 + 1) if sequences % size == 0), default=None)


def smaller_run(resolved: ResolvedRun) -> Smaller | None:
    """The same run with a smaller micro-batch, if there is one.

    Every other choice is kept. A new choice by the forecast, which was wrong, might use up the memory that a smaller
    micro-batch frees.
    """
    micro_batch = smaller_batch(resolved.micro_batch, resolved.grad_accum_steps)
    if micro_batch is None:
        return None
    config = resolved.config
    overrides: dict[str, Any] = {
        "train.micro_batch": micro_batch,
        "parallel.strategy": resolved.strategy,
        "parallel.tp": resolved.mesh.tp,
        "parallel.pp": resolved.mesh.pp,
        "parallel.sharding": config.parallel.sharding,
    }
    if isinstance(config.train.recompute, str):  # else it is in the config
        overrides["train.recompute"] = config.train.recompute
    grad_accum_steps = resolved.micro_batch * resolved.grad_accum_steps // micro_batch
    return Smaller(overrides, micro_batch, grad_accum_steps, resolved.global_batch)
