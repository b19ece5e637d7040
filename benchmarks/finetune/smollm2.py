"""Fine-tunes SmolLM2-135M-Instruct by a recipe, and scores it before and after on questions it was not trained on.

`python benchmarks/finetune/smollm2.py lora > benchmarks/finetune/lora.json`, in the root of the repository, after
`shoal download smollm2-135m`. Then the same again with shuffled answers in the training data, as a control: what
the model learns from the form of the answers alone. Every command is one that the recipe's comment shows.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MODEL = "models/smollm2-135m"
EXAMPLE = "examples/reasoning_gym_task.py"
TASK, TRAIN, TEST = "word_sequence_reversal", 320, 100
SCORE = ["--score", f"{EXAMPLE}:score", "--allow-code"]


def main(recipe: str, *, control: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        found: dict[str, Any] = {
            "machine": {
                "cores": os.cpu_count(),
                "python": platform.python_version(),
                "torch": version("torch"),
                "transformers": version("transformers"),
                "reasoning_gym": version("reasoning-gym"),
            },
            "recipe": f"recipes/smollm2-{recipe}.yaml",
            "task": TASK,
            "training_questions": TRAIN,
            "test_questions": TEST,
        }
        data, shuffled, runs = Path(folder, "data"), Path(folder, "shuffled"), Path(folder, "runs")
        write_data(data)
        held_out = f"data.path={data}/test.jsonl"
        found["before"] = score(MODEL, held_out, "--dtype", "fp32")
        found["after"] = train(recipe, data, runs, "tuned") | score(runs / "tuned", held_out)
        seconds = [found["before"]["seconds"], found["after"]["training_seconds"], found["after"]["seconds"]]
        found["total_seconds"] = round(sum(seconds), 1)
        if control:
            write_data(shuffled, "--shuffle-answers")
            found["control"] = train(recipe, shuffled, runs, "control") | score(runs / "control", held_out)
    print(json.dumps(found, indent=1))


def write_data(folder: Path, *options: str) -> None:
    sizes = ["--train", str(TRAIN), "--test", str(TEST)]
    run([sys.executable, EXAMPLE, TASK, str(folder), *sizes, *options])


def train(recipe: str, data: Path, runs: Path, name: str) -> dict[str, Any]:
    """Train as the recipe says, on the questions in `data`."""
    paths = [f"data.path={data}/train.jsonl", f"data.validation={data}/test.jsonl"]
    began = time.monotonic()
    shoal("train", f"recipes/smollm2-{recipe}.yaml", f"name={name}", *paths, "--runs", str(runs))
    lines = [json.loads(line) for line in (runs / name / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    return {
        "training_seconds": round(time.monotonic() - began, 1),
        "steps": lines[-1]["step"],
        "first_loss": round(losses[0], 4),
        "last_loss": round(losses[-1], 4),
        "eval_loss": [round(line["eval_loss"], 4) for line in lines if "eval_loss" in line],
    }


def score(model: Path | str, *options: str) -> dict[str, Any]:
    """The task's own score, and how many answers are exactly the expected ones."""
    began = time.monotonic()
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
        found = shoal("eval", str(model), "--generate", *options, *SCORE, "--output", file.name)
        answers = [json.loads(line) for line in Path(file.name).read_text().splitlines()]
    return {
        "score": round(found["score"], 4),
        "stderr": round(found["stderr"], 4),
        "exact": sum(one["answer"] == one["expected"] for one in answers) / len(answers),
        "cut_off": found["cut_off"],
        "seconds": round(time.monotonic() - began, 1),
        "first_answers": [{key: one[key] for key in ("expected", "answer", "score")} for one in answers[:3]],
    }


def shoal(*arguments: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(run([sys.executable, "-m", "shoal", *arguments, "--json"]))
    return answer


def run(command: Sequence[str]) -> str:
    print(f"+ {' '.join(map(str, command[1:]))}", file=sys.stderr)
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("recipe", choices=["lora"])
    parser.add_argument("--no-control", action="store_true", help="leave the control run out")
    given = parser.parse_args()
    main(given.recipe, control=not given.no_control)
