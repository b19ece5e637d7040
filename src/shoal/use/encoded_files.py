"""Write embeddings and classes: .npy, .safetensors or .jsonl, and .h5ad for cells, which scanpy reads."""

import io
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from shoal.files import write_atomically
from shoal.mistakes import UserMistake
from shoal.use.embed import Encoded

KEY = "X_shoal"  # in obsm
LABEL, PROBABILITY = "shoal_label", "shoal_probability"  # in obs


def check_output(output: Path, suffixes: tuple[str, ...]) -> None:
    """A UserMistake if the file exists, or its kind is not known. Before anything is computed."""
    if output.suffix not in suffixes:
        raise UserMistake(f"--output {output} must end in {', '.join(suffixes)}.")
    if output.exists():
        raise UserMistake(f"{output} already exists; choose another file with --output.")
    if not output.absolute().parent.is_dir():
        raise UserMistake(f"--output {output}: there is no folder {output.parent}.")


def write_encoded(encoded: Encoded, output: Path, report: Callable[[str], None] = lambda _: None) -> None:
    """Write `output` whole or not at all."""
    if output.suffix == ".h5ad":
        _write_cells(encoded, output, report)
        return
    if output.suffix == ".npy":
        buffer = io.BytesIO()
        np.save(buffer, encoded.embeddings, allow_pickle=False)
        content: bytes | str = buffer.getvalue()
    elif output.suffix == ".safetensors":
        tensors = {"embeddings": encoded.embeddings}
        if encoded.probabilities is not None:
            tensors["probabilities"] = encoded.probabilities
        content = save(tensors, {"run": encoded.run, "classes": json.dumps(encoded.classes)})
    else:
        content = "".join(json.dumps(one) + "\n" for one in predictions(encoded))
    write_atomically(output, content)


def predictions(encoded: Encoded) -> list[dict[str, Any]]:
    """One object per example: where it stands, its most probable class, and the probability of each."""
    assert encoded.classes is not None
    assert encoded.probabilities is not None
    found = []
    for (file, place), label, shares in zip(
        encoded.places.tolist(), encoded.labels, encoded.probabilities.tolist(), strict=True
    ):
        each = {name: round(share, 6) for name, share in zip(encoded.classes, shares, strict=True)}
        found.append({"file": str(encoded.files[file]), "index": place, "label": label, "probabilities": each})
    return found


def _write_cells(encoded: Encoded, output: Path, report: Callable[[str], None]) -> None:
    if not encoded.cells:
        instead = ".npy or .safetensors" if encoded.classes is None else ".jsonl"
        raise UserMistake(f"--output {output}: .h5ad is for cells, and this run has text; use {instead}.")
    import anndata

    parts = []
    for number, file in enumerate(encoded.files):
        here = encoded.places[encoded.places[:, 0] == number, 1]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of anndata, about how older versions of it wrote the file
            parts.append(anndata.read_h5ad(file)[here].copy())
    if len(parts) == 1:
        whole = parts[0]
    else:
        report(f"{output} has the cells of {len(parts)} files, without their matrices: their genes differ.")
        names = [file.stem for file in encoded.files]
        whole = anndata.concat([anndata.AnnData(obs=one.obs) for one in parts], label="file", keys=names)
    whole.obsm[KEY] = encoded.embeddings
    if encoded.probabilities is not None:
        whole.obs[LABEL] = encoded.labels
        whole.obs[LABEL] = whole.obs[LABEL].astype("category")
        whole.obs[PROBABILITY] = encoded.probabilities.max(1)
    part = output.with_name(f".{output.name}.part")
    try:
        whole.write_h5ad(part)
        with part.open("rb") as written:
            os.fsync(written.fileno())
        part.replace(output)
    finally:
        part.unlink(missing_ok=True)
