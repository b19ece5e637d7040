"""Generates an alpaca-style file with the lengths of real instruction data: mostly short, a few very long."""

import json
import math
import random
from pathlib import Path
from typing import Any

from peers.task import SEED

MEAN, LONGEST = 250, 2048
SHORTEST = 100  # the prompt template alone is about 80 byte tokens
COUNT = 6000
# A truncated lognormal with this sigma resembles the usual datasets: the median is well below the mean.
SIGMA = 0.8


def instruction_data(work: Path, length: int) -> dict[str, Any]:
    """The `data` block of a config for such a file, written on the first call, with examples of at most `length`."""
    path = work / f"instructions-{length}.json"
    if not path.exists():
        path.write_text(json.dumps(make_instructions(length)))
    return {"source": "json", "path": str(path), "format": "alpaca", "max_length": length, "validation": 0}


def make_instructions(longest: int) -> list[dict[str, str]]:
    """Instructions and answers of the drawn number of byte tokens, including prompt and end token."""
    from shoal.data.formats.choose import alpaca_prompt

    source = random.Random(SEED)
    text = Path(json.__file__).read_text() + Path(random.__file__).read_text()
    examples = []
    for length in make_lengths(source, longest):
        instruction = _excerpt(source, text, max(length // 10, 1))
        answer = length - 1 - len(alpaca_prompt(instruction))
        examples.append({"instruction": instruction, "output": _excerpt(source, text, max(answer, 1))})
    return examples


def make_lengths(source: random.Random, longest: int) -> list[int]:
    """`COUNT` lengths, whose mean after truncation is `MEAN`, scaled down with `longest`."""
    mean, draws = MEAN * longest / LONGEST, [source.gauss(0, SIGMA) for _ in range(COUNT)]
    low, high = 0.0, 4 * mean
    for _ in range(50):
        middle = (low + high) / 2
        lengths = [min(max(round(middle * math.exp(draw)), SHORTEST), longest) for draw in draws]
        low, high = (middle, high) if sum(lengths) / COUNT < mean else (low, middle)
    return lengths


def _excerpt(source: random.Random, text: str, length: int) -> str:
    start = source.randrange(len(text) - length)
    # One byte per character, so that lengths are exact.
    return text[start : start + length].encode("ascii", "replace").decode()
