"""Embeddings and classes by an encoder that a run trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.api.arguments import as_list, check_at_least
from shoal.config.given_run import run_folder
from shoal.imports import importing
from shoal.paths import user_path

if TYPE_CHECKING:
    from shoal.use.embed import Encoded


def embed(
    run: Path | str,
    changes: Sequence[str] = (),
    *,
    output: Path | str | None = None,
    pool: str = "mean",
    step: int | None = None,
    device: str = "auto",
    batch: int = 32,
    report: Callable[[str], None] = lambda _: None,
) -> Encoded:
    """The embedding of each example of the run's data, or of other data: `["data.path=FILE"]`. `output`: a file that
    ends in .npy, .safetensors or, for cells, .h5ad."""
    return _encode(run, changes, output, (".npy", ".safetensors", ".h5ad"), pool, step, device, batch, False, report)


def predict(
    run: Path | str,
    changes: Sequence[str] = (),
    *,
    output: Path | str | None = None,
    step: int | None = None,
    device: str = "auto",
    batch: int = 32,
    report: Callable[[str], None] = lambda _: None,
) -> Encoded:
    """The class of each example, by a run of `train.objective: classify`. `output`: a file that ends in .jsonl or, for
    cells, .h5ad."""
    return _encode(run, changes, output, (".jsonl", ".h5ad"), "mean", step, device, batch, True, report)


def _encode(
    run: Path | str,
    changes: Sequence[str],
    output: Path | str | None,
    suffixes: tuple[str, ...],
    pool: str,
    step: int | None,
    device: str,
    batch: int,
    classify: bool,
    report: Callable[[str], None],
) -> Encoded:
    check_at_least("batch", batch, 1)
    run = run_folder(run)
    with importing("torch"):
        from shoal.use.embed import encode_data
        from shoal.use.encoded_files import check_output, write_encoded

    file = None if output is None else user_path(output, "--output")
    if file is not None:
        check_output(file, suffixes)
    encoded = encode_data(
        run,
        as_list(changes),
        pool=pool,
        step=step,
        device=device,
        batch=batch,
        classify=classify,
        report=report,
    )
    if file is not None:
        write_encoded(encoded, file, report)
    return encoded
