"""Writes a Hugging Face folder: tensors in shards of bounded size, and a rename once it is complete."""

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


def check_dtype(dtype: str | None, of: str) -> None:
    """A UserMistake unless weights can be converted to `dtype`."""
    if dtype is not None and dtype not in DTYPES:
        raise UserMistake(f"The dtype of an {of} is one of {', '.join(DTYPES)}, not {dtype}.")


def check_output(output: Path) -> None:
    """Existing files are never overwritten."""
    if output.exists() and any(output.iterdir() if output.is_dir() else [output]):
        raise UserMistake(f"{output} already exists and is not empty; choose another folder with --output.")


@contextmanager
def temporary_folder(output: Path, copies: Iterable[Path]) -> Iterator[Path]:
    """Yield a temporary folder with `copies` in it, which is renamed to `output` on exit without an error."""
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
    """Write the tensors of `model` named in `sizes` (bytes) under their names in files, and their dtype in config.json.

    `read` returns the tensor of a name in the model. Only the tensors of one shard are in memory at a time.
    """
    weights = {name for name, _ in model.named_parameters()}
    shards = _partition(groups_in_files(model, sizes), sizes, shard_bytes)
    table: dict[str, str] = {}
    total = 0
    saved: torch.dtype | None = None
    for index, names in enumerate(shards):
        several = len(shards) > 1
        file = f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors" if several else "model.safetensors"
        tensors: dict[str, Tensor] = {}
        for name in names:
            tensors[name] = read(name)
            if name in weights:  # buffers keep their own dtype
                tensors[name] = tensors[name] if dtype is None else tensors[name].to(DTYPES[dtype])
                # If dtypes are mixed, config.json gets the promoted one: transformers loads every weight in it.
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
    settings.pop("torch_dtype", None)  # the key of older versions of transformers; it may contradict `dtype`
    settings["dtype"] = str(saved).removeprefix("torch.")
    write_atomically(part / "config.json", json.dumps(settings, indent=2) + "\n")
    return saved


def _partition(groups: list[list[str]], sizes: Mapping[str, int], shard_bytes: int) -> list[list[str]]:
    """Partition tensor names into shards of at most `shard_bytes` each (or of a single group)."""
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
