"""Draw every picture of docs/pictures: `python -m benchmarks.pictures [FOLDER]`."""

import sys
from pathlib import Path

from benchmarks.pictures import checkpoint, layout, memory, mesh, pipeline, shardings, strategy

PICTURES = {
    "checkpoint": checkpoint.draw,
    "layout": layout.draw,
    "memory": memory.draw,
    "mesh": mesh.draw,
    "pipeline": pipeline.draw,
    "shardings": shardings.draw,
    "strategy": strategy.draw,
}
FOLDER = Path(__file__).parents[2] / "docs" / "pictures"


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        (folder / f"{name}.svg").write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
