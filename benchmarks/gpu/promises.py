"""Checks that need a GPU, with the real command: `python benchmarks/gpu/promises.py FOLDER` writes promises.json.

Out-of-memory errors are explained or lead to a smaller micro-batch, the forecast is compared with measurements, and the
tests that need CUDA pass. Takes about four minutes. `--only tests` also works without a GPU.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

CUDA_TESTS = ("tests/parallel/test_cuda.py", "tests/models/test_loss.py", "tests/models/test_float8.py")
# By the forecast, GPT-2 needs 159 GiB with a micro-batch of 512 sequences of 1024, and 80 with half of it.
TOO_MANY, LENGTH = 512, 1024


def config(name: str, train: dict[str, Any], shape: str = "gpt2", length: int = LENGTH) -> dict[str, Any]:
    library = sysconfig.get_path("stdlib")
    return {
        "name": name,
        "model": {"shape": shape, "tokenizer": "bytes"},
        "data": {"source": "text", "path": f"{library}/*.py", "max_length": length, "validation": 0},
        "train": {"lr": 1e-4, **train},
        "checkpoint": {"every": 1000},
        "log": {"every": 1, "to": []},
    }


def train(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Run `shoal train`, and return its exit status, its output and parts of its plan.json."""
    file = folder / f"{settings['name']}.json"
    file.write_text(json.dumps(settings))
    began = time.perf_counter()
    command = [sys.executable, "-m", "shoal", "train", str(file), "--json"]
    # The module paths of this process, made absolute because the command runs in another folder.
    paths = os.pathsep.join(os.path.abspath(path) for path in sys.path[1:] if path)
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=400)
    run = folder / "runs" / settings["name"]
    metrics = run / "metrics.jsonl"
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()] if metrics.exists() else []
    plan = json.loads((run / "plan.json").read_text()) if (run / "plan.json").exists() else {}
    return {
        "status": done.returncode,
        "output": [line for line in done.stderr.splitlines() if not re.match(r"step \d+/", line)][-40:],
        "steps": steps,
        "chosen": plan.get("chosen"),
        "off": plan.get("off"),
        "seconds": round(time.perf_counter() - began, 1),
    }


def runs_out(folder: Path) -> dict[str, Any]:
    """The run ends with status 1 and a message without a traceback, which says what would help."""
    found = train(folder, config("stop", {"steps": 2, "global_batch": TOO_MANY, "micro_batch": TOO_MANY}))
    text = "\n".join(found["output"])
    found["passed"] = found["status"] == 1 and "ran out of memory" in text and "Traceback" not in text
    return found


def shrinks(folder: Path) -> dict[str, Any]:
    """The run continues with a smaller micro-batch and the same global batch."""
    settings = {"steps": 2, "global_batch": TOO_MANY, "micro_batch": TOO_MANY, "on_oom": "shrink"}
    found = train(folder, config("shrink", settings))
    chosen = found["chosen"] or {}
    smaller = chosen.get("micro_batch", TOO_MANY) < TOO_MANY and chosen.get("global_batch") == TOO_MANY
    found["passed"] = found["status"] == 0 and found["steps"] == [1, 2] and smaller
    return found


def forecast(folder: Path) -> dict[str, Any]:
    """Measurements are within 10% of the forecast, or a warning reports the difference."""
    settings = {"steps": 30, "global_batch": 16, "micro_batch": 16}
    found = train(folder, config("forecast", settings, "pythia-160m"))
    off = {name: by for name, by in (found["off"] or {}).items() if by is not None}
    reported = all(abs(by) <= 0.1 or "forecast" in "\n".join(found["output"]) for by in off.values())
    found["passed"] = found["status"] == 0 and bool(off) and reported
    return found


def tests(folder: Path) -> dict[str, Any]:
    """The tests that are skipped without CUDA."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *CUDA_TESTS]
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    lines = [
        line for line in done.stdout.splitlines() if "FAILED" in line or " passed" in line or line.startswith("E ")
    ]
    seconds = round(time.perf_counter() - began, 1)
    return {"status": done.returncode, "output": lines[-40:], "seconds": seconds, "passed": done.returncode == 0}


PROMISES = {"runs-out": runs_out, "shrinks": shrinks, "forecast": forecast, "tests": tests}


def main(output: Path, chosen: list[str]) -> None:
    file = output / "promises.json"
    output.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    for name in chosen:
        with tempfile.TemporaryDirectory() as folder:
            found[name] = PROMISES[name](Path(folder))
        print(name, "passed" if found[name]["passed"] else "FAILED", json.dumps(found[name], indent=1), flush=True)
        file.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", choices=PROMISES, default=list(PROMISES), help="keeps the others")
    args = parser.parse_args()
    main(args.folder, args.only)
