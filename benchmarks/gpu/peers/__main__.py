"""`python -m peers TASK RESULT`: train the task with its tool, and write the result."""

import importlib
import json
import sys
from pathlib import Path

from peers.task import read_task


def main(task_file: str, result_file: str) -> None:
    task = read_task(Path(task_file))
    runner = importlib.import_module(f"peers.{task.runner}")
    clock = importlib.import_module("peers.clock").Clock(task)
    runner.run(task, clock)
    Path(result_file).write_text(json.dumps(clock.result()))


if __name__ == "__main__":
    main(*sys.argv[1:])
