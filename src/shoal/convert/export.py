"""Exports a run as a Hugging Face folder, with one shard in memory at a time."""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from shoal.checkpoint.choose import choose_checkpoint
from shoal.checkpoint.layout import SliceReader
from shoal.checkpoint.state import MODEL
from shoal.config.load import load_config
from shoal.config.run import RunDirectory
from shoal.convert.shards import DTYPES, SHARD_BYTES, check_dtype, check_output, temporary_folder, write_shards
from shoal.mistakes import UserMistake
from shoal.models.prepare import prepare_model, read_blueprint


def refuse_adapter(run: Path) -> None:
    """A UserMistake if `run` trained an adapter, whose checkpoints hold no complete model."""
    directory = RunDirectory(run)
    if directory.exists and load_config(directory.config, needs_model=False).adapter.kind != "none":
        raise UserMistake(
            f"{run} trained an adapter, not a complete model: shoal merge {run} writes both merged, and shoal export "
            f"{run} --adapter the adapter for PEFT."
        )


def export_hf(
    run: Path,
    output: Path,
    *,
    step: int | None = None,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    report: Callable[[str], None] = lambda _: None,
) -> Path:
    """Export the weights of a run's checkpoint (the newest, or that of `step`) with its config and tokenizer."""
    check_dtype(dtype, "export")
    refuse_adapter(run)
    source = choose_checkpoint(run, step).path
    description = run / "model"
    if is_custom(run):
        return _export_custom(source, output, dtype)
    if not (description / "config.json").is_file():
        raise UserMistake(f"{run} is not a shoal run: it has no model/config.json.")
    check_output(output)
    with temporary_folder(output, description.iterdir()) as part:
        reader = SliceReader(source)
        model = prepare_model(read_blueprint(description)).model
        itemsize = 4 if dtype is None else DTYPES[dtype].itemsize
        sizes = {name: itemsize * torch.Size(shape).numel() for name, shape in reader.shapes(MODEL).items()}
        write_shards(
            part,
            model,
            sizes,
            lambda name: reader.read_whole(MODEL + name),
            dtype=dtype,
            shard_bytes=shard_bytes,
            report=report,
        )
    return output


def is_custom(run: Path) -> bool:
    """Whether `run` is that of a custom loop, whose model only its script can build."""
    directory = RunDirectory(run)
    if not directory.exists:
        return False
    model = load_config(directory.config, needs_model=False).model
    return model.from_ is None and model.shape is None


def _export_custom(source: Path, output: Path, dtype: str | None) -> Path:
    """The weights alone, by the names of the script's model: `model.load_state_dict(load_file(…))`."""
    check_output(output)
    with temporary_folder(output, []) as part:
        reader = SliceReader(source)
        found = {name: reader.read_whole(MODEL + name) for name in reader.shapes(MODEL)}
        if dtype is not None:
            found = {name: one.to(DTYPES[dtype]) if one.is_floating_point() else one for name, one in found.items()}
        save_file(found, part / "model.safetensors", metadata={"format": "pt"})
    return output
