"""Checkpoints as folders: whole, or not there.

`MANIFEST.json` lists every other file with size and hash, and is written and synced last. A folder without a valid
manifest does not exist for us; `latest` names the newest one that has it, and moves by an atomic rename.
"""

import errno
import hashlib
import json
import shutil
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.files import sync, write_atomically

MANIFEST = "MANIFEST.json"
PARTS = ("progress.json", "rank-*.safetensors")
FORMAT = 2
REMOVED = "removed-"


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


def step_of(folder: Path) -> int | None:
    """The step that a folder's name says it is of, if it is a checkpoint's."""
    number = folder.name.removeprefix("step-")
    step = int(number) if number.isdecimal() else -1
    return step if folder.name == folder_for(folder.parent, step).name and folder.is_dir() else None


def begin(checkpoints: Path, step: int) -> Path:
    """An empty folder for this step. What an interrupted save left there goes away."""
    folder = folder_for(checkpoints, step)
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()  # and no parents: a run whose folder has vanished is not quietly begun anew
    return folder


def leave_hashes(folder: Path, rank: int, files: dict[str, dict[str, Any]]) -> None:
    """For `finish`: what this rank wrote."""
    (folder / f"hashes-{rank:05d}.json").write_text(json.dumps(files))


def finish(folder: Path, step: int, metrics: dict[str, float], ranks: int = 1) -> Checkpoint:
    """Make the folder whole, once all `ranks` have left their hashes: the manifest, synced, and then `latest`."""
    files: dict[str, dict[str, Any]] = {}
    listings = sorted(folder.glob("hashes-*.json"))
    if len(listings) != ranks:  # a shared disk may show one machine what another wrote a while later
        raise OSError(errno.ESTALE, "some ranks' files are not to be seen")
    for listing in listings:
        files.update(json.loads(listing.read_text()))
        listing.unlink()
    manifest = {"format": FORMAT, "step": step, "metrics": metrics, "files": files}
    sync(folder)
    write_atomically(folder / MANIFEST, json.dumps(manifest, indent=1) + "\n")
    write_atomically(folder.parent / "latest", folder.name + "\n")
    return Checkpoint(folder, step, metrics, files)


def read_manifest(folder: Path) -> Checkpoint | None:
    """The checkpoint in `folder`, or None if there is none: see `examine`. Contents are not hashed: see
    `damaged_file`."""
    found = examine(folder)
    return found if isinstance(found, Checkpoint) else None


def examine(folder: Path) -> Checkpoint | str:
    """The checkpoint in `folder`, or the name of the file that is missing, has another size, or is no manifest."""
    wrong = MANIFEST
    try:
        if not (folder / MANIFEST).is_file():  # nor a pipe, which would be read for ever
            return MANIFEST
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files = {str(name): dict(entry) for name, entry in manifest["files"].items()}
        metrics = {str(name): float(value) for name, value in manifest["metrics"].items()}
        checkpoint = Checkpoint(folder, int(manifest["step"]), metrics, files)
        # A folder that was given another name is not of another step.
        if manifest["format"] != FORMAT or step_of(folder) not in (None, checkpoint.step):
            return MANIFEST
        "".join([*metrics, *files]).encode()  # half a character, which JSON can spell, could not be printed
        if any(Path(name).name != name for name in files):
            return MANIFEST
        # What else lies there is not ours; but a manifest that forgets a part of the checkpoint is not its manifest.
        if not {path.name for pattern in PARTS for path in folder.glob(pattern)} <= set(files):
            return MANIFEST
        for name, entry in files.items():
            wrong = name
            if not _is_file_of_size(folder / name, entry["size"]):
                return name
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return wrong
    return checkpoint


def list_broken(checkpoints: Path) -> list[tuple[int, Path]]:
    """(step, file) for every folder that was whole once, and the file because of which it is not any more."""
    found = []
    for folder in sorted(checkpoints.glob("step-*")):
        step, wrong = step_of(folder), examine(folder)
        if step is not None and isinstance(wrong, str) and (folder / MANIFEST).exists():
            found.append((step, folder / wrong))
    return found


def _is_file_of_size(path: Path, size: object) -> bool:
    """Not a pipe or a device, which have no size and no end."""
    found = path.stat()
    return stat.S_ISREG(found.st_mode) and found.st_size == size


def list_whole(checkpoints: Path) -> list[Checkpoint]:
    """All whole checkpoints, oldest first."""
    found = (read_manifest(folder) for folder in sorted(checkpoints.glob("step-*")) if step_of(folder) is not None)
    return sorted((one for one in found if one is not None), key=lambda one: one.step)


def damaged_file(checkpoint: Checkpoint, names: Iterable[str] | None = None) -> str | None:
    """The first file (of `names`, if given) whose contents are not what was written, or None."""
    for name in checkpoint.files if names is None else names:
        entry = checkpoint.files[name]
        try:
            with (checkpoint.path / name).open("rb") as file:
                whole = hashlib.file_digest(file, "sha256").hexdigest() == entry.get("sha256")
        except OSError:  # gone, or the disk does not give it back: damaged all the same
            whole = False
        if not whole:
            return name
    return None


def remove(checkpoint: Checkpoint) -> None:
    """The name goes first: what a removal leaves that is cut off is no checkpoint, and `clear_removed` knows it."""
    shutil.rmtree(checkpoint.path.replace(checkpoint.path.with_name(f"{REMOVED}{checkpoint.step:08d}")))


def clear_removed(checkpoints: Path) -> None:
    """End removals that were cut off, by a kill or by a disk that would not."""
    for folder in checkpoints.glob(f"{REMOVED}*"):
        shutil.rmtree(folder, ignore_errors=True)


def set_aside(checkpoints: Path, above: int) -> list[Path]:
    """A run that goes on from step `above` leaves what lies beyond it, whole or damaged, to another branch of history.

    Those folders are renamed, so that neither resuming nor retention takes them for this run's, and nothing is lost.
    What a save left that never came to its end is nothing, and goes, as does what a removal left.
    """
    clear_removed(checkpoints)
    moved = []
    for folder in sorted(checkpoints.glob("step-*")):
        number = folder.name.removeprefix("step-")
        if number.isdigit() and int(number) > above:
            if not (folder / MANIFEST).exists():
                shutil.rmtree(folder)
                continue
            aside = folder.with_name(f"abandoned-{number}")
            if aside.exists():
                shutil.rmtree(aside)
            moved.append(folder.replace(aside))
    return moved
