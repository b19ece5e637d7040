"""Runs as jobs: submit them to a scheduler, see how they are, end them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.config import Config

if TYPE_CHECKING:
    from shoal.launch.schedulers import Submitted


def submit(
    config: Config, *, to: str = "slurm", resume: bool = False, dry_run: bool = False, anyway: bool = False
) -> Submitted:
    """Submit a run to a scheduler. With `dry_run`, or if it does not fit by the forecast and `anyway` is not set, the
    job is only rendered, and the result has no job ID."""
    from shoal.launch.schedulers import submit

    return submit(config, to=to, resume=resume, dry_run=dry_run, anyway=anyway)
