"""docs/cells.md and its tutorial."""

from benchmarks.figures.results import Line, count, percent, result


def cells() -> list[Line]:
    found = result("examples/cells/results.json")
    genes = found["masked_genes"]
    types = {
        "| majority class": "majority_class",
        "| logistic regression on 50 principal components": "logistic_regression_on_50_components",
        "| logistic regression on the pretrained embedding": "probe_on_embedding",
        "| `recipes/cells-finetune.yaml`": "fine_tuned",
    }
    return [
        ("| the most frequent gene | {}% |", [percent(genes["most_frequent_gene"])]),
        ("| the most frequent gene of each rank | {}% |", [percent(genes["most_frequent_gene_of_the_rank"])]),
        ("| `recipes/cells-pretrain.yaml` | {}% |", [percent(genes["model"])]),
        ("{} cells train and {} are held out", [str(found["cells"][one]) for one in ("training", "held_out")]),
        *(
            (f"{words} | {{}}% | {{}} |", [percent(one["accuracy"]), f"{one['macro_f1']:.2f}"])
            for words, one in ((words, found["cell_types"][name]) for words, name in types.items())
        ),
        *_reading_cells(),
    ]


def _reading_cells() -> list[Line]:
    found = result("benchmarks/data/cells_speed.json")
    rows = {
        "| `prepare`, one process": found["uncompressed"]["prepare_1_process"],
        "| `prepare`, two workers": found["uncompressed"]["prepare_2_workers"],
        "| AnnLoader, shuffled batches of 256": found["uncompressed"]["anndata_loader"],
        "| `prepare` of a gzip file, one process": found["gzip"]["prepare_1_process"],
        "| `prepare` of a gzip file, two workers": found["gzip"]["prepare_2_workers"],
        "| AnnLoader on the gzip file": found["gzip"]["anndata_loader"],
    }
    sizes = [count(found[one]) for one in ("cells", "expressed_per_cell", "genes")]
    return [("a backed file of {} synthetic cells that express {} of {} genes", sizes)] + [
        (
            f"{words} | {{}} | {{}} | {{}} | {{}} |",
            [
                f"{one['cells_per_cpu_second']:,}",
                f"{one['cells_per_second']:,}",
                f"{one['times_loader']:.1f}",
                f"{one['cores_wanted']:.1f}",
            ],
        )
        for words, one in rows.items()
    ]


def single_cells() -> list[Line]:
    found = result("examples/cells/results.json")
    genes, types = found["masked_genes"], found["cell_types"]
    return [
        (
            "It ends at {}%, where the most frequent gene is right for {}%",
            [percent(genes["model"]), percent(genes["most_frequent_gene"])],
        ),
        (
            "It is right for {}% of the held-out cells. A logistic regression on principal components reaches {}%",
            [percent(types[name]["accuracy"]) for name in ("fine_tuned", "logistic_regression_on_50_components")],
        ),
    ]
