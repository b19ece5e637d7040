"""Apply transformers' weight converters lazily: from the tensors of a file to those of the model, without reading them.

Each operation of a converter runs on meta tensors first, which gives the names and shapes of its outputs. For the
operations that mixture-of-experts models use, the values are then a view of the stored tensors. Any other operation is
run by transformers on complete tensors when its output is read.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from shoal.mistakes import UserMistake
from shoal.models.stored import Concatenated, Sliced, Stacked, Stored
from shoal.models.tensor_slices import TensorSlice, whole

# By the source pattern of the operation: lists of stored tensors first, then the output of the previous operation.
Tensors = Mapping[str, list[Stored] | Stored]


def convert(model: Any, name: str, converter: Any, sources: Tensors) -> dict[str, Stored]:
    """The tensors of `model` that `converter` produces from `sources`; `name` is the first of them."""
    made: dict[str, Stored] = {}
    for operation in converter.operations:
        call = _Call(model, name, converter, operation)
        try:
            shaped = call.on(sources, _empty)
        except Exception as error:  # operations validate little, and fail with any exception
            kind, reason = type(operation).__name__, str(error).strip().splitlines() or [type(error).__name__]
            raise UserMistake(
                f"shoal cannot convert {name} of {type(model).__name__} from its files: {kind}: {reason[0]}"
            ) from None
        sources = made = _views(call, sources, shaped)
    # As in transformers: the prefix and suffix around the pattern in the first name apply to the others too.
    before, _, after = next((name.partition(key) for key in made if key in name), ("", "", ""))
    return {before + key + after: one for key, one in made.items()}


@dataclass(frozen=True)
class _Call:
    """One operation with the arguments that transformers passes to it."""

    model: Any
    name: str
    converter: Any
    operation: Any

    def on(self, sources: Tensors, read: Callable[[Stored], Tensor]) -> dict[str, Tensor]:
        """Run the operation on its sources, as `read` returns them."""
        made = self.operation.convert(
            {
                key: [read(one) for one in some] if isinstance(some, list) else read(some)
                for key, some in sources.items()
            },
            source_patterns=self.converter.source_patterns,
            target_patterns=self.converter.target_patterns,
            full_layer_name=self.name,
            model=self.model,
            config=self.model.config,
            missing_keys=None,
        )
        return {key: one[0] if isinstance(one, list) else one for key, one in made.items()}


@dataclass(frozen=True)
class _Computed:
    """One output of an operation, computed from all of the operation's sources when it is read."""

    call: _Call
    sources: Tensors
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self, tensor_slice: TensorSlice) -> Tensor:
        if tensor_slice.empty:
            return torch.empty(tensor_slice.shape, dtype=self.dtype)
        made = self.call.on(self.sources, lambda source: source.read(whole(source.shape)))
        return made[self.key][tensor_slice.slices].clone()  # a view would keep the complete tensor alive


def _empty(stored: Stored) -> Tensor:
    return torch.empty(stored.shape, dtype=stored.dtype, device="meta")


def _list(tensors: list[Stored] | Stored) -> list[Stored]:
    return tensors if isinstance(tensors, list) else [tensors]


def _views(call: _Call, sources: Tensors, shaped: dict[str, Tensor]) -> dict[str, Stored]:
    """The outputs of `call` on `sources`, with the names and shapes of `shaped`."""
    from transformers.core_model_loading import Chunk, Concatenate, MergeModulelist

    operation = call.operation
    made: dict[str, Stored]
    if isinstance(operation, MergeModulelist):
        made = {
            key: Stacked(parts, operation.dim % shaped[key].dim()) if isinstance(parts, list) else parts
            for key, parts in zip(shaped, sources.values(), strict=True)
        }
    elif isinstance(operation, Concatenate):
        [(key, example)] = shaped.items()
        parts = [part for pattern in call.converter.source_patterns for part in _list(sources.get(pattern, []))]
        made = {key: Concatenated(parts, operation.dim % example.dim())}
    elif isinstance(operation, Chunk):
        fused = _list(next(iter(sources.values())))[0]
        dimension = operation.dim % len(fused.shape)
        ends = accumulate(one.shape[dimension] for one in shaped.values())
        made = {}
        for (key, one), end in zip(shaped.items(), ends, strict=True):
            offset = [0] * one.dim()
            offset[dimension] = end - one.shape[dimension]
            made[key] = Sliced(fused, TensorSlice(tuple(offset), tuple(one.shape)))
    else:
        made = {key: _Computed(call, sources, key, tuple(one.shape), one.dtype) for key, one in shaped.items()}
    assert all(made[key].shape == tuple(one.shape) for key, one in shaped.items()), (call.name, operation)
    return made
