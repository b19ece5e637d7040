"""The tokens: rows that shoal itself prepares from Python's standard library, given to the peers in its order."""

import sysconfig
from pathlib import Path
from typing import Any

import numpy as np

from peers.task import SEED

TEXT_BYTES = 8_000_000


def text_data(work: Path, length: int) -> dict[str, Any]:
    """The `data` block of a config over text of the standard library's, in a file that is written at the first call.

    A byte is a token, and the end of the file one more: so many bytes that every row is full, the last one too.
    """
    path = work / f"text-{length}.txt"
    if not path.exists():
        library = Path(sysconfig.get_paths()["stdlib"])
        text = "".join(file.read_text(errors="replace") for file in sorted(library.rglob("*.py"))[:1500])
        letters = text.encode("ascii", "replace")[:TEXT_BYTES]
        path.write_bytes(letters[: len(letters) // length * length])
    return {"source": "text", "path": str(path), "max_length": length, "validation": 0}


def prepare_rows(data: dict[str, Any]) -> Any:
    """The rows that a config with this `data` block trains on, which from then on are in the cache."""
    from shoal.config.load import config_from_mapping
    from shoal.data import load_tokenizer, prepare_sets

    config = config_from_mapping({"model": {"shape": "gpt2", "tokenizer": "bytes"}, "data": data})
    return prepare_sets(config.data, load_tokenizer("bytes"), seed=SEED, report=lambda sentence: None)


def write_rows(path: Path, work: Path, length: int, count: int) -> None:
    """The first `count` rows that shoal trains on: an array of `count` × (length + 1) tokens.

    A row's inputs are all but its last token, its labels all but its first. They come from shoal's own preparation and
    loader, whose cache shoal's cases then find filled: no case measures it.
    """
    from shoal.data.loader import batches

    sets = prepare_rows(text_data(work, length))
    settings = {"first_step": 0, "global_batch": 1, "micro_batch": 1, "rank": 0, "ranks": 1, "pad": 0}
    stream = batches(sets.training, sets.order, length=length, **settings)
    rows = []
    for _, step in zip(range(count), stream, strict=False):
        (only,) = step.micro_batches
        rows.append(np.concatenate([only.inputs[0].numpy(), only.labels[0, -1:].numpy()]))
    stream.close()
    made = np.stack(rows)
    # A row with ignored labels, or one whose labels are not its shifted inputs, would be another job for the peers.
    assert made.min() >= 0, "a row is not full"
    np.save(path, made.astype(np.int32))


def read_batch(rows: np.ndarray, step: int, size: int) -> tuple[Any, Any]:
    """Inputs and labels (already shifted) of one step, as torch tensors of int64."""
    import torch

    batch = torch.from_numpy(rows[step * size : (step + 1) * size].astype(np.int64))
    return batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
