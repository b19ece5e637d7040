"""Tiny runs of encoders: labelled texts of very different lengths, and a BERT."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.harness import settings

BERT = {"family": "bert", "hidden": 32, "layers": 2, "heads": 4, "ffn": 64, "vocab": 264, "positions": 160}
KINDS = {
    "animal": ["cat", "dog", "horse", "cow", "sheep", "goat", "owl"],
    "food": ["bread", "soup", "apple", "cheese", "rice", "cake"],
    "tool": ["saw", "hammer", "drill", "wrench", "file", "plane"],
}


def write_labelled(path: Path, count: int = 96, **changes: str) -> Path:
    """Rows with a text and its kind. `changes`: other names for kinds."""
    drawn = np.random.default_rng(0)
    rows = []
    for _ in range(count):
        kind = list(KINDS)[drawn.integers(3)]
        words = [KINDS[kind][one] for one in drawn.integers(6, size=drawn.integers(2, 16))]
        rows.append(json.dumps({"text": " ".join(words), "kind": changes.get(kind, kind)}))
    path.write_text("\n".join(rows) + "\n")
    return path


def masked(data: Path, **changes: Any) -> dict[str, Any]:
    """The config of a tiny masked LM."""
    return _settings(data, {"train__objective": "masked_lm", "model__add_tokens": ["<mask>"], **changes})


def classifying(data: Path, **changes: Any) -> dict[str, Any]:
    """The config of a tiny classifier."""
    return _settings(data, {"train__objective": "classify", "data__label": "kind", **changes})


def _settings(data: Path, changes: dict[str, Any]) -> dict[str, Any]:
    if "model__from" not in changes:
        changes = {"model__shape": BERT, **changes}
    else:
        changes = {"model": {"from": changes.pop("model__from")}, **changes}
    return settings(data, **changes)
