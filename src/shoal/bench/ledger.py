"""Every tensor of a traced step, from when it is made until the last reference to it is gone.

Tensors have shapes and no values, so that a model of any size takes no memory. What a tensor is for is often known only
later: whether it becomes a gradient, whether it is sent. So births and deaths are written down as they come, storages
are given names whenever those are known, and sums are made at the end.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GATHERED, REDUCING = "gathered weights", "gradients being reduced"
# What the exchanges of sharded training say about their arguments: (place or name of the argument, what it is for).
EXCHANGED: dict[str, tuple[tuple[int | str, str], ...]] = {
    "fsdp::all_gather_copy_in": ((1, GATHERED),),
    "fsdp::split_with_sizes_copy": (("out", GATHERED),),
    "fsdp::chunk_cat": ((0, REDUCING), ("out", REDUCING)),
    "c10d::_reduce_scatter_base_": ((0, REDUCING),),
}
# FSDP frees what this writes, and takes it again, by changing the storage's size, which no operation tells of.
RESIZED = "fsdp::split_with_sizes_copy"
# In traced code this would be a tensor of its own; it is the one that was waited for.
WAITING = "_c10d_functional::wait_tensor"


@dataclass
class _Held:
    """A piece of memory that is in use."""

    number: int  # of all that there ever were
    storage: "weakref.ref[torch.UntypedStorage]"
    size: int


@dataclass(frozen=True)
class Fullest:
    """What was held when most was."""

    bytes: int
    terms: Mapping[str, int]


@dataclass
class Book:
    """What happened, in order."""

    held: dict[int, int]  # bytes by storage at the beginning
    parts: list[str]
    changes: list[tuple[int, int, int]] = field(default_factory=list)  # (part of the step, storage, bytes more)

    def fullest(self, names: Mapping[int, str]) -> dict[str, Fullest]:
        """The fullest moment of each part of the step."""
        total = sum(self.held.values())
        best: dict[str, tuple[int, int]] = {}  # part → (bytes, how many changes had happened)
        for index, (part, _, more) in enumerate(self.changes):
            total += more
            name = self.parts[part]
            if name not in best or total > best[name][0]:
                best[name] = (total, index + 1)
        now, done, found = dict(self.held), 0, {}
        for name, (amount, until) in sorted(best.items(), key=lambda item: item[1][1]):
            for _, number, more in self.changes[done:until]:
                now[number] = now.get(number, 0) + more
            done = until
            terms: dict[str, int] = defaultdict(int)
            for number, size in now.items():
                terms[names[number]] += size
            found[name] = Fullest(amount, {term: size for term, size in terms.items() if size})
        return found


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Pretends that tensors have values, and keeps book of the memory that they would take.

    Whole numbers that say which rank or tensor is where stay real. A question about values is answered with no while
    `building` (is a number missing?) and with yes afterwards (is the step usable?). Where `leaves_out` says so, what an
    operation makes is not counted.
    """

    def __init__(self, leaves_out: Callable[[str, str, Tensor], bool] = lambda operation, name, tensor: False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.building = True
        self.purpose = "other"  # of what is made now
        self.names: dict[int, str] = {}
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._leaves_out = leaves_out
        self._held: dict[int, _Held] = {}  # by the address of the storage
        self._resized: dict[int, _Held] = {}
        self._count = 0
        self._parts = ["building"]
        self._book: Book | None = None

    def __enter__(self) -> Any:
        self._fake.__enter__()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._fake.__exit__(*error)

    def begin(self, part: str, purpose: str) -> None:
        """What follows belongs to this part of the step, and is for that unless it turns out otherwise."""
        self._look()
        self._parts.append(part)
        self.purpose = purpose

    def record(self) -> Book:
        """Write down what happens from now on."""
        self._look()
        self._book = Book({held.number: held.size for held in self._held.values()}, self._parts)
        return self._book

    def call(self, tensors: Iterable[Tensor], name: str) -> None:
        """These are for that."""
        for tensor in tensors:
            if (held := self._held.get(tensor.untyped_storage()._cdata)) is not None:
                self.names[held.number] = name

    def __torch_dispatch__(
        self, operation: Any, types: Any, arguments: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented  # it comes back with the tensors that this rank has of those
        named = named or {}
        name: str = operation.name().partition(".")[0]
        self._look()
        if name == WAITING:
            return arguments[0]
        if name == "aten::_local_scalar_dense" and isinstance(arguments[0], FakeTensor):
            return not self.building
        if _says_who_is_where(name, arguments, named, building=self.building):
            with unset_fake_temporarily():
                return operation(*arguments, **named)
        result = operation(*arguments, **named)
        for tensor in tree_leaves(result):
            if isinstance(tensor, FakeTensor) and not self._leaves_out(name, self.purpose, tensor):
                self._take(tensor)
        for place, purpose in EXCHANGED.get(name, ()):
            given = named.get(place) if isinstance(place, str) else arguments[place]
            tensors = [one for one in tree_leaves(given) if isinstance(one, FakeTensor)]
            self.call(tensors, purpose)
            if name == RESIZED:
                keys = [tensor.untyped_storage()._cdata for tensor in tensors]
                self._resized |= {key: self._held[key] for key in keys if key in self._held}
        return result

    def _take(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._held:
            return

        def gone(_: Any) -> None:
            held = self._held.pop(key)
            self._resized.pop(key, None)
            self._change(held, -held.size)

        held = _Held(self._count, weakref.ref(storage, gone), storage.nbytes())
        self._count += 1
        self._held[key] = held
        self.names[held.number] = self.purpose
        self._change(held, held.size)

    def _look(self) -> None:
        """Find out which storages have another size than before."""
        for held in self._resized.values():
            storage = held.storage()
            if storage is not None and (size := storage.nbytes()) != held.size:
                self._change(held, size - held.size)
                held.size = size

    def _change(self, held: _Held, more: int) -> None:
        if self._book is not None and more:
            self._book.changes.append((len(self._parts) - 1, held.number, more))


def _says_who_is_where(operation: str, arguments: tuple[Any, ...], named: dict[str, Any], *, building: bool) -> bool:
    tensors = [one for one in tree_leaves((arguments, named)) if isinstance(one, Tensor)]
    if not tensors:
        # A mesh is counted out while the model is laid over it; DDP notes in which order gradients came.
        return (building and operation == "aten::arange") or (
            operation == "aten::empty" and named.get("dtype") is torch.int32
        )
    return all(type(one) is Tensor and one.device.type == "cpu" and not one.is_floating_point() for one in tensors)
