"""Checkpoints of a run and Hugging Face folders: list, convert, merge."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.imports import importing
from shoal.paths import user_path

if TYPE_CHECKING:
    from shoal.checkpoint.inspect import Listed
    from shoal.convert.imports import Imported
    from shoal.use.merge import Merged


def export(
    run: Path | str,
    output: Path | str | None = None,
    *,
    adapter: bool = False,
    step: int | None = None,
    dtype: str | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> Path:
    """Export a run's weights, config and tokenizer as a Hugging Face folder (by default RUN/hf).

    With `adapter`, export the adapter of a LoRA run as a folder that PEFT loads (by default RUN/adapter).
    """
    folder = user_path(run, "The run")
    if adapter:
        with importing("torch"):
            from shoal.convert.peft import export_adapter

        output = folder / "adapter" if output is None else user_path(output, "--output")
        return export_adapter(folder, output, step=step, dtype=dtype, report=report)
    with importing("torch"):
        from shoal.convert.export import export_hf

    output = folder / "hf" if output is None else user_path(output, "--output")
    return export_hf(folder, output, step=step, dtype=dtype, report=report)


def merge(
    run: Path | str,
    output: Path | str | None = None,
    *,
    step: int | None = None,
    dtype: str | None = None,
    compare: bool = True,
    device: str = "auto",
    report: Callable[[str], None] = lambda _: None,
) -> Merged:
    """Merge the adapter of a LoRA run into its base, and write a Hugging Face folder (by default RUN/merged).

    `dtype` is by default that of the base. With `compare`, the logits of the merged model are compared with those of
    the run, on `device`.
    """
    with importing("torch"):
        from shoal.use.merge import merge_run

    folder = user_path(run, "The run")
    output = folder / "merged" if output is None else user_path(output, "--output")
    return merge_run(folder, output, step=step, dtype=dtype, compare=compare, device=device, report=report)


def import_checkpoint(
    source: Path | str,
    output: Path | str,
    *,
    model: Path | str | None = None,
    dtype: str | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> Imported:
    """Convert a LitGPT, DeepSpeed or FSDP checkpoint to a Hugging Face folder. No code in its files is run.

    `model` is the folder with the config.json and tokenizer of the weights; by default they are looked for next to the
    weights.
    """
    with importing("torch"):
        from shoal.convert.imports import import_hf

    described = None if model is None else str(model)
    source, output = user_path(source, "The checkpoint"), user_path(output, "OUTPUT")
    return import_hf(source, output, model=described, dtype=dtype, report=report)


def checkpoints(
    run: Path | str, *, verify: bool = False, report: Callable[[str], None] = lambda _: None
) -> list[Listed]:
    """List a run's checkpoints, oldest first; with `verify`, compare every file with its hash."""
    from shoal.checkpoint.inspect import list_checkpoints

    return list_checkpoints(user_path(run, "The run"), verify=verify, report=report)
