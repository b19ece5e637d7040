"""Train a config, or forecast or preview what that would do."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from shoal.api.arguments import as_list, check_at_least, check_choice, check_hooks, check_object
from shoal.config import Config, config_from_mapping, load_config
from shoal.config.load import overrides_of
from shoal.imports import importing
from shoal.launch.first_look import check_folder, check_inputs
from shoal.mistakes import UserMistake
from shoal.paths import user_path

if TYPE_CHECKING:
    from shoal.objectives import Objective
    from shoal.plan.report import Plan
    from shoal.train.hooks import Hook
    from shoal.train.loop import Summary
    from shoal.train.preview import Preview


AnyConfig: TypeAlias = Config | Mapping[str, Any] | Path | str


def read(
    config: AnyConfig | None,
    overrides: Sequence[str] = (),
    values: Mapping[str, Any] | None = None,
    *,
    planned: bool = False,
    needs_model: bool = True,
) -> Config:
    """The config itself, the one that a mapping describes, or that of a YAML file. `values`, such as
    {"train": {"steps": 9}}, replace what it says, and `overrides`, such as "train.steps=9", replace both."""
    changes = [*overrides_of(values or {}), *as_list(overrides)]
    if isinstance(config, Config):
        if not changes:
            return config
        config = config.model_dump(mode="json", exclude_unset=True)
    if isinstance(config, Mapping):
        return config_from_mapping(config, changes, planned=planned, needs_model=needs_model)
    if config is not None and not isinstance(config, str | os.PathLike):
        raise UserMistake(f"A config is a YAML file, a mapping or a Config, not a {type(config).__name__}.")
    return load_config(config, changes, planned=planned, needs_model=needs_model)


def train(
    config: AnyConfig,
    *,
    overrides: Sequence[str] = (),
    runs: Path | str | None = None,
    resume: bool | Literal["auto"] = False,
    start_from: Path | str | None = None,
    overwrite: bool = False,
    max_restarts: int = 0,
    hooks: Sequence[Hook] = (),
    profile: int | None = None,
    objective: Objective | None = None,
    **values: Any,
) -> Summary:
    """Train as `config` says, a `Config`, a mapping or a YAML file, under `runs`/NAME (default: `config.run_dir`/NAME).
    See `shoal train --help` for what the options mean. `values` are blocks and keys of the config, such as
    `train={"steps": 9}`, which replace its own; `overrides`, such as "train.steps=9", replace both.

    `hooks` see the events of the run: see `shoal.train.hooks`. `objective` replaces that of `train.objective`, on the
    same data: see `shoal.objectives.objective`. With either and several devices, start the program with torchrun.
    `profile` is the number of steps to profile; the result is in RUN/profile, and `read_profile` returns it.
    """
    check_start(resume, max_restarts, hooks)
    check_at_least("profile", profile, 1)
    check_object("objective", objective)
    config = read(config, overrides, values)
    runs = None if runs is None else user_path(runs, "run_dir")
    if resume != "auto":
        check_folder(config, runs, resume=resume, overwrite=overwrite)
    check_inputs(config, resume=bool(resume))
    with importing("torch"):
        from shoal.checkpoint.choose import checkpoint_in
        from shoal.launch.run import start

    return start(
        config,
        runs=runs,
        resume=resume,
        start_from=None if start_from is None else checkpoint_in(user_path(start_from, "--from")),
        overwrite=overwrite,
        max_restarts=max_restarts,
        hooks=hooks,
        profile=profile,
        objective=objective,
    )


def check_start(resume: Any, max_restarts: int, hooks: Any) -> None:
    """The arguments of `train` that `shoal.init` has too."""
    check_choice("resume", resume, (True, False, "auto"))
    check_at_least("max_restarts", max_restarts, 0)
    check_hooks(hooks)


def read_profile(run: Path | str) -> dict[str, Any] | None:
    """What `train(..., profile=N)` has found in the run's folder: see docs/profile.md. None if it was not profiled."""
    from shoal.observe.profile.summary import read_profile

    return read_profile(Path(run))


def plan(
    config: AnyConfig,
    *,
    overrides: Sequence[str] = (),
    system: str = "shoal",
    traits: Sequence[str] = (),
    **values: Any,
) -> Plan:
    """Forecast memory and speed of `config` on the hardware it names, and what would change them. `overrides` and
    `values` are those of `train`.

    `load_config(..., planned=True)` also accepts features that are not implemented yet. `system` selects another
    system's implementation, such as torchtitan, or huggingface@2023-09 with the libraries of that month; `traits`
    are options of it that no key is for, such as overlaps_gradients=true.
    """
    from shoal.models.peft_config import follow_adapter
    from shoal.plan.report import make_plan

    return make_plan(follow_adapter(read(config, overrides, values, planned=True)), system=system, traits=traits)


def dry_run(config: AnyConfig, *, overrides: Sequence[str] = (), **values: Any) -> Preview:
    """Preview what `train` would do: counts, batch sizes, the learning rate, the first sequence. Trains nothing.
    `overrides` and `values` are those of `train`."""
    config = read(config, overrides, values)
    check_inputs(config)
    with importing("torch"):
        from shoal.launch.run import dry_run

    return dry_run(config)
