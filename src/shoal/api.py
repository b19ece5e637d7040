"""The Python door: the same functions that the commands call.

    import shoal.api

    config = shoal.api.load_config("run.yaml", ["train.lr=3e-4"])
    summary = shoal.api.train(config)
    shoal.api.export(summary.run, "model")

Importing this is cheap; torch is imported by the call that needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.config import Config, config_from_mapping, config_to_yaml, json_schema, load_config

if TYPE_CHECKING:
    from shoal.train.loop import Summary

__all__ = ["Config", "config_from_mapping", "config_to_yaml", "export", "json_schema", "load_config", "train"]


def train(
    config: Config,
    *,
    runs: Path | str = "runs",
    resume: bool = False,
    start_from: Path | str | None = None,
    overwrite: bool = False,
    max_restarts: int = 0,
) -> Summary:
    """Train as `config` says, under `runs`/NAME; see `shoal train --help` for what the options mean."""
    from shoal.launch.run import start

    return start(
        config,
        runs=Path(runs),
        resume=resume,
        start_from=None if start_from is None else Path(start_from),
        overwrite=overwrite,
        max_restarts=max_restarts,
    )


def export(
    run: Path | str,
    output: Path | str | None = None,
    *,
    step: int | None = None,
    dtype: str | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> Path:
    """Write a run's weights, config and tokenizer as a Hugging Face folder (RUN/hf unless `output` says otherwise)."""
    from shoal.checkpoint.export import export_hf

    folder = Path(run)
    return export_hf(folder, folder / "hf" if output is None else Path(output), step=step, dtype=dtype, report=report)
