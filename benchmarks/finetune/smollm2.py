"""Fine-tunes SmolLM2-135M-Instruct by a recipe, and scores it before and after on questions it was not trained on.

`python benchmarks/finetune/smollm2.py lora` in the root of the repository, after `shoal download smollm2-135m`, writes
benchmarks/finetune/lora.json; likewise dpo. Then the same with shuffled answers in the training data, as a control:
what the model learns from the form of the answers alone. Every command is one that the recipe's comment shows.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MODEL = "models/smollm2-135m"
EXAMPLE = "examples/reasoning_gym_task.py"
PARTS = ("before", "after", "control")


@dataclass(frozen=True)
class Case:
    """A recipe, the options of its data, and the function that scores the answers."""

    task: str
    options: tuple[str, ...]
    score: str
    control: tuple[str, ...]  # what makes the data of the control


CASES = {
    "lora": Case(
        task="word_sequence_reversal",
        options=("--train", "320", "--test", "64", "--set", "max_words=5", "--system", "Give only the answer."),
        score="score",
        control=("--shuffle-answers",),
    ),
    "dpo": Case(
        task="chain_sum",
        options=("--pairs", "--train", "160", "--test", "64", "--set", "max_terms=2", "--set", "max_digits=2"),
        score="bare",
        control=("--shuffle-pairs",),
    ),
}


def main(recipe: str, parts: Sequence[str]) -> None:
    """Write the results of `parts`, and keep those of the others that the file has."""
    case, file = CASES[recipe], Path(__file__).with_name(f"{recipe}.json")
    before: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    found: dict[str, Any] = before | {
        "machine": {
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "torch": version("torch"),
            "transformers": version("transformers"),
            "reasoning_gym": version("reasoning-gym"),
        },
        "recipe": f"recipes/smollm2-{recipe}.yaml",
        "data": [EXAMPLE, case.task, *case.options],
        "score": case.score,
    }
    with tempfile.TemporaryDirectory() as folder:
        data, runs = Path(folder, "data"), Path(folder, "runs")
        run([sys.executable, EXAMPLE, case.task, str(data), *case.options])
        held_out = f"data.path={data}/test.jsonl"
        for name in parts:
            if name == "before":
                found[name] = score(MODEL, case, held_out, "--dtype", "fp32")
            else:
                own = Path(folder, name)
                shuffled = case.control if name == "control" else ()
                run([sys.executable, EXAMPLE, case.task, str(own), *case.options, *shuffled])
                found[name] = train(recipe, own, runs, name) | score(runs / name, case, held_out)
            file.write_text(json.dumps(found, indent=1) + "\n")


def train(recipe: str, data: Path, runs: Path, name: str) -> dict[str, Any]:
    """Train as the recipe says, on the examples in `data`."""
    paths = [f"data.path={data}/train.jsonl", f"data.validation={data}/test.jsonl"]
    clock = Clock()
    shoal("train", f"recipes/smollm2-{recipe}.yaml", f"name={name}", *paths, "--runs", str(runs))
    lines = [json.loads(line) for line in (runs / name / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    return {
        "training": clock.read(),
        "steps": lines[-1]["step"],
        "first_loss": round(losses[0], 4),
        "last_loss": round(losses[-1], 4),
        "eval_loss": next((round(line["eval_loss"], 4) for line in reversed(lines) if "eval_loss" in line), None),
    }


def score(model: Path | str, case: Case, *options: str) -> dict[str, Any]:
    """The mean score, and how many answers are exactly the expected ones."""
    clock = Clock()
    scored = ("--score", f"{EXAMPLE}:{case.score}", "--allow-code")
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
        found = shoal("eval", str(model), "--generate", *options, *scored, "--output", file.name)
        answers = [json.loads(line) for line in Path(file.name).read_text().splitlines()]
    return {
        "score": round(found["score"], 4),
        "stderr": round(found["stderr"], 4),
        "exact": round(sum(one["answer"] == one["expected"] for one in answers) / len(answers), 4),
        "examples": found["examples"],
        "cut_off": found["cut_off"],
        "generation": clock.read(),
        "first_answers": [{key: one[key] for key in ("expected", "answer", "score")} for one in answers[:4]],
    }


class Clock:
    """Wall time, and CPU time of the commands: the latter is comparable where a machine is shared."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.monotonic(), self._used()

    def read(self) -> dict[str, float]:
        return {
            "wall_seconds": round(time.monotonic() - self._wall, 1),
            "cpu_seconds": round(self._used() - self._cpu, 1),
        }

    @staticmethod
    def _used() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime


def shoal(*arguments: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(run([sys.executable, "-m", "shoal", *arguments, "--json"]))
    return answer


def run(command: Sequence[str]) -> str:
    print(f"+ {' '.join(map(str, command[1:]))}", file=sys.stderr)
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("recipe", choices=list(CASES))
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="the other results stay as they are")
    given = parser.parse_args()
    main(given.recipe, given.only)
