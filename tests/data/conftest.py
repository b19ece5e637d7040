"""Fixtures of the data tests: settings as in the config, a cache per test, and sequences without files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.config.schema import DataConfig
from shoal.data import Sequences, StoredSequences, Summary
from shoal.data.sequences import DOCUMENT, LOSS_TOKEN


@pytest.fixture
def settings() -> Callable[..., DataConfig]:
    """`config.data` with defaults for small tests; paths may be given as such."""

    def make(**given: Any) -> DataConfig:
        for key in ("path", "validation"):
            if isinstance(given.get(key), Path):
                given[key] = str(given[key])
        return DataConfig(**{"source": "text", "max_length": 16, "pack": True, "validation": 0, "workers": 0, **given})

    return make


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("SHOAL_CACHE", str(folder))
    return folder


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, Any], Path]:
    """Write text, bytes, or records (as a JSON array, or one per line for .jsonl) into a file of this test."""

    def write_file(name: str, content: Any) -> Path:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            file.write_bytes(content)
        elif isinstance(content, str):
            file.write_bytes(content.encode())
        elif name.endswith(".jsonl"):
            file.write_text("".join(json.dumps(record) + "\n" for record in content))
        else:
            file.write_text(json.dumps(content, indent=1))
        return file

    return write_file


@pytest.fixture
def make_sequences() -> Callable[..., Sequences]:
    """Sequences without any file: `count` random documents, several per sequence when `separate`."""

    def make(count: int, *, length: int = 12, separate: bool = False, seed: int = 0) -> Sequences:
        random = np.random.default_rng(seed)
        sizes = random.integers(3, length + 2, count)
        ends = np.cumsum(sizes)
        starts = ends - sizes
        tokens = random.integers(0, 250, int(sizes.sum())).astype(np.uint16)
        flags = (random.random(len(tokens)) < 0.7).astype(np.uint8) * LOSS_TOKEN
        flags[starts] = DOCUMENT
        if separate:
            flags[random.random(len(tokens)) < 0.2] = DOCUMENT
        loss_tokens = np.array(
            [int((flags[a + 1 : b] & LOSS_TOKEN).sum()) for a, b in zip(starts, ends, strict=True)], dtype=np.int32
        )
        summary = Summary(
            "alpaca", False, separate, count, len(tokens), count, int(sizes.max()) - 1, int(loss_tokens.sum()), 0.5, ""
        )
        return StoredSequences(tokens, flags, starts, ends, loss_tokens, summary)

    return make
