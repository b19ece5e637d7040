"""The pages with measured figures, and the function that has the lines of each."""

from collections.abc import Callable
from functools import partial

from benchmarks.figures import recipes
from benchmarks.figures.benchmark_pages import data, gpu
from benchmarks.figures.cells import cells, single_cells
from benchmarks.figures.encoders import encoders
from benchmarks.figures.finetune import finetune
from benchmarks.figures.front import measured, readme
from benchmarks.figures.others import bench, first_run, numbers, packing, parallel, plan_accuracy, plan_page, python
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
    "docs/parallel.md": parallel,
    "docs/bench.md": bench,
    "docs/plan.md": plan_page,
    "docs/plan-accuracy.md": plan_accuracy,
    "docs/tutorials/first-run.md": first_run,
    "docs/tutorials/single-cells.md": single_cells,
    "docs/howto/packing.md": packing,
    "benchmarks/gpu/README.md": gpu,
    "benchmarks/data/README.md": data,
    **{f"recipes/{name}.yaml": partial(recipes.rank_of, name) for name in recipes.RANKS},
    "recipes/smollm2-lora.yaml": recipes.smollm2_lora,
    "recipes/smollm2-dpo.yaml": recipes.smollm2_dpo,
    "recipes/cells-pretrain.yaml": recipes.cells_pretrain,
    "recipes/cells-finetune.yaml": recipes.cells_finetune,
    "recipes/chess-tiny.yaml": recipes.chess_tiny,
}
