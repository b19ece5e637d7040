"""Selects the checkpoint of a run to load: for export, generation and evaluation, and for `--from`."""

from pathlib import Path

from shoal.checkpoint.store import Checkpoint, damaged_file, list_complete
from shoal.config.given_run import no_checkpoints
from shoal.mistakes import UserMistake


def choose_checkpoint(run: Path, step: int | None) -> Checkpoint:
    """Return the newest complete checkpoint of `run`, or that of `step`, after verifying its hashes.

    Resuming falls back to an older checkpoint if the newest is damaged. Here that would silently return other weights
    than the user asked for, so a damaged checkpoint is an error.
    """
    if not (run / "checkpoints").is_dir():
        raise no_checkpoints(run)
    complete = list_complete(run / "checkpoints")
    matching = [one for one in complete if step is None or one.step == step]
    if not matching:
        wanted = "" if step is None else f" of step {step}"
        others = f"; available steps: {', '.join(str(one.step) for one in complete)}" if complete else ""
        raise UserMistake(f"{run} holds no complete checkpoint{wanted}{others}.")
    chosen = matching[-1]
    if (file := damaged_file(chosen)) is not None:
        raise UserMistake(f"{chosen.path / file} is damaged: its contents do not match the hash in the manifest.")
    return chosen


def checkpoint_in(folder: Path) -> Path:
    """The checkpoint that `--from` names: `folder` itself, or the newest complete one if it is a run's folder."""
    complete = list_complete(folder / "checkpoints") if (folder / "checkpoints").is_dir() else []
    return complete[-1].path if complete else folder
