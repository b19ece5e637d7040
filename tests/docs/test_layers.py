"""Imports of src/shoal go down the layers of docs/code.md, as it says."""

import re
from collections.abc import Iterator
from pathlib import Path

from benchmarks.pictures.layout import layers

SOURCE = Path(__file__).parents[2] / "src" / "shoal"
IMPORT = re.compile(r"^ *(?:from shoal(?:\.(\w+))?[\w.]* import (.+)|import shoal\.(\w+))", re.MULTILINE)


def parts_of(path: Path) -> str:
    """'train/' for a file in it, 'files.py' for a module of its own."""
    first, *inside = path.relative_to(SOURCE).parts
    return f"{first}/" if inside else first


def imported(path: Path) -> Iterator[str]:
    """The folders and modules of shoal that a file imports, anywhere in it."""
    for inside, names, module in IMPORT.findall(path.read_text()):
        for name in [inside or module] if inside or module else re.findall(r"\w+", names):
            if (SOURCE / name).is_dir():
                yield f"{name}/"
            elif (SOURCE / f"{name}.py").is_file():
                yield f"{name}.py"


def test_every_folder_and_module_has_its_layer():
    listed = {part.name for parts in layers() for part in parts}
    there = {parts_of(path) for path in SOURCE.rglob("*.py")} - {"__init__.py", "__main__.py"}
    assert there == listed


def test_imports_go_down():
    stacked = layers()
    height = {part.name: -index for index, parts in enumerate(stacked) for part in parts}
    beside = {part.name: {part.name, *part.beside} for parts in stacked for part in parts}
    wrong = [
        f"{path.relative_to(SOURCE)} imports {found}"
        for path in SOURCE.rglob("*.py")
        if (own := parts_of(path)) in height
        for found in imported(path)
        if height[found] >= height[own] and found not in beside[own]
    ]
    assert wrong == []
