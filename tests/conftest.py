"""Shared by all tests: a separate cache, one thread per process, and small datasets."""

import gc
import json
import os
import random
from pathlib import Path

import pytest

# A helper with assertions, which pytest explains only in files it is told of before they are imported.
pytest.register_assert_rewrite("tests.launch.command")

# Before torch: a process that has started OpenMP threads cannot fork ranks that use them, and one thread per rank makes
# sums the same in one process and in many.
os.environ["OMP_NUM_THREADS"] = "1"
# MKL keeps lists of buffers per thread. A fork of a process whose threads had run matmuls looped over such a list
# forever.
os.environ["MKL_DISABLE_FAST_MM"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
# A tokenizer that has started its threads in this process would hang ranks forked from it.
os.environ["TOKENIZERS_PARALLELISM"] = "false"

# Importing torch and transformers makes half a million objects that stay: searching them for garbage takes a quarter of
# the time until the first test, and later again and again, also in every forked rank.
gc.disable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with a test that is marked `long` come first: one that began last would keep one worker busy when the
    others have nothing left to do. Whole files, so that the fixtures of a module are made once."""
    long = {item.path for item in items if item.get_closest_marker("long")}
    items.sort(key=lambda item: item.path not in long)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["SHOAL_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def instructions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts and completions of very different lengths, up to 131 tokens of the `bytes` tokenizer. Short ones: an
    instruction in the format alpaca has 140 more, which every step would compute."""
    source = random.Random(7)
    words = [
        "the",
        "shoal",
        "turns",
        "as",
        "one",
        "and",
        "every",
        "swimmer",
        "follows",
        "its",
        "nearest",
        "neighbours",
        "through",
        "dark",
        "water",
    ]
    path = tmp_path_factory.mktemp("data") / "instructions.jsonl"
    with path.open("w") as file:
        for _ in range(300):
            question = " ".join(source.choices(words, k=source.randint(1, 6)))
            answer = " ".join(source.choices(words, k=source.randint(1, 12)))
            file.write(json.dumps({"prompt": question, "completion": answer}) + "\n")
    return path


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real text: a module of Python's standard library."""
    import argparse

    path = tmp_path_factory.mktemp("data") / "argparse.txt"
    path.write_text(Path(argparse.__file__).read_text())
    return path
