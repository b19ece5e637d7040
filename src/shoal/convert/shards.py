"""A Hugging Face folder in the making: its tensors in files of a bounded size, and its name only once it is whole."""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from shoal.files import write_atomically
from shoal.mistakes import UserMistake
from shoal.models.names import groups_in_files, tensors_for_files

SHARD_BYTES = 5_000_000_000
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def refuse_occupied(output: Path) -> None:
    """Nothing that is there already is ever written over."""
    if output.exists() and any(output.iterdir() if output.is_dir() else [output]):
        raise UserMistake(f"{output} is there already and not empty; choose another folder with --output.")


@contextmanager
def folder_in_making(output: Path, copies: Iterable[Path]) -> Iterator[Path]:
    """A folder beside `output` with `copies` in it, which becomes `output` at the end, unless an error comes first."""
    part = output.with_name(output.name + ".part")
    try:
        if part.exists():
            shutil.rmtree(part)
        part.mkdir(parents=True)
        for path in copies:
            if path.is_dir():
                shutil.copytree(path, part / path.name)
            else:
                shutil.copy2(path, part / path.name)
    except OSError as error:
        raise UserMistake(f"{output} cannot be written: {error.strerror}.") from None
    yield part
    if output.exists():
        output.rmdir()
    part.replace(output)


def write_shards(
    part: Path,
    model: Any,
    sizes: Mapping[str, int],
    read: Callable[[str], Tensor],
    *,
    dtype: str | None,
    shard_bytes: int,
    report: Callable[[str], None],
) -> torch.dtype:
    """Write the tensors of `model` that `sizes` (in bytes) names, as files have them; config.json says their dtype.

    `read` gives one tensor under the model's name for it. Only one file's tensors are in memory at a time.
    """
    weights = {name for name, _ in model.named_parameters()}
    shards = _divide(groups_in_files(model, sizes), sizes, shard_bytes)
    table: dict[str, str] = {}
    total = 0
    saved: torch.dtype | None = None
    for index, names in enumerate(shards):
        several = len(shards) > 1
        file = f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors" if several else "model.safetensors"
        tensors: dict[str, Tensor] = {}
        for name in names:
            tensors[name] = read(name)
            if name in weights:  # and not a buffer, which models keep in a type of its own
                tensors[name] = tensors[name] if dtype is None else tensors[name].to(DTYPES[dtype])
                # Where files mix types, the one that holds them all: transformers loads every weight in it.
                saved = tensors[name].dtype if saved is None else torch.promote_types(saved, tensors[name].dtype)
        tensors = {name: one.contiguous() for name, one in tensors_for_files(model, tensors).items()}
        table |= dict.fromkeys(tensors, file)
        total += sum(one.numel() * one.element_size() for one in tensors.values())
        try:
            save_file(tensors, part / file, metadata={"format": "pt"})
        except (OSError, SafetensorError) as error:
            raise UserMistake(f"{part / file} cannot be written: {error}.") from None
        report(f"{file}: {len(tensors)} tensors")
    if len(shards) > 1:
        index_text = json.dumps({"metadata": {"total_size": total}, "weight_map": table}, indent=2)
        (part / "model.safetensors.index.json").write_text(index_text)
    saved = saved or torch.float32
    settings = json.loads((part / "config.json").read_text())
    settings.pop("torch_dtype", None)  # what older versions of transformers call it; it may say something else
    settings["dtype"] = str(saved).removeprefix("torch.")
    write_atomically(part / "config.json", json.dumps(settings, indent=2) + "\n")
    return saved


def _divide(groups: list[list[str]], sizes: Mapping[str, int], shard_bytes: int) -> list[list[str]]:
    """Names of tensors, shard by shard, each shard at most `shard_bytes` (or one group of tensors)."""
    shards: list[list[str]] = [[]]
    filled = 0
    for group in groups:
        size = sum(sizes[name] for name in group)
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1] += group
        filled += size
    return shards
