"""Train a config, or forecast or preview what that would do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from shoal.config import Config
from shoal.imports import importing
from shoal.launch.first_look import check_inputs
from shoal.paths import user_path

if TYPE_CHECKING:
    from shoal.plan.report import Plan
    from shoal.train.hooks import Hook
    from shoal.train.loop import Summary
    from shoal.train.preview import Preview


def train(
    config: Config,
    *,
    runs: Path | str | None = None,
    resume: bool | Literal["auto"] = False,
    start_from: Path | str | None = None,
    overwrite: bool = False,
    max_restarts: int = 0,
    hooks: Sequence[Hook] = (),
) -> Summary:
    """Train as `config` says, under `runs`/NAME (default: `config.run_dir`/NAME); see `shoal train --help` for what the
    options mean.

    `hooks` see the events of the run: see `shoal.train.hooks`. With several devices, start the program with torchrun.
    """
    check_inputs(config, resume=bool(resume))
    with importing("torch"):
        from shoal.launch.run import start

    return start(
        config,
        runs=None if runs is None else user_path(runs, "run_dir"),
        resume=resume,
        start_from=None if start_from is None else user_path(start_from, "--from"),
        overwrite=overwrite,
        max_restarts=max_restarts,
        hooks=hooks,
    )


def plan(config: Config, *, system: str = "shoal") -> Plan:
    """Forecast memory and speed of `config` on the hardware it names, and what would change them.

    `load_config(..., planned=True)` also accepts features that are not implemented yet. `system` selects another
    system's implementation, such as torchtitan.
    """
    from shoal.models.peft_config import follow_adapter
    from shoal.plan.report import make_plan

    return make_plan(follow_adapter(config), system=system)


def dry_run(config: Config) -> Preview:
    """Preview what `train` would do: counts, batch sizes, the learning rate, the first sequence. Trains nothing."""
    check_inputs(config)
    with importing("torch"):
        from shoal.launch.run import dry_run

    return dry_run(config)
