"""The pages with measured figures, and the function that has the lines of each."""

from collections.abc import Callable

from benchmarks.figures.cells import cells, single_cells
from benchmarks.figures.encoders import encoders
from benchmarks.figures.finetune import finetune
from benchmarks.figures.front import measured, readme
from benchmarks.figures.others import first_run, numbers, packing, python
from benchmarks.figures.performance import performance
from benchmarks.figures.results import Line

PAGES: dict[str, Callable[[], list[Line]]] = {
    "README.md": readme,
    "docs/measured.md": measured,
    "docs/performance.md": performance,
    "docs/finetune.md": finetune,
    "docs/numbers.md": numbers,
    "docs/encoders.md": encoders,
    "docs/cells.md": cells,
    "docs/python.md": python,
    "docs/tutorials/first-run.md": first_run,
    "docs/tutorials/single-cells.md": single_cells,
    "docs/howto/packing.md": packing,
}
