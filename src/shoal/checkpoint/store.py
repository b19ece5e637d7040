"""Checkpoint folders. A checkpoint is whole or it does not exist.

`MANIFEST.json` lists every other file with its size and hash. It is written and synced last, so a folder without a
valid manifest is not a checkpoint. `latest` names the newest checkpoint and is updated by an atomic rename.
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
    """A checkpoint folder with a valid manifest."""

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
    """Return the step in the name of a checkpoint folder, or None for any other path."""
    number = folder.name.removeprefix("step-")
    step = int(number) if number.isdecimal() else -1
    return step if folder.name == folder_for(folder.parent, step).name and folder.is_dir() else None


def begin(checkpoints: Path, step: int) -> Path:
    """Create an empty folder for this step. Files of an interrupted save are removed."""
    folder = folder_for(checkpoints, step)
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()  # without parents: a run whose folder was deleted must not silently recreate it
    return folder


def write_hashes(folder: Path, rank: int, files: dict[str, dict[str, Any]]) -> None:
    """Record the files of this rank, for `finish`."""
    (folder / f"hashes-{rank:05d}.json").write_text(json.dumps(files))


def finish(folder: Path, step: int, metrics: dict[str, float], ranks: int = 1) -> Checkpoint:
    """Complete the checkpoint after all `ranks` have written their hashes: write the manifest, then `latest`."""
    files: dict[str, dict[str, Any]] = {}
    listings = sorted(folder.glob("hashes-*.json"))
    if len(listings) != ranks:  # on a shared filesystem, files of another node may become visible late
        raise OSError(errno.ESTALE, "the files of some ranks are not visible")
    for listing in listings:
        files.update(json.loads(listing.read_text()))
        listing.unlink()
    manifest = {"format": FORMAT, "step": step, "metrics": metrics, "files": files}
    sync(folder)
    write_atomically(folder / MANIFEST, json.dumps(manifest, indent=1) + "\n")
    write_atomically(folder.parent / "latest", folder.name + "\n")
    return Checkpoint(folder, step, metrics, files)


def read_manifest(folder: Path) -> Checkpoint | None:
    """Return the checkpoint in `folder`, or None if there is none (see `examine`).

    Contents are not hashed; `damaged_file` does that.
    """
    found = examine(folder)
    return found if isinstance(found, Checkpoint) else None


def examine(folder: Path) -> Checkpoint | str:
    """Return the checkpoint in `folder`, or the name of the file that is missing, has another size, or is invalid."""
    wrong = MANIFEST
    try:
        if not (folder / MANIFEST).is_file():  # nor a named pipe, where reading would block forever
            return MANIFEST
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files = {str(name): dict(entry) for name, entry in manifest["files"].items()}
        metrics = {str(name): float(value) for name, value in manifest["metrics"].items()}
        checkpoint = Checkpoint(folder, int(manifest["step"]), metrics, files)
        # A renamed folder must not pass for another step.
        if manifest["format"] != FORMAT or step_of(folder) not in (None, checkpoint.step):
            return MANIFEST
        "".join([*metrics, *files]).encode()  # raises for lone surrogates, which JSON can express but nobody can print
        if any(Path(name).name != name for name in files):
            return MANIFEST
        # Other files in the folder are ignored, but the manifest must list every file of the checkpoint.
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
    """Return (step, file) for every folder with a manifest that is invalid or lists a missing or changed file."""
    found = []
    for folder in sorted(checkpoints.glob("step-*")):
        step, wrong = step_of(folder), examine(folder)
        if step is not None and isinstance(wrong, str) and (folder / MANIFEST).exists():
            found.append((step, folder / wrong))
    return found


def _is_file_of_size(path: Path, size: object) -> bool:
    """Pipes and devices are not accepted: they have no size and no end."""
    found = path.stat()
    return stat.S_ISREG(found.st_mode) and found.st_size == size


def list_complete(checkpoints: Path) -> list[Checkpoint]:
    """List all complete checkpoints, oldest first."""
    found = (read_manifest(folder) for folder in sorted(checkpoints.glob("step-*")) if step_of(folder) is not None)
    return sorted((one for one in found if one is not None), key=lambda one: one.step)


def damaged_file(checkpoint: Checkpoint, names: Iterable[str] | None = None) -> str | None:
    """Return the first file (of `names`, if given) that does not match its hash, or None."""
    for name in checkpoint.files if names is None else names:
        entry = checkpoint.files[name]
        try:
            with (checkpoint.path / name).open("rb") as file:
                intact = hashlib.file_digest(file, "sha256").hexdigest() == entry.get("sha256")
        except OSError:  # missing or unreadable counts as damaged
            intact = False
        if not intact:
            return name
    return None


def remove(checkpoint: Checkpoint) -> None:
    """Rename the folder, then delete it. An interrupted removal leaves no checkpoint; `clear_removed` completes it."""
    shutil.rmtree(checkpoint.path.replace(checkpoint.path.with_name(f"{REMOVED}{checkpoint.step:08d}")))


def clear_removed(checkpoints: Path) -> None:
    """Complete removals that were interrupted by a kill or a disk error."""
    for folder in checkpoints.glob(f"{REMOVED}*"):
        shutil.rmtree(folder, ignore_errors=True)


def set_aside(checkpoints: Path, above: int) -> list[Path]:
    """Rename the checkpoints after step `above`, when a run resumes from that step and its history branches there.

    Complete and damaged checkpoints are renamed, so that neither resuming nor retention uses them, and nothing is lost.
    The remains of interrupted saves and removals are deleted.
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
