"""A training loop of one's own: `shoal.init`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shoal.api.training import AnyConfig, check_start, read
from shoal.imports import importing
from shoal.paths import user_path

if TYPE_CHECKING:
    from shoal.launch.custom_loop import CustomLoop
    from shoal.train.hooks import Hook


def init_run(
    config: AnyConfig | None = None,
    *,
    overrides: Sequence[str] = (),
    resume: bool | Literal["auto"] = False,
    start_from: Path | str | None = None,
    overwrite: bool = False,
    max_restarts: int = 0,
    hooks: Sequence[Hook] = (),
    **values: Any,
) -> CustomLoop:
    """Start or join the run of a training loop that is yours: `shoal.init`.

    `config` is a YAML file, a mapping or a `Config`, without `model` and `data`. `values` are its blocks and keys, such
    as `train={"steps": 9}`, and replace its own; `overrides`, such as "train.steps=9", replace both. With several
    devices (`hardware.devices`, or all that are present) and no launcher, this program is run as one process per
    device, and this call exits with their status; call it first. `resume`: continue from the newest checkpoint; auto:
    if there is one.
    """
    with importing("torch"):
        from shoal.checkpoint.choose import checkpoint_in
        from shoal.launch.custom import JoinedRun, launch_script, must_launch, report_mistakes
        from shoal.launch.custom_loop import CustomLoop

    report_mistakes()
    check_start(resume, max_restarts, hooks)
    found = read(config, overrides, values, needs_model=False)
    checkpoint = None if start_from is None else checkpoint_in(user_path(start_from, "start_from"))
    if processes := must_launch(found, max_restarts):
        launch_script(
            found,
            processes,
            resume=resume,
            start_from=checkpoint,
            overwrite=overwrite,
            max_restarts=max_restarts,
        )
    import torch

    torch.manual_seed(found.seed)  # the same on every rank: models are initialized alike
    return CustomLoop(JoinedRun(found, resume=resume, start_from=checkpoint, overwrite=overwrite, hooks=hooks))
