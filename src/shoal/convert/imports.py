"""Converts checkpoints of other programs to a Hugging Face folder, with one shard in memory at a time."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from shoal.convert import litgpt
from shoal.convert.sharded import open_sharded
from shoal.convert.shards import DTYPES, SHARD_BYTES, check_dtype, check_output, temporary_folder, write_shards
from shoal.convert.state_dicts import LITGPT, Foreign, open_foreign
from shoal.mistakes import UserMistake
from shoal.models.buffers import kept_buffers
from shoal.models.conversion import Tensors, convert
from shoal.models.hub import local_folder
from shoal.models.names import counted, sources_in_files, unused_in_files
from shoal.models.prepare import Blueprint, prepare_model, read_blueprint
from shoal.models.stored import DTYPES as IN_FILES
from shoal.models.stored import Stored, equal_values
from shoal.models.tensor_slices import whole

TOKENIZER = ("tokenizer.*", "tokenizer_config.json", "vocab.json", "vocab.txt", "merges.txt", "spiece.model")
DESCRIPTION = (*TOKENIZER, "special_tokens_map.json", "added_tokens.json", "chat_template.*", "generation_config.json")


@dataclass(frozen=True)
class Imported:
    """The result of an import."""

    output: str
    source: str
    format: str
    architecture: str
    tensors: int
    parameters: int
    dtype: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def import_hf(
    source: Path,
    output: Path,
    *,
    model: str | None = None,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    report: Callable[[str], None] = lambda _: None,
) -> Imported:
    """Convert a LitGPT, DeepSpeed, FSDP or DCP checkpoint to a Hugging Face folder.

    `model` is the folder with the model's config.json. Without it, the config is looked for next to the weights.
    """
    check_dtype(dtype, "import")
    check_output(output)
    described = None if model is None else local_folder(model)
    foreign = open_sharded(source) or open_foreign(source)
    plan = _blueprint(foreign, described)
    if foreign.note:
        report(foreign.note)
    built = prepare_model(plan).model
    stored = foreign.all_stored
    if foreign.kind == LITGPT:
        stored = litgpt.renamed(foreign.path, stored, plan.settings)
    found = _match(foreign.path, built, stored)
    itemsize = None if dtype is None else DTYPES[dtype].itemsize
    sizes = {name: (itemsize or one.dtype.itemsize) * torch.Size(one.shape).numel() for name, one in found.items()}
    copies = _description([*([] if described is None else [described]), *foreign.config_folders])
    if not copies:
        report("No tokenizer was found next to the weights or the config; set model.tokenizer to train this model.")
    if plan.folder is not None:
        copies.append(plan.folder / "config.json")
    with temporary_folder(output, copies) as part:
        if plan.folder is None:
            plan.settings.architectures = [type(built).__name__]
            plan.settings.save_pretrained(part)
        saved = write_shards(
            part,
            built,
            sizes,
            lambda name: found[name].read(whole(found[name].shape)),
            dtype=dtype,
            shard_bytes=shard_bytes,
            report=report,
        )
    return Imported(
        output=str(output),
        source=str(foreign.path),
        format=foreign.kind,
        architecture=type(built).__name__,
        tensors=len(found),
        parameters=sum(parameter.numel() for parameter in built.parameters()),
        dtype=str(saved).removeprefix("torch."),
    )


def _blueprint(foreign: Foreign, described: Path | None) -> Blueprint:
    """Return the model's blueprint, from --model or from the files next to the weights."""
    if described is not None:
        return read_blueprint(described)
    if foreign.kind == LITGPT:
        file = foreign.path.parent / litgpt.CONFIG_FILE
        if not file.is_file():
            raise UserMistake(f"{file} does not exist; give --model, a folder whose config.json describes the model.")
        head, embedding = (foreign.all_stored.get(f"{name}.weight") for name in ("lm_head", "transformer.wte"))
        # LitGPT always stores both; if they are equal, the model was tied.
        tied = head is None or (embedding is not None and equal_values(head, embedding))
        return Blueprint(litgpt.read_settings(file, tied=tied, tokens=_special_tokens(foreign.path.parent)), None)
    folder = next((folder for folder in foreign.config_folders if (folder / "config.json").is_file()), None)
    if folder is None:
        raise UserMistake(
            f"{foreign.path} has {len(foreign.all_stored)} tensors but no config.json next to it; "
            "give --model, a folder with that model's config.json and tokenizer."
        )
    return read_blueprint(folder)


def _special_tokens(folder: Path) -> dict[str, Any]:
    """Read the transformers config next to LitGPT's, for its special token ids. The sizes are taken from LitGPT's."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def _description(folders: Iterable[Path]) -> list[Path]:
    """Return the tokenizer files, and those that belong to them, of the first folder that has any."""
    for folder in folders:
        found = {path.name: path for pattern in DESCRIPTION for path in folder.glob(pattern) if path.is_file()}
        if any(path.match(pattern) for path in found.values() for pattern in TOKENIZER):
            return list(found.values())
    return []


def _match(path: Path, model: Any, stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """Map the tensors of `model` to those in `stored`; missing, unexpected and mismatched ones are errors."""
    parameters, buffers = dict(model.named_parameters()), kept_buffers(model)
    every = dict(model.named_parameters(remove_duplicate=False))
    first = {id(parameter): name for name, parameter in parameters.items()}
    found: dict[str, Stored] = {}
    by_tensor = sources_in_files(model, stored)
    for name, sources in by_tensor.items():
        if sources.converter is not None:
            some: Tensors = {pattern: [stored[one] for one in names] for pattern, names in sources.names.items()}
            found |= convert(model, name, sources.converter, some)
        else:
            found[name] = stored[sources.all_names[0]]
    for name, parameter in every.items():
        if name in parameters or name not in found:
            continue  # only second names of tied weights are handled below
        other, tied = first[id(parameter)], found.pop(name)
        if not equal_values(found.setdefault(other, tied), tied):
            raise UserMistake(
                f"{path} holds a {name} that differs from {other}, but the config ties them; "
                "set tie_word_embeddings to false in the config.json of --model."
            )
    _refuse_mismatch(path, model, found, unused_in_files(model, stored, by_tensor))
    return {name: found[name] for name in [*parameters, *(name for name in buffers if name in found)]}


def _refuse_mismatch(path: Path, model: Any, found: Mapping[str, Stored], unexpected: list[str]) -> None:
    wanted = dict(model.named_parameters())
    kind = type(model).__name__
    if missing := [name for name in wanted if name not in found]:
        instead = f", but unexpected tensors: {counted(unexpected)}" if unexpected else ""
        raise UserMistake(
            f"{path} holds no {counted(missing)}, which {kind} needs{instead}; give --model, the config of the model "
            "that was saved."
        )
    if unexpected:
        raise UserMistake(
            f"{path} holds {counted(unexpected)}, which {kind} does not have; give --model, the config of the model "
            "that was saved."
        )
    shapes = {name: tuple(one.shape) for name, one in [*wanted.items(), *kept_buffers(model).items()]}
    if wrong := [name for name, shape in shapes.items() if name in found and found[name].shape != shape]:
        raise UserMistake(
            f"{path} holds {counted(wrong)} with another shape than the config's: {found[wrong[0]].shape}, not "
            f"{shapes[wrong[0]]}; give --model, the config of the model that was saved."
        )
    if quantized := [name for name in wanted if found[name].dtype not in IN_FILES.values()]:
        raise UserMistake(
            f"{path} holds {counted(quantized)} as {found[quantized[0]].dtype}: quantized weights cannot be trained; "
            "import the originals."
        )
