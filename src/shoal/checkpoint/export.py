"""Out to what everyone else can load: a Hugging Face folder, one shard in memory at a time."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from shoal.checkpoint.layout import PieceReader
from shoal.checkpoint.state import MODEL
from shoal.checkpoint.store import damaged_file, list_whole, write_atomically
from shoal.mistakes import UserMistake

SHARD_BYTES = 5_000_000_000
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def export_hf(
    run: Path,
    output: Path,
    *,
    step: int | None = None,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    report: Callable[[str], None] = lambda _: None,
) -> Path:
    """Write the weights of a run's checkpoint (the newest, or that of `step`) with config and tokenizer beside them."""
    source = _checkpoint(run, step)
    description = run / "model"
    if not (description / "config.json").is_file():
        raise UserMistake(f"{run} holds no model/config.json, so it is not a run of shoal.")
    if output.exists() and any(output.iterdir() if output.is_dir() else [output]):
        raise UserMistake(f"{output} is there already and not empty; choose another folder with --output.")
    part = output.with_name(output.name + ".part")
    if part.exists():
        shutil.rmtree(part)
    shutil.copytree(description, part)
    reader = PieceReader(source)
    shards = _divide(reader, shard_bytes, None if dtype is None else DTYPES[dtype].itemsize)
    table: dict[str, str] = {}
    total = 0
    saved_dtype = torch.float32
    for index, names in enumerate(shards):
        several = len(shards) > 1
        file = f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors" if several else "model.safetensors"
        tensors: dict[str, Tensor] = {}
        for name in names:
            tensor = reader.read_whole(MODEL + name)
            tensors[name] = (tensor if dtype is None else tensor.to(DTYPES[dtype])).contiguous()
            total += tensors[name].numel() * tensors[name].element_size()
            saved_dtype = tensors[name].dtype
            table[name] = file
        save_file(tensors, part / file, metadata={"format": "pt"})
        report(f"{file}: {len(names)} tensors")
    if len(shards) > 1:
        index_text = json.dumps({"metadata": {"total_size": total}, "weight_map": table}, indent=2)
        (part / "model.safetensors.index.json").write_text(index_text)
    settings = json.loads((part / "config.json").read_text())
    settings["dtype"] = str(saved_dtype).removeprefix("torch.")
    write_atomically(part / "config.json", json.dumps(settings, indent=2) + "\n")
    if output.exists():
        output.rmdir()
    part.replace(output)
    return output


def _checkpoint(run: Path, step: int | None) -> Path:
    if not (run / "checkpoints").is_dir():
        raise UserMistake(f"{run} holds no checkpoints; give the folder of a run, such as runs/NAME.")
    whole = list_whole(run / "checkpoints")
    if step is not None:
        whole = [one for one in whole if one.step == step]
    if not whole:
        wanted = "" if step is None else f" of step {step}"
        raise UserMistake(f"{run} holds no whole checkpoint{wanted}.")
    chosen = whole[-1]
    if (file := damaged_file(chosen)) is not None:
        raise UserMistake(f"{chosen.path / file} is damaged: its contents are not what was saved.")
    return chosen.path


def _divide(reader: PieceReader, shard_bytes: int, itemsize: int | None) -> list[list[str]]:
    """Names of tensors, shard by shard, each shard at most `shard_bytes` (or one tensor)."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, shape in reader.shapes(MODEL).items():
        size = (itemsize or 4) * torch.Size(shape).numel()
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards
