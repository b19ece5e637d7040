"""The tokens: sequences that shoal prepares from Python's standard library, given to the other tools in its order."""

import sysconfig
from pathlib import Path
from typing import Any

import numpy as np

from peers.task import SEED

TEXT_BYTES = 8_000_000


def text_data(work: Path, length: int) -> dict[str, Any]:
    """The `data` block of a config for a text of the standard library, which is written on the first call.

    A byte is a token, plus the end token: the file has as many bytes as fill every sequence, including the last.
    """
    path = work / f"text-{length}.txt"
    if not path.exists():
        library = Path(sysconfig.get_paths()["stdlib"])
        text = "".join(file.read_text(errors="replace") for file in sorted(library.rglob("*.py"))[:1500])
        letters = text.encode("ascii", "replace")[:TEXT_BYTES]
        path.write_bytes(letters[: len(letters) // length * length])
    return {"source": "text", "path": str(path), "max_length": length, "validation": 0}


def prepare_sequences(data: dict[str, Any]) -> Any:
    """Prepare, and cache, the sequences that a config with this `data` block trains on."""
    from shoal.config.load import config_from_mapping
    from shoal.data import load_tokenizer, prepare_sets

    config = config_from_mapping({"model": {"shape": "gpt2", "tokenizer": "bytes"}, "data": data})
    return prepare_sets(config.data, load_tokenizer("bytes"), seed=SEED, report=lambda sentence: None)


def write_sequences(path: Path, work: Path, length: int, count: int) -> None:
    """Write the first `count` sequences that shoal trains on: an array of `count` × (length + 1) tokens.

    Inputs are all tokens but the last, labels all but the first. They come from shoal's own preparation and loader,
    which fills the cache for shoal's cases: no case measures the preparation.
    """
    from shoal.data.loader import batches

    sets = prepare_sequences(text_data(work, length))
    settings = {"first_step": 0, "global_batch": 1, "micro_batch": 1, "rank": 0, "ranks": 1, "pad": 0}
    stream = batches(sets.training, sets.order, length=length, **settings)
    found = []
    for _, step in zip(range(count), stream, strict=False):
        (only,) = step.micro_batches
        found.append(np.concatenate([only.inputs[0].numpy(), only.labels[0, -1:].numpy()]))
    stream.close()
    sequences = np.stack(found)
    # With ignored labels the other tools would train on something else.
    assert sequences.min() >= 0, "a sequence is not full"
    np.save(path, sequences.astype(np.int32))


def read_batch(sequences: np.ndarray, step: int, size: int) -> tuple[Any, Any]:
    """Inputs and labels (already shifted) of one step, as torch tensors of int64."""
    import torch

    batch = torch.from_numpy(sequences[step * size : (step + 1) * size].astype(np.int64))
    return batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
