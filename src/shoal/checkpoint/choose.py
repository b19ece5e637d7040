"""Which checkpoint of a finished or running run somebody means who only wants its weights."""

from pathlib import Path

from shoal.checkpoint.store import Checkpoint, damaged_file, list_whole
from shoal.mistakes import UserMistake


def choose_checkpoint(run: Path, step: int | None) -> Checkpoint:
    """The newest whole checkpoint of `run`, or that of `step`, after comparing its files with their hashes.

    Resuming goes back to an older one when the newest is damaged; here that would hand out weights nobody asked for.
    """
    if not (run / "checkpoints").is_dir():
        raise UserMistake(f"{run} holds no checkpoints; give the folder of a run, such as runs/NAME.")
    whole = list_whole(run / "checkpoints")
    fitting = [one for one in whole if step is None or one.step == step]
    if not fitting:
        wanted = "" if step is None else f" of step {step}"
        others = f"; there are those of {', '.join(str(one.step) for one in whole)}" if whole else ""
        raise UserMistake(f"{run} holds no whole checkpoint{wanted}{others}.")
    chosen = fitting[-1]
    if (file := damaged_file(chosen)) is not None:
        raise UserMistake(f"{chosen.path / file} is damaged: its contents are not what was saved.")
    return chosen
