"""The folder of a run that a command is given: a wrong path is found before torch is imported."""

import os
from pathlib import Path

from shoal.mistakes import UserMistake, nearest
from shoal.paths import user_path


def run_folder(given: str | os.PathLike[str]) -> Path:
    """The folder; a UserMistake if it is not there. What is in it is not checked."""
    folder = user_path(given, "The run")
    if not folder.is_dir():
        raise no_run(folder)
    return folder


def no_checkpoints(run: Path) -> UserMistake:
    """The error for a folder without checkpoints, or for one that is not there."""
    if not run.is_dir() or (run / "MANIFEST.json").is_file():
        return no_run(run)
    return UserMistake(f"{run} holds no checkpoints; give the folder of a run, such as runs/NAME.")


def no_run(run: Path) -> UserMistake:
    """The error for a folder that is not a run, with a suggestion."""
    if (run / "MANIFEST.json").is_file():
        step = run.name.removeprefix("step-").lstrip("0")
        return UserMistake(f"{run} is a checkpoint; give its run: {run.parent.parent} --step {step}")
    if run.is_dir():
        return UserMistake(f"{run} is neither a run (no config.yaml) nor a Hugging Face folder (no config.json).")
    there = {found.parent for parent in (run.parent, Path("runs")) for found in parent.glob("*/config.yaml")}
    near = nearest(run.name, [folder.name for folder in there], limit=1)
    meant = sorted(str(folder) for folder in there if folder.name in near)
    hint = f"Did you mean {' or '.join(meant)}?" if meant else "Give the folder of one, such as runs/NAME."
    return UserMistake(f"There is no run {run}. {hint}")
