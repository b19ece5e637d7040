"""The run that `--overwrite` replaces: moved aside, and deleted once the new run has a complete checkpoint.

Every step is one rename, so that a kill at any moment leaves the old run either in its place or aside.
"""

import os
import shutil
from contextlib import suppress
from pathlib import Path

from shoal.files import sync


class ReplacedRun:
    """The earlier run of the folder `run`. No run can have a name like those used here: see `Config.name`."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.path = run.with_name(f"{run.name}~replaced")
        self.removed = run.with_name(f".{run.name}.removed")  # while it is deleted

    @property
    def exists(self) -> bool:
        return is_run(self.path)

    def set_aside(self) -> None:
        """Move the run out of its folder. If an earlier one is aside, because none that was to replace it had a
        checkpoint, that one is kept and the latest is deleted: it has none either."""
        if self.exists and not has_checkpoint(self.run):
            self._remove(self.run)
        else:
            self.delete()
            self.run.rename(self.path)
            sync(self.run.parent)

    def restore(self) -> None:
        """Put the run back in its place; what the new one wrote is deleted."""
        self._remove(self.run)
        self.path.rename(self.run)
        sync(self.run.parent)

    def delete(self) -> None:
        self._remove(self.path)

    def _remove(self, folder: Path) -> None:
        """Renamed first: a folder that is half deleted must not be taken for a run."""
        self.finish_removal()
        with suppress(FileNotFoundError):
            folder.rename(self.removed)
        self.finish_removal()

    def finish_removal(self) -> None:
        shutil.rmtree(self.removed, ignore_errors=True)


def is_run(folder: Path) -> bool:
    """Whether a run was created in `folder`: a config alone may be a file that somebody wrote."""
    return os.path.isfile(folder / "config.yaml") and os.path.isdir(folder / "checkpoints")


def has_checkpoint(run: Path) -> bool:
    """Whether a checkpoint was completed: the manifest is written last."""
    return any((run / "checkpoints").glob("*/MANIFEST.json"))
