"""The frozen linear layers of QLoRA: which of a model's layers are quantized, how they store it, and how it is filled.

A layer is marked while its matrix has its own shape, so that tensor parallelism splits it as any other. Then its
storage is replaced: the tensors of `models.nf4`, each viewed bit by bit as the compute dtype. FSDP casts what has
another dtype (before torch 2.13 integers too), and all-gathers this as it is. Values come last, one matrix at a time:
it is read or drawn, quantized on the device, and freed.
"""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from shoal.mistakes import UserMistake
from shoal.models.anatomy import Anatomy
from shoal.models.nf4 import BLOCK, check_library, dequantize, is_double, quantize, quantized_shapes
from shoal.models.tensor_slices import Split, TensorSlice, held_slices, local_slice, local_tensor

# The parameters of a quantized layer. The last two belong to all rows, so they are not sharded with them.
STORED = ("weight", "absmax", "nested_absmax", "nested_offset")
NESTED = STORED[2:]
# Rows of stored bytes are padded to a multiple of this, so that they can be viewed as any dtype.
ALIGNED = 4


def mark_quantized(model: nn.Module, anatomy: Anatomy, kind: str, trained: Collection[str]) -> list[str]:
    """Mark the linear layers of the blocks that are stored as `kind`: those with whole blocks of elements in each row
    whose weight is not in `trained`. Returns their names."""
    check_library(kind)
    found = []
    for block in anatomy.blocks:
        for inside, layer in model.get_submodule(block).named_modules():
            name = f"{block}.{inside}"
            if isinstance(layer, nn.Linear) and layer.in_features % BLOCK == 0 and f"{name}.weight" not in trained:
                layer.quantized = kind  # type: ignore[assignment]
                found.append(name)
    if not found:
        raise UserMistake(
            f"adapter.kind qlora: the blocks of {type(model).__name__} have no linear layers whose input size is a "
            f"multiple of {BLOCK}; use adapter.kind lora."
        )
    return found


def quantized_layers(model: nn.Module) -> dict[str, Any]:
    """The layers whose storage is replaced, by name."""
    return {name: module for name, module in model.named_modules() if is_quantized(module)}


def is_quantized(layer: nn.Module) -> bool:
    return hasattr(layer, "matrix_shape")


def replace_storage(model: nn.Module, dtype: torch.dtype) -> None:
    """Replace the matrices of marked layers, which are on meta, by what stores them, viewed as `dtype`."""
    marked: list[Any] = [module for module in model.modules() if hasattr(module, "quantized")]
    for layer in marked:
        rows, columns = layer.weight.shape
        layer.matrix_shape = (rows, columns)
        for key, (shape, held) in quantized_shapes(layer.quantized, (rows, columns)).items():
            width = shape[-1] * held.itemsize
            padded = -(-width // ALIGNED) * ALIGNED
            stored = torch.empty((*shape[:-1], padded // dtype.itemsize), dtype=dtype, device="meta")
            layer.register_parameter(key, nn.Parameter(stored, requires_grad=False))


def nested_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Parameters that stay whole on every rank."""
    return {getattr(layer, key) for layer in quantized_layers(model).values() for key in NESTED if hasattr(layer, key)}


def parts_of(layer: Any) -> dict[str, Tensor]:
    """The stored tensors of a layer, as `models.nf4` takes them."""
    return {
        key: _unviewed(layer._parameters[key], shape, dtype)
        for key, (shape, dtype) in quantized_shapes(layer.quantized, layer.matrix_shape).items()
    }


def base_matrix(layer: Any) -> Tensor:
    """The frozen weight of a linear layer, dequantized if it is quantized."""
    if not is_quantized(layer):
        weight: Tensor = layer.weight
        return weight
    return dequantize(parts_of(layer), layer.weight.dtype, layer.quantized)


def fill_quantized(
    layer: Any, read: Callable[[TensorSlice], Tensor], split: Split | None, use: Callable[[Tensor, int], None]
) -> None:
    """Quantize this rank's rows of a layer's matrix. `read` returns a slice of the global matrix; `use` is called with
    the dequantized rows and the index of the first."""
    rows, columns = layer.matrix_shape
    weight = local_tensor(layer.weight)
    held = local_slice(layer.weight)
    first, count = (held.offset[0], held.shape[0]) if not held.empty else (0, 0)
    # The statistics of double quantization need all rows.
    needed = TensorSlice((0, 0), (rows, columns)) if is_double(layer.quantized) else _rows(first, count, columns)
    slices = held_slices(needed, split)
    if not slices:
        return
    values = [read(mapping.whole) for mapping in slices]
    matrix = torch.empty(needed.shape, dtype=values[0].dtype, device=weight.device)
    for mapping, value in zip(slices, values, strict=True):
        matrix[mapping.local.slices].copy_(value)
    del values
    parts = quantize(matrix, layer.quantized)
    here = slice(first, first + count) if is_double(layer.quantized) else slice(None)
    for key, part in parts.items():
        stored = local_tensor(layer._parameters[key])
        _view_bytes(stored)[..., : part.shape[-1] * part.element_size()] = _view_bytes(
            part if key in NESTED else part[here].contiguous()
        )
    use(dequantize(parts, weight.dtype, layer.quantized)[here], first)


def _rows(first: int, count: int, columns: int) -> TensorSlice:
    return TensorSlice((first, 0), (count, columns))


def _unviewed(stored: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    found = stored.view(dtype)
    return found if found.shape[-1] == shape[-1] else found[..., : shape[-1]].contiguous()


def _view_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)
