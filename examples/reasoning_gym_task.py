"""Writes questions of a reasoning-gym task as conversations, and scores answers as the task itself does.

reasoning-gym (Apache-2.0, `pip install 'shoal[gym]'`) has about a hundred generators of questions with a scorer each.
Training and test questions come from seeds apart, and no test question is among the training questions.

usage: python examples/reasoning_gym_task.py TASK FOLDER [--train N] [--test M] [--seed S] [--set KEY=VALUE]…
           writes FOLDER/train.jsonl and FOLDER/test.jsonl; --list lists the tasks
       python examples/reasoning_gym_task.py TASK FOLDER --shuffle-answers
           a control: each training question has the answer of another one
       python examples/reasoning_gym_task.py TASK FOLDER --pairs
           preferences: the bare answer is chosen, and the same answer in a sentence is rejected; with --shuffle-pairs
           every second one the other way round, as a control
       shoal eval RUN --generate --score examples/reasoning_gym_task.py:score --allow-code
           calls `score` below; `bare` scores whether an answer is a number without any words
"""

import argparse
import json
import random
import re
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

SENTENCE = "The answer is {answer}."  # the rejected answer of a pair
TEST_SEED = 1_000_000  # test questions are drawn with this much more than the seed of the training questions


def main(arguments: argparse.Namespace) -> None:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if arguments.list:
        print("\n".join(sorted(DATASETS)))
        return
    if arguments.task not in DATASETS:
        sys.exit(f"reasoning-gym has no task {arguments.task}; --list lists them.")
    options = dict(_option(text) for text in arguments.set)
    asked: set[str] = set()
    written = {}
    for split, count, seed in (
        ("test", arguments.test, arguments.seed + TEST_SEED),
        ("train", arguments.train, arguments.seed),
    ):
        # Some more than needed: questions that repeat are left out.
        generated = reasoning_gym.create_dataset(arguments.task, seed=seed, size=4 * count, **options)
        items: list[dict[str, Any]] = []
        for item in generated:
            if len(items) < count and item["question"] not in asked:
                asked.add(item["question"])
                items.append(item)
        if len(items) < count:
            sys.exit(f"{arguments.task} gave only {len(items)} different {split} questions; ask for fewer.")
        written[split] = items
    if arguments.shuffle_answers:
        _shuffle_answers(written["train"], arguments.seed)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for split, items in written.items():
        path = arguments.folder / f"{split}.jsonl"
        records = [_record(arguments, options, item) for item in items]
        if arguments.shuffle_pairs and split == "train":
            for record in records[1::2]:
                record["chosen"], record["rejected"] = record["rejected"], record["chosen"]
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        print(f"{path}: {len(items):,} questions; the first answer is {items[0]['answer']!r}")


def _option(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals:
        sys.exit(f"--set {text} has no value: write KEY=VALUE.")
    return key, json.loads(value)


def _shuffle_answers(items: list[dict[str, Any]], seed: int) -> None:
    """Give each question the answer of another one."""
    order = list(range(len(items)))
    random.Random(seed).shuffle(order)
    answers = [item["answer"] for item in items]
    # In a cycle, nothing keeps its own place.
    for here, there in zip(order, [*order[1:], order[0]], strict=True):
        items[here]["answer"] = answers[there]


def _record(arguments: argparse.Namespace, options: dict[str, Any], item: dict[str, Any]) -> dict[str, Any]:
    """A conversation, with what the scorer needs: as JSON text, since readers of columns want the same keys in each."""
    system = [{"role": "system", "content": arguments.system}] if arguments.system else []
    messages = [
        *system,
        {"role": "user", "content": item["question"].strip()},
        {"role": "assistant", "content": str(item["answer"]).strip()},
    ]
    conversation: dict[str, Any] = {"messages": messages}
    if arguments.pairs:
        sentence = SENTENCE.format(answer=messages[-1]["content"])
        conversation = {
            "prompt": messages[:-1],
            "chosen": messages[-1:],
            "rejected": [{"role": "assistant", "content": sentence}],
        }
    return {
        **conversation,
        "task": arguments.task,
        "options": json.dumps(options),
        "item": json.dumps(item, default=str),
    }


def score(answer: str, expected: str, record: Mapping[str, Any]) -> float:
    """The score of the task itself, from 0 to 1."""
    scorer = _scorer(record["task"], record["options"])
    return float(scorer.score_answer(answer=answer, entry=json.loads(record["item"])))


def bare(answer: str, expected: str, record: Mapping[str, Any]) -> float:
    """1 if the answer is a number and nothing else, right or wrong."""
    return float(re.fullmatch(r"-?\d+", answer) is not None)


@cache
def _scorer(task: str, options: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(task, seed=0, size=1, **json.loads(options))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("task", nargs="?", metavar="TASK", help="the task's name, such as spell_backward")
    parser.add_argument("folder", nargs="?", type=Path, metavar="FOLDER", help="the folder to write")
    parser.add_argument("--list", action="store_true", help="list the tasks")
    parser.add_argument("--train", type=int, default=400, help="training questions (default: 400)")
    parser.add_argument("--test", type=int, default=100, help="test questions (default: 100)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the training questions (default: 0)")
    parser.add_argument("--system", default="", help="a system message (default: none)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="an option of the task")
    parser.add_argument("--pairs", action="store_true", help="write pairs of a chosen and a rejected answer")
    parser.add_argument("--shuffle-pairs", action="store_true", help="swap the answers of every second training pair")
    parser.add_argument("--shuffle-answers", action="store_true", help="give each question the answer of another one")
    arguments = parser.parse_args()
    if not arguments.list and arguments.folder is None:
        parser.error("TASK and FOLDER are needed")
    if arguments.shuffle_pairs and not arguments.pairs:
        parser.error("--shuffle-pairs is for --pairs")
    return arguments


if __name__ == "__main__":
    main(_arguments())
