"""Out to what everyone else can load: a Hugging Face folder, one shard in memory at a time."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from shoal.checkpoint.choose import choose_checkpoint
from shoal.checkpoint.layout import PieceReader
from shoal.checkpoint.state import MODEL
from shoal.files import write_atomically
from shoal.mistakes import UserMistake
from shoal.models.build import build_on_meta, read_blueprint
from shoal.models.names import groups_in_files, tensors_for_files

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
    if dtype is not None and dtype not in DTYPES:
        raise UserMistake(f"An export has dtype {', '.join(DTYPES)}, not {dtype}.")
    source = choose_checkpoint(run, step).path
    description = run / "model"
    if not (description / "config.json").is_file():
        raise UserMistake(f"{run} holds no model/config.json, so it is not a run of shoal.")
    if output.exists() and any(output.iterdir() if output.is_dir() else [output]):
        raise UserMistake(f"{output} is there already and not empty; choose another folder with --output.")
    part = output.with_name(output.name + ".part")
    try:
        if part.exists():
            shutil.rmtree(part)
        shutil.copytree(description, part)
    except OSError as error:
        raise UserMistake(f"{output} cannot be written: {error.strerror}.") from None
    reader = PieceReader(source)
    model = build_on_meta(read_blueprint(description), attention="auto", longest=1)
    weights = {name for name, _ in model.named_parameters()}
    groups = groups_in_files(model, reader.shapes(MODEL))
    shards = _divide(reader, groups, shard_bytes, None if dtype is None else DTYPES[dtype].itemsize)
    table: dict[str, str] = {}
    total = 0
    saved_dtype = torch.float32
    for index, names in enumerate(shards):
        several = len(shards) > 1
        file = f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors" if several else "model.safetensors"
        tensors: dict[str, Tensor] = {}
        for name in names:
            tensors[name] = reader.read_whole(MODEL + name)
            if name in weights:  # and not a buffer, which models keep in a type of its own
                tensors[name] = tensors[name] if dtype is None else tensors[name].to(DTYPES[dtype])
                saved_dtype = tensors[name].dtype
        tensors = {name: one.contiguous() for name, one in tensors_for_files(model, tensors).items()}
        table |= dict.fromkeys(tensors, file)
        total += sum(one.numel() * one.element_size() for one in tensors.values())
        save_file(tensors, part / file, metadata={"format": "pt"})
        report(f"{file}: {len(tensors)} tensors")
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


def _divide(reader: PieceReader, groups: list[list[str]], shard_bytes: int, itemsize: int | None) -> list[list[str]]:
    """Names of tensors, shard by shard, each shard at most `shard_bytes` (or one group of tensors)."""
    shards: list[list[str]] = [[]]
    filled = 0
    shapes = reader.shapes(MODEL)
    for group in groups:
        size = sum((itemsize or 4) * torch.Size(shapes[name]).numel() for name in group)
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1] += group
        filled += size
    return shards
