"""Values from a Hugging Face folder: where each parameter's tensor is, and this rank's slices of it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from shoal.mistakes import UserMistake
from shoal.models.adapters import MAGNITUDE, adapter_parameters, row_norms
from shoal.models.anatomy import head_parameters, is_classifier, read_anatomy
from shoal.models.conversion import Tensors, convert
from shoal.models.names import counted, sources_in_files, unused_in_files
from shoal.models.new_rows import ExtendedRows, NewRows
from shoal.models.nf4_layers import STORED, fill_quantized, quantized_layers
from shoal.models.read_config import read_json_object
from shoal.models.stored import Stored, equal_values, open_folder
from shoal.models.tensor_slices import NOT_SPLIT, Split, Splits, TensorSlice, local_tensor, slice_mappings, whole_shape

NO_NEW_ROWS: Mapping[str, NewRows] = {}


def locate_weights(
    model: Any, folder: Path, splits: Splits = NOT_SPLIT, new_rows: Mapping[str, NewRows] = NO_NEW_ROWS
) -> dict[str, Stored]:
    """The stored tensor of each parameter but those of a fresh head, with `new_rows` of added tokens. Reads headers
    only, and checks shapes."""
    files = open_folder(folder)
    shapes = {name: whole_shape(one, splits.get(name)) for name, one in _base_parameters(model).items()}
    shapes |= {
        f"{name}.weight": whole_matrix_shape(layer.matrix_shape, splits.get(f"{name}.weight"))
        for name, layer in quantized_layers(model).items()
    }
    names = _parameter_names(model)
    found: dict[str, Stored] = {}
    origin: dict[str, str] = {}
    for name, sources in sources_in_files(model, files.files).items():
        first, *others = sources.all_names
        if sources.converter is not None:
            stored: Tensors = {pattern: [files.find(one) for one in names] for pattern, names in sources.names.items()}
            made = convert(model, name, sources.converter, stored)
            found |= made
            more = f" and {len(others)} others, together" if others else ", converted"
            origin |= dict.fromkeys(made, f"{folder} holds {first}{more}")
        elif name in names and names[name] not in found:  # files may hold a tied weight by its other name only
            found[names[name]] = files.find(first)
            origin[names[name]] = f"{files.file_of(first)} holds {first}"
    for name in fresh_parameters(model, folder):
        found.pop(name, None)
        shapes.pop(name, None)
    if missing := [name for name in shapes if name not in found]:
        raise UserMistake(f"{folder} holds no tensor {counted(missing)}, which {type(model).__name__} needs.")
    found |= {name: ExtendedRows(found[name], rows) for name, rows in new_rows.items() if name in shapes}
    for name, wanted in shapes.items():
        if found[name].shape != wanted:
            raise UserMistake(
                f"{origin[name]} with shape {found[name].shape}, but the model's config makes it {wanted}."
            )
    return {name: found[name] for name in shapes}


def fresh_parameters(model: Any, folder: Path) -> list[str]:
    """The parameters of a classifier that have no values in `folder`, which is a language model or has other classes:
    those of its head, and of its pooler if the files have none."""
    if not is_classifier(model):  # a stage of a pipeline never is, and has no anatomy
        return []
    anatomy = read_anatomy(model)
    saved = read_json_object(folder / "config.json")
    if any(str(name).endswith("ForSequenceClassification") for name in saved.get("architectures") or ()):
        known = saved.get("id2label") or {}
        same = {str(number): name for number, name in model.config.id2label.items()} == known
        return [] if same else [name for name in head_parameters(model, anatomy) if ".pooler." not in name]
    sources = sources_in_files(model, open_folder(folder).files)
    return [name for name in head_parameters(model, anatomy) if name not in sources]


def check_stored(model: Any, folder: Path, new_rows: Mapping[str, NewRows] = NO_NEW_ROWS) -> None:
    """A UserMistake if the files of `folder` are not this model: a tensor is missing, left over, of another shape, or
    differs from the one it is tied to. `model` is the whole model, not a stage of a pipeline."""
    locate_weights(model, folder, new_rows=new_rows)
    files = open_folder(folder)
    sources = sources_in_files(model, files.files)
    unused = unused_in_files(model, files.files, sources)
    anatomy = read_anatomy(model)
    if anatomy.of_encoder:  # which has a head for each task, and files may have another's
        unused = [name for name in unused if anatomy.inside_blocks is not None and anatomy.inside_blocks in name]
    if unused:
        raise UserMistake(
            f"{folder} holds {counted(unused)}, which {type(model).__name__} does not have: its config.json describes "
            "another model. Correct it, or drop them with from_pretrained and save_pretrained of transformers."
        )
    for name, tied_to in _parameter_names(model).items():
        if name != tied_to and name in sources and tied_to in sources:
            one, other = (files.find(sources[each].all_names[0]) for each in (name, tied_to))
            if not equal_values(one, other):
                raise UserMistake(
                    f"{folder} holds a {name} that differs from {tied_to}, but its config.json ties them; set "
                    "tie_word_embeddings to false there."
                )


def read_weights(model: Any, folder: Path, splits: Splits, new_rows: Mapping[str, NewRows]) -> None:
    """Each rank reads its own slices of each tensor."""
    stored = locate_weights(model, folder, splits, new_rows)
    plain = _base_parameters(model)
    read_stored(plain, {name: stored[name] for name in plain if name in stored}, splits)
    for name, layer in quantized_layers(model).items():
        weight = f"{name}.weight"
        fill_quantized_layer(layer, stored[weight].read, splits.get(weight))


def read_stored(parameters: Mapping[str, nn.Parameter], stored: Mapping[str, Stored], splits: Splits) -> None:
    for name, source in stored.items():
        for mapping in slice_mappings(parameters[name], splits.get(name)):
            local_tensor(parameters[name])[mapping.local.slices].copy_(source.read(mapping.whole))


def fill_quantized_layer(layer: Any, read: Callable[[TensorSlice], Tensor], split: Split | None) -> None:
    """Quantize the values that `read` returns. DoRA's magnitudes start as the norms of the rows as they are
    quantized."""

    def start_magnitude(rows: Tensor, first: int) -> None:
        if MAGNITUDE in layer._modules:
            local_tensor(layer._modules[MAGNITUDE].weight).copy_(row_norms(rows))

    fill_quantized(layer, read, split, start_magnitude)


def whole_matrix_shape(shape: tuple[int, int], split: Split | None) -> tuple[int, ...]:
    return shape if split is None else split.whole_shape(shape)


def _base_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that have values of their own in the files: neither those of adapters nor quantized ones."""
    others = {*adapter_parameters(model), *(f"{layer}.{key}" for layer in quantized_layers(model) for key in STORED)}
    return {name: parameter for name, parameter in model.named_parameters() if name not in others}


def _parameter_names(model: nn.Module) -> dict[str, str]:
    """The name by which `named_parameters` lists each parameter; a tied weight has several."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    return {name: first[id(parameter)] for name, parameter in model.named_parameters(remove_duplicate=False)}
