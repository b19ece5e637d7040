"""Datasets that come with scanpy, by name: `scanpy:pbmc68k_reduced` needs no download."""

from importlib.util import find_spec
from pathlib import Path

from shoal.mistakes import UserMistake, suggestion

PREFIX = "scanpy:"


def bundled_file(entry: str, key: str) -> Path:
    """The file that `entry` names, inside the package scanpy, which is not imported."""
    found = find_spec("scanpy")
    if found is None or found.origin is None:
        raise UserMistake(f"{key} {entry} needs the package scanpy: pip install 'shoal[cells]'.")
    folder = Path(found.origin).parent / "datasets"
    there = {file.stem.removeprefix("10x_"): file for file in sorted(folder.glob("*.h5ad"))}
    name = entry.removeprefix(PREFIX)
    if name not in there:
        raise UserMistake(
            f"{key} {entry}: scanpy comes with {', '.join(there) or 'no dataset'}." + suggestion(name, there)
        )
    return there[name]
