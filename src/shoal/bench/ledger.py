"""Records the lifetime of every tensor of a traced step on fake tensors.

Fake tensors have shapes and no values, so a model of any size takes no memory. The purpose of a tensor is often known
only later: whether it becomes a gradient, whether it is communicated. So allocations and frees are recorded as they
happen, storages are labelled as soon as their purpose is known, and totals are computed at the end.
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
# The purpose of arguments of FSDP's operators: (index or name of the argument, label).
LABELLED_ARGUMENTS: dict[str, tuple[tuple[int | str, str], ...]] = {
    "fsdp::all_gather_copy_in": ((1, GATHERED),),
    "fsdp::split_with_sizes_copy": (("out", GATHERED),),
    "fsdp::chunk_cat": ((0, REDUCING), ("out", REDUCING)),
    "c10d::_reduce_scatter_base_": ((0, REDUCING),),
}
# FSDP frees and reallocates this operator's outputs by resizing their storage, which is not a dispatched operation.
RESIZED = "fsdp::split_with_sizes_copy"
# On fake tensors this would return a new tensor; it is the one that was waited for.
WAITING = "_c10d_functional::wait_tensor"


@dataclass
class _Held:
    """A storage that is in use."""

    index: int  # in order of allocation
    storage: "weakref.ref[torch.UntypedStorage]"
    size: int


@dataclass(frozen=True)
class Peak:
    """Memory at a peak."""

    bytes: int
    terms: Mapping[str, int]


@dataclass
class Timeline:
    """Allocations and frees, in order."""

    held: dict[int, int]  # bytes by storage at the start
    parts: list[str]
    changes: list[tuple[int, int, int]] = field(default_factory=list)  # (part of the step, storage, change in bytes)

    def peaks(self, names: Mapping[int, str]) -> dict[str, Peak]:
        """The peak of each part of the step, which may be its start."""
        total = sum(self.held.values())
        best: dict[str, tuple[int, int]] = {}  # part → (bytes, how many changes had happened)
        for index, (part, _, more) in enumerate(self.changes):
            name = self.parts[part]
            best.setdefault(name, (total, index))
            total += more
            if total > best[name][0]:
                best[name] = (total, index + 1)
        now, done, found = dict(self.held), 0, {}
        for name, (amount, until) in sorted(best.items(), key=lambda item: item[1][1]):
            for _, index, more in self.changes[done:until]:
                now[index] = now.get(index, 0) + more
            done = until
            terms: dict[str, int] = defaultdict(int)
            for index, size in now.items():
                terms[names[index]] += size
            found[name] = Peak(amount, {term: size for term, size in terms.items() if size})
        return found


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that runs on fake tensors and records the memory that they would take.

    Integer tensors that describe meshes and layouts stay real. `item()` of a fake tensor is False while `building` (is
    a weight missing?) and True afterwards (are all gradients finite?). Outputs for which `ignore` returns true are not
    counted.
    """

    def __init__(self, ignore: Callable[[str, str, Tensor], bool] = lambda operation, name, tensor: False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.building = True
        self.purpose = "other"  # of new tensors
        self.names: dict[int, str] = {}
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._ignore = ignore
        self._held: dict[int, _Held] = {}  # by the address of the storage
        self._resized: dict[int, _Held] = {}
        self._count = 0
        self._parts = ["building"]
        self._timeline: Timeline | None = None

    def __enter__(self) -> Any:
        self._fake.__enter__()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._fake.__exit__(*error)

    def begin(self, part: str, purpose: str) -> None:
        """Start a part of the step; its new tensors have this purpose unless they are labelled later."""
        self._update_sizes()
        self._parts.append(part)
        self.purpose = purpose

    def record(self) -> Timeline:
        """Record from now on."""
        self._update_sizes()
        self._timeline = Timeline({held.index: held.size for held in self._held.values()}, self._parts)
        return self._timeline

    def label(self, tensors: Iterable[Tensor], name: str) -> None:
        """Label the storages of these tensors."""
        for tensor in tensors:
            if (held := self._held.get(tensor.untyped_storage()._cdata)) is not None:
                self.names[held.index] = name

    def __torch_dispatch__(
        self, operation: Any, types: Any, arguments: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented  # dispatched again with the local tensors
        named = named or {}
        name: str = operation.name().partition(".")[0]
        self._update_sizes()
        if name == WAITING:
            return arguments[0]
        if name == "aten::_local_scalar_dense" and isinstance(arguments[0], FakeTensor):
            return not self.building
        if _is_metadata(name, arguments, named, building=self.building):
            with unset_fake_temporarily():
                return operation(*arguments, **named)
        result = operation(*arguments, **named)
        for tensor in tree_leaves(result):
            if isinstance(tensor, FakeTensor) and not self._ignore(name, self.purpose, tensor):
                self._track(tensor)
        for argument, purpose in LABELLED_ARGUMENTS.get(name, ()):
            given = named.get(argument) if isinstance(argument, str) else arguments[argument]
            tensors = [one for one in tree_leaves(given) if isinstance(one, FakeTensor)]
            self.label(tensors, purpose)
            if name == RESIZED:
                keys = [tensor.untyped_storage()._cdata for tensor in tensors]
                self._resized |= {key: self._held[key] for key in keys if key in self._held}
        return result

    def _track(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._held:
            return

        def freed(_: Any) -> None:
            held = self._held.pop(key)
            self._resized.pop(key, None)
            self._change(held, -held.size)

        held = _Held(self._count, weakref.ref(storage, freed), storage.nbytes())
        self._count += 1
        self._held[key] = held
        self.names[held.index] = self.purpose
        self._change(held, held.size)

    def _update_sizes(self) -> None:
        """Record storages that were resized."""
        for held in self._resized.values():
            storage = held.storage()
            if storage is not None and (size := storage.nbytes()) != held.size:
                self._change(held, size - held.size)
                held.size = size

    def _change(self, held: _Held, more: int) -> None:
        if self._timeline is not None and more:
            self._timeline.changes.append((len(self._parts) - 1, held.index, more))


def _is_metadata(operation: str, arguments: tuple[Any, ...], named: dict[str, Any], *, building: bool) -> bool:
    tensors = [one for one in tree_leaves((arguments, named)) if isinstance(one, Tensor)]
    if not tensors:
        # Mesh ranks while the model is sharded; the order of gradients that DDP records.
        return (building and operation == "aten::arange") or (
            operation == "aten::empty" and named.get("dtype") is torch.int32
        )
    return all(type(one) is Tensor and one.device.type == "cpu" and not one.is_floating_point() for one in tensors)
