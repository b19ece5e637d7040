"""The tensors of a PEFT adapter folder, as the parameters of a model that has that adapter."""

from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import nn

from shoal.mistakes import UserMistake
from shoal.models.adapters import adapter_parameters
from shoal.models.peft_config import CONFIG, WEIGHTS, file_name, parameter_name
from shoal.models.read_config import read_json_object
from shoal.models.stored import Folder, Stored, equal_values


def locate_adapter(model: nn.Module, folder: Path) -> dict[str, Stored]:
    """The stored tensor of each trained parameter of `model`, which may be a pipeline stage. Reads headers only."""
    files = _open(folder)
    adapters = adapter_parameters(model)
    trained = [name for name, one in model.named_parameters() if name in adapters or one.requires_grad]
    tied = _tied_names(model)
    found: dict[str, Stored] = {}
    for name in trained:
        stored = next((one for one in map(file_name, tied.get(name, [name])) if one in files.files), None)
        if stored is None:
            raise UserMistake(f"adapter.from: {folder / WEIGHTS} holds no {file_name(name)}, which this model needs.")
        found[name] = files.find(stored)
    return found


def check_adapter(model: nn.Module, folder: Path) -> None:
    """A UserMistake if the adapter in `folder` is not one of `model`, which is the whole model on the meta device."""
    files = _open(folder)
    known = dict(model.named_parameters(remove_duplicate=False))
    trained = {name for name, one in known.items() if one.requires_grad}
    for stored in sorted(files.files):
        name = parameter_name(stored)
        if name not in trained:
            raise UserMistake(
                f"adapter.from: {folder / WEIGHTS} holds {name}, which {type(model).__name__} of model.from does not "
                "have: it is the adapter of another model."
            )
        if (shape := files.find(stored).shape) != (wanted := tuple(known[name].shape)):
            raise UserMistake(
                f"adapter.from: {folder / WEIGHTS} holds {name} with shape {shape}, but for model.from it would be "
                f"{wanted}: it is the adapter of another model."
            )
    locate_adapter(model, folder)
    _check_tied(model, folder, files)


def _check_tied(model: nn.Module, folder: Path, files: Folder) -> None:
    """PEFT trains copies of modules, and so can train an embedding apart from the head that it is tied to."""
    for names in _tied_names(model).values():
        present = [file_name(name) for name in names if file_name(name) in files.files]
        if not present:
            continue
        apart = len(present) < len(names) and not read_json_object(folder / CONFIG).get("ensure_weight_tying")
        if apart or not all(equal_values(files.find(present[0]), files.find(other)) for other in present[1:]):
            raise UserMistake(
                f"adapter.from: {folder / WEIGHTS} holds a {parameter_name(present[0])} of its own, but model.from "
                f"ties {' and '.join(names)}; use a base whose config.json has tie_word_embeddings false."
            )


def _tied_names(model: nn.Module) -> dict[str, list[str]]:
    """The names of each parameter that has several, by the one under which `named_parameters` lists it."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {same[0]: same for same in names.values() if len(same) > 1}


def _open(folder: Path) -> Folder:
    path = folder / WEIGHTS
    try:
        opened: Any = safe_open(path, framework="pt")
        return Folder(folder, dict.fromkeys(opened.keys(), path.name), {path.name: opened})
    except (OSError, SafetensorError) as error:
        raise UserMistake(f"{path} is damaged: {error}") from None
