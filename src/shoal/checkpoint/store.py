"""Checkpoints as folders: whole, or not there.

`MANIFEST.json` lists every other file with size and hash, and is written and synced last. A folder without a valid
manifest does not exist for us; `latest` names the newest one that has it, and moves by an atomic rename.
"""

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.files import sync, write_atomically

MANIFEST = "MANIFEST.json"
FORMAT = 1


@dataclass(frozen=True)
class Checkpoint:
    """A folder with a manifest."""

    path: Path
    step: int
    metrics: dict[str, float]
    files: dict[str, dict[str, Any]]

    @property
    def size(self) -> int:
        return sum(int(entry["size"]) for entry in self.files.values())


def folder_for(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step-{step:08d}"


def begin(checkpoints: Path, step: int) -> Path:
    """An empty folder for this step. What an interrupted save left there goes away."""
    folder = folder_for(checkpoints, step)
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    return folder


def describe(path: Path) -> dict[str, Any]:
    """Size and hash of a file, after making sure that it is on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"size": path.stat().st_size, "sha256": digest}


def finish(folder: Path, step: int, files: dict[str, dict[str, Any]], metrics: dict[str, float]) -> Checkpoint:
    """Make the folder whole: the manifest, synced, and then `latest`."""
    manifest = {"format": FORMAT, "step": step, "metrics": metrics, "files": files}
    sync(folder)
    write_atomically(folder / MANIFEST, json.dumps(manifest, indent=1) + "\n")
    write_atomically(folder.parent / "latest", folder.name + "\n")
    return Checkpoint(folder, step, metrics, files)


def read_manifest(folder: Path) -> Checkpoint | None:
    """The checkpoint in `folder`, or None if its manifest is missing, or is not one, or names files that are not
    there in full. Contents are not hashed: see `damaged_file`."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        files = {str(name): dict(entry) for name, entry in manifest["files"].items()}
        checkpoint = Checkpoint(folder, int(manifest["step"]), dict(manifest["metrics"]), files)
        if manifest["format"] != FORMAT:
            return None
        for name, entry in files.items():
            if name in (".", "..") or Path(name).name != name or (folder / name).stat().st_size != entry["size"]:
                return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return checkpoint


def list_whole(checkpoints: Path) -> list[Checkpoint]:
    """All whole checkpoints, oldest first."""
    found = (read_manifest(folder) for folder in sorted(checkpoints.glob("step-*")) if folder.is_dir())
    return sorted((one for one in found if one is not None), key=lambda one: one.step)


def damaged_file(checkpoint: Checkpoint) -> str | None:
    """The first file whose contents are not what was written, or None."""
    for name, entry in checkpoint.files.items():
        try:
            with (checkpoint.path / name).open("rb") as file:
                whole = hashlib.file_digest(file, "sha256").hexdigest() == entry.get("sha256")
        except OSError:  # gone, or the disk does not give it back: damaged all the same
            whole = False
        if not whole:
            return name
    return None


def remove(checkpoint: Checkpoint) -> None:
    """The manifest goes first, so that a half-removed folder is not taken for a whole one."""
    (checkpoint.path / MANIFEST).unlink()
    shutil.rmtree(checkpoint.path)


def set_aside(checkpoints: Path, above: int) -> list[Path]:
    """A run that goes on from step `above` leaves what lies beyond it, whole or damaged, to another branch of history.

    Those folders are renamed, so that neither resuming nor retention takes them for this run's, and nothing is lost.
    """
    moved = []
    for folder in sorted(checkpoints.glob("step-*")):
        number = folder.name.removeprefix("step-")
        if number.isdigit() and int(number) > above:
            aside = folder.with_name(f"abandoned-{number}")
            if aside.exists():
                shutil.rmtree(aside)
            moved.append(folder.replace(aside))
    return moved
