"""docs/pictures/layout.svg: the layers of src/shoal, as docs/code.md lists them."""

import re
from dataclasses import dataclass
from pathlib import Path

from benchmarks.pictures.svg import Drawing

COLOURS = (
    "weights", "optimizer", "gradients", "activations", "head", "communication", "rest", "panel", "panel", "panel",
)  # fmt: skip
PAGE = Path(__file__).parents[2] / "docs" / "code.md"


@dataclass(frozen=True)
class Part:
    """A folder or module of a layer, and the others of its own layer that it may import."""

    name: str
    what: str
    beside: tuple[str, ...]


def layers() -> list[list[Part]]:
    """The layers of docs/code.md, the highest first."""
    block = PAGE.read_text(encoding="utf-8").split("```")[1]
    found: list[list[Part]] = [[]]
    for line in block.splitlines():
        if line.startswith("─"):
            found.append([])
        elif entry := re.match(r" (\w+(?:/|\.py))\s+(.*?)(?:\s+\(imports (.*)\))?$", line):
            beside = tuple(re.findall(r"\w+(?:/|\.py)", entry[3] or ""))
            found[-1].append(Part(entry[1], entry[2], beside))
    return found


def draw() -> str:
    stacked = layers()
    row, gap = 24, 10
    drawing = Drawing(
        800,
        60 + row * sum(len(parts) for parts in stacked) + (gap + 12) * len(stacked),
        "The layers of the source code",
        "From top to bottom: "
        + "; ".join(", ".join(part.name for part in parts) for parts in stacked)
        + ". A module imports from layers below its own, never from one above.",
    )
    drawing.text(16, 30, "src/shoal: imports go down, never up", "strong")
    y = 48.0
    for parts, colour in zip(stacked, COLOURS, strict=True):
        drawing.box(44, y, 740, row * len(parts) + 12, colour)
        for part in parts:
            drawing.text(58, y + 22, part.name, "code strong")
            drawing.text(186, y + 22, part.what.replace("`", ""), "small")
            y += row
        y += gap + 12
    drawing.arrow((26, 50), (26, y - gap))
    return drawing.svg()
