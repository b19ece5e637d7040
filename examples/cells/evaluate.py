"""What the runs of recipes/cells-pretrain.yaml and cells-finetune.yaml have learnt, against simple baselines.

Masked genes of held-out cells: the model, the most frequent gene, and the most frequent gene of each rank. Cell types
of the same held-out cells: the majority class, logistic regression on principal components, logistic regression on the
pretrained embedding (a probe), and the fine-tuned model. The runs are exported and loaded by transformers alone.

usage: python examples/cells/evaluate.py [--output examples/cells/results.json] [--picture docs/images/cells-umap.png]
"""

import argparse
import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import anndata
import numpy as np
import torch
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, f1_score
from sklearn.preprocessing import StandardScaler
from transformers import AutoModel, AutoModelForSequenceClassification

from shoal import api
from shoal.config.load import load_config
from shoal.config.schema import Config
from shoal.data import Sets, Tokenizer, load_tokenizer, prepare_sets
from shoal.data.cells.bundled import bundled_file

SPECIAL = 4  # tokens before the genes
COMPONENTS = 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pretrained", type=Path, default=Path("runs/cells-pretrain"))
    parser.add_argument("--finetuned", type=Path, default=Path("runs/cells-finetune"))
    parser.add_argument("--output", type=Path)
    parser.add_argument("--picture", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        pretrained = api.export(given.pretrained, Path(folder) / "pretrained")
        finetuned = api.export(given.finetuned, Path(folder) / "finetuned")
        result = evaluate(given.pretrained, pretrained, given.finetuned, finetuned, given.picture)
    print(json.dumps(result, indent=2))
    if given.output is not None:
        given.output.write_text(json.dumps(result, indent=2) + "\n")


def evaluate(
    pretrained_run: Path, pretrained: Path, finetuned_run: Path, finetuned: Path, picture: Path | None
) -> dict[str, Any]:
    config, tokenizer = load_config(finetuned_run / "config.yaml"), load_tokenizer(str(finetuned))
    sets = prepare_sets(config.data, tokenizer, seed=config.seed, report=lambda sentence: None, objective="classify")
    held_out = sets.order.validation_sequences()
    count = len(sets.training)
    training = np.setdiff1d(np.arange(count), held_out)
    check_split(pretrained_run, config)
    labels = sets.training.labels(np.arange(count))
    names = sets.training.summary.classes
    assert names is not None
    file = anndata.read_h5ad(bundled_file(str(config.data.path), "data.path"))
    expression = file.raw.X.toarray()
    embedding = embed(AutoModel.from_pretrained(pretrained), sets, tokenizer, count)
    if picture is not None:
        draw(embedding, labels, names, picture)
    majority = np.full(len(held_out), Counter(labels[training].tolist()).most_common(1)[0][0])
    components = PCA(COMPONENTS, random_state=0).fit(expression[training]).transform(expression)
    classifier = AutoModelForSequenceClassification.from_pretrained(finetuned)
    return {
        "cells": {"training": len(training), "held_out": len(held_out), "classes": len(names)},
        "masked_genes": masked_genes(pretrained_run, sets, training, held_out),
        "cell_types": {
            "majority_class": scores(labels[held_out], majority),
            f"logistic_regression_on_{COMPONENTS}_components": probe(components, labels, training, held_out),
            "probe_on_embedding": probe(embedding, labels, training, held_out),
            "fine_tuned": scores(labels[held_out], classify(classifier, sets, tokenizer, held_out)),
        },
    }


def check_split(pretrained_run: Path, config: Config) -> None:
    """Pretraining must not have seen the cells that are held out here."""
    before = load_config(pretrained_run / "config.yaml")
    same = (before.seed, before.data.path, before.data.validation) == (
        config.seed,
        config.data.path,
        config.data.validation,
    )
    assert same, "both runs need the same seed, data.path and data.validation"


def masked_genes(run: Path, sets: Sets, training: np.ndarray, held_out: np.ndarray) -> dict[str, float]:
    """The accuracy of the model is that of its last evaluation. Every gene is as likely to be masked as any other, so
    that a constant guess is right as often as it is among all genes."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if "eval_masked_accuracy" in line][-1]
    seen: Counter[int] = Counter()
    by_rank: dict[int, Counter[int]] = {}
    for index in training.tolist():
        for rank, gene in enumerate(genes_of(sets, index)):
            seen[gene] += 1
            by_rank.setdefault(rank, Counter())[gene] += 1
    frequent = seen.most_common(1)[0][0]
    of_rank = {rank: genes.most_common(1)[0][0] for rank, genes in by_rank.items()}
    total = constant = ranked = 0
    for index in held_out.tolist():
        for rank, gene in enumerate(genes_of(sets, index)):
            total += 1
            constant += gene == frequent
            ranked += gene == of_rank.get(rank, frequent)
    return {
        "model": round(last["eval_masked_accuracy"], 4),
        "most_frequent_gene": round(constant / total, 4),
        "most_frequent_gene_of_the_rank": round(ranked / total, 4),
    }


def genes_of(sets: Sets, index: int) -> list[int]:
    tokens = sets.training[index][0][:-1]
    return tokens[tokens >= SPECIAL].tolist()


def batch_of(sets: Sets, tokenizer: Tokenizer, indices: np.ndarray) -> dict[str, torch.Tensor]:
    cells = [sets.training[int(index)][0][:-1].astype(np.int64) for index in indices]
    width = max(map(len, cells))
    tokens = np.full((len(cells), width), tokenizer.pad)
    for line, cell in enumerate(cells):
        tokens[line, : len(cell)] = cell
    ids = torch.from_numpy(tokens)
    return {"input_ids": ids, "attention_mask": (ids != tokenizer.pad).long()}


@torch.no_grad()
def embed(model: Any, sets: Sets, tokenizer: Tokenizer, count: int) -> np.ndarray:
    """The mean of the last hidden states of a cell's genes."""
    model.eval()
    found = []
    for first in range(0, count, 50):
        batch = batch_of(sets, tokenizer, np.arange(first, min(first + 50, count)))
        hidden = model(**batch).last_hidden_state
        genes = (batch["input_ids"] >= SPECIAL)[..., None]
        found.append(((hidden * genes).sum(1) / genes.sum(1)).numpy())
    return np.concatenate(found)


@torch.no_grad()
def classify(model: Any, sets: Sets, tokenizer: Tokenizer, indices: np.ndarray) -> np.ndarray:
    model.eval()
    parts = np.array_split(indices, max(len(indices) // 50, 1))
    return np.concatenate([model(**batch_of(sets, tokenizer, part)).logits.argmax(-1).numpy() for part in parts])


def probe(features: np.ndarray, labels: np.ndarray, training: np.ndarray, held_out: np.ndarray) -> dict[str, float]:
    scale = StandardScaler().fit(features[training])
    model = LogisticRegression(max_iter=2000).fit(scale.transform(features[training]), labels[training])
    return scores(labels[held_out], model.predict(scale.transform(features[held_out])))


def scores(truth: np.ndarray, guess: np.ndarray) -> dict[str, float]:
    return {
        "accuracy": round(float(accuracy_score(truth, guess)), 4),
        "macro_f1": round(float(f1_score(truth, guess, average="macro", zero_division=0)), 4),
    }


def draw(embedding: np.ndarray, labels: np.ndarray, names: list[str], picture: Path) -> None:
    """A UMAP of the embedding, by label."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from umap import UMAP

    places = UMAP(n_neighbors=15, min_dist=0.3, random_state=0, n_jobs=1).fit_transform(embedding)
    figure, axes = pyplot.subplots(figsize=(7.5, 4.5), layout="constrained")
    colours = pyplot.get_cmap("tab10")
    for number, name in enumerate(names):
        here = labels == number
        axes.scatter(*places[here].T, s=9, color=colours(number), label=f"{name} ({int(here.sum())})", linewidths=0)
    axes.set(xticks=[], yticks=[], xlabel="UMAP 1", ylabel="UMAP 2")
    axes.set_title("Mean hidden state of pretrained cells, by bulk_labels")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=8, markerscale=2)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=100)


if __name__ == "__main__":
    main()
