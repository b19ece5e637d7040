"""The data and the score of recipes/smollm2-lora.yaml."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shoal.use.score import load_score

EXAMPLE = Path(__file__).parents[2] / "examples" / "reasoning_gym_task.py"


def write(folder: Path, *options: str) -> dict[str, list[dict[str, Any]]]:
    command = [sys.executable, str(EXAMPLE), "word_sequence_reversal", str(folder), "--train", "30", "--test", "20"]
    subprocess.run([*command, *options], check=True, capture_output=True)
    return {
        split: [json.loads(line) for line in (folder / f"{split}.jsonl").read_text().splitlines()]
        for split in ("train", "test")
    }


def texts(records: list[dict[str, Any]], index: int) -> list[str]:
    return [record["messages"][index]["content"] for record in records]


@pytest.mark.slow
def test_questions_of_a_task_are_apart_and_scored_by_the_task(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    found = write(tmp_path / "data")
    questions, held_out = texts(found["train"], -2), texts(found["test"], -2)
    assert (len(set(questions)), len(set(held_out))) == (30, 20)
    assert not {*questions} & {*held_out}
    score = load_score(f"{EXAMPLE}:score", allow_code=True)
    for record in found["test"]:
        expected = record["messages"][-1]["content"]
        assert score(expected, expected, record) == 1
        assert score("no, such, words", expected, record) == 0

    shuffled = write(tmp_path / "shuffled", "--shuffle-answers")
    assert shuffled["test"] == found["test"]
    assert texts(shuffled["train"], -2) == questions
    answers, others = texts(found["train"], -1), texts(shuffled["train"], -1)
    assert sorted(answers) == sorted(others)
    assert all(one != other for one, other in zip(answers, others, strict=True))
