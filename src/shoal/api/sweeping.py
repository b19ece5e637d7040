"""Train a config with several values of some keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from shoal.api.arguments import as_list, check_choice

if TYPE_CHECKING:
    from shoal.launch.sweep.run import Outcome


def sweep(
    file: Path | str,
    overrides: Sequence[str] = (),
    *,
    name: str | None = None,
    runs: Path | str | None = None,
    random: int | None = None,
    listed: Path | str | None = None,
    trials: int | None = None,
    pruner: str = "median",
    seed: int = 0,
    metric: str | None = None,
    on: Literal["local", "slurm"] = "local",
    retry_failed: bool = False,
    anyway: bool = False,
    dry_run: bool = False,
    plot: Path | str | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> Outcome:
    """Run what is left of a sweep over `file`, and compare its members; see `shoal sweep --help` for what the options
    mean. `trials` members are chosen by Optuna."""
    from shoal.launch.sweep.run import Request
    from shoal.launch.sweep.run import sweep as run_sweep

    check_choice("on", on, ("local", "slurm"))
    check_choice("pruner", pruner, ("median", "hyperband", "none"))

    def path(given: Path | str | None) -> Path | None:
        return None if given is None else Path(given)

    request = Request(
        Path(file),
        tuple(as_list(overrides)),
        name=name,
        runs=path(runs),
        random=random,
        listed=path(listed),
        trials=trials,
        pruner=pruner,
        seed=seed,
        metric=metric,
        on=on,
        retry_failed=retry_failed,
        anyway=anyway,
        dry_run=dry_run,
        plot=path(plot),
    )
    return run_sweep(request, report)
