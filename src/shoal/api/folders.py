"""Checkpoints of a run and Hugging Face folders: list, convert, merge."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.api.arguments import as_list
from shoal.config.given_run import run_folder
from shoal.imports import importing
from shoal.mistakes import UserMistake
from shoal.paths import user_path

if TYPE_CHECKING:
    from shoal.checkpoint.inspect import Listed
    from shoal.convert.configs.translation import Translation
    from shoal.convert.imports import Imported
    from shoal.use.merge import Merged


def export(
    run: Path | str,
    output: Path | str | None = None,
    *,
    to: str = "hf",
    adapter: bool = False,
    step: int | None = None,
    dtype: str | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> Path:
    """Export a run's weights, config and tokenizer as a Hugging Face folder (by default RUN/hf), or with `to` litgpt as
    a checkpoint of LitGPT (by default RUN/litgpt).

    With `adapter`, export the adapter of a LoRA run as a folder that PEFT loads (by default RUN/adapter).
    """
    if to not in ("hf", "litgpt"):
        raise UserMistake(f"A run is exported to hf or litgpt, not {to}.")
    written = None if output is None else user_path(output, "--output")
    folder = run_folder(run)
    if to == "litgpt":
        if adapter:
            raise UserMistake("--adapter is for PEFT, and LitGPT has another format; shoal merge merges an adapter.")
        with importing("torch"):
            from shoal.convert.litgpt_export import export_litgpt

        return export_litgpt(folder, written or folder / "litgpt", step=step, dtype=dtype, report=report)
    if adapter:
        with importing("torch"):
            from shoal.convert.peft import export_adapter

        return export_adapter(folder, written or folder / "adapter", step=step, dtype=dtype, report=report)
    with importing("torch"):
        from shoal.convert.export import export_hf

    return export_hf(folder, written or folder / "hf", step=step, dtype=dtype, report=report)


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
    folder = run_folder(run)
    with importing("torch"):
        from shoal.use.merge import merge_run

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


# Files of systems that are not translated, by suffix: what they are, and what to do.
UNREAD = {
    ".toml": "TOML, which is not translated; docs/coming-from/torchtitan.md has torchtitan's keys and ours.",
    ".py": "a Python script, which is neither read nor run: give its config, or the command that starts it behind two "
    "dashes (docs/coming-from.md).",
    **dict.fromkeys(
        (".jsonl", ".csv", ".parquet", ".arrow", ".h5ad"), "data, which needs no import: set data.path to it."
    ),
    ".ipynb": "a notebook, which is neither read nor run; docs/coming-from.md has the words of other systems and ours.",
}


def is_foreign_config(files: Sequence[Path | str], command: str = "") -> bool:
    """Whether `shoal import` is given configs or commands of another system, and not a checkpoint."""
    from shoal.convert.configs.recognise import is_config

    paths = [user_path(file, "FILE") for file in as_list(files)]
    if (missing := next((path for path in paths if not path.exists()), None)) is not None:
        raise UserMistake(f"{missing} does not exist; give a config, a script or a checkpoint of another system.")
    if (unread := next((path for path in paths if path.suffix in UNREAD and path.is_file()), None)) is not None:
        raise UserMistake(f"{unread} is {UNREAD[unread.suffix]}")
    if (run := next((path for path in paths if (path / "metrics.jsonl").is_file()), None)) is not None:
        raise UserMistake(f"{run} is a run of shoal: shoal export {run} --to hf writes its weights.")
    configs = [path for path in paths if is_config(path)]
    if (configs or command or len(paths) > 1) and len(configs) != len(paths):
        odd = next(path for path in paths if path not in configs)
        raise UserMistake(f"{odd} is not a config or a script; a checkpoint is imported alone, and configs together.")
    return bool(configs or command)


def import_config(
    files: Sequence[Path | str],
    command: str = "",
    output: Path | str | None = None,
    *,
    overwrite: bool = False,
) -> Translation:
    """Translate configs and a command of other systems, which belong together, to a YAML file.

    By default it is written beside the first file, or for a command alone as NAME.yaml in the current folder.
    """
    from dataclasses import replace

    from shoal.convert.configs.translation import default_output, translate_configs, write_translation

    paths = [user_path(file, "FILE") for file in as_list(files)]
    translated = translate_configs(paths, command)
    written = default_output(paths, translated) if output is None else user_path(output, "--output")
    write_translation(translated, written, overwrite=overwrite)
    return replace(translated, output=str(written))


def describe_import(translated: Translation) -> str:
    """What each key of theirs became, what has no meaning here, and what could not be carried, as text."""
    from shoal.convert.configs.text import report

    return report(translated)


def checkpoints(
    run: Path | str, *, verify: bool = False, report: Callable[[str], None] = lambda _: None
) -> list[Listed]:
    """List a run's checkpoints, oldest first; with `verify`, compare every file with its hash."""
    from shoal.checkpoint.inspect import list_checkpoints

    return list_checkpoints(user_path(run, "The run"), verify=verify, report=report)
