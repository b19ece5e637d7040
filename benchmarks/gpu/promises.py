"""What only a GPU can show, through the real command: `python benchmarks/gpu/promises.py FOLDER` writes promises.json.

Memory that runs out is explained in a sentence, or shrunk from; what the forecast said is held to what is measured;
and the tests that need CUDA pass. About four minutes. Without a GPU, `--only tests` can be tried.
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
# GPT-2 with so many rows of 1024 a pass needs 159 GiB by the forecast; with half of them, 80.
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
    """`shoal train`: its status, what it said, and where its run is."""
    file = folder / f"{settings['name']}.json"
    file.write_text(json.dumps(settings))
    began = time.perf_counter()
    command = [sys.executable, "-m", "shoal", "train", str(file), "--json"]
    # Where this process finds modules: paths that begin here would lead elsewhere from the folder.
    paths = os.pathsep.join(os.path.abspath(path) for path in sys.path[1:] if path)
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=400)
    run = folder / "runs" / settings["name"]
    metrics = run / "metrics.jsonl"
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()] if metrics.exists() else []
    plan = json.loads((run / "plan.json").read_text()) if (run / "plan.json").exists() else {}
    return {
        "status": done.returncode,
        "said": [line for line in done.stderr.splitlines() if not re.match(r"step \d+/", line)][-40:],
        "steps": steps,
        "chosen": plan.get("chosen"),
        "off": plan.get("off"),
        "seconds": round(time.perf_counter() - began, 1),
    }


def runs_out(folder: Path) -> dict[str, Any]:
    """It ends with status 1 and a sentence, no traceback, and says what would help."""
    found = train(folder, config("stop", {"steps": 2, "global_batch": TOO_MANY, "micro_batch": TOO_MANY}))
    text = "\n".join(found["said"])
    found["kept"] = found["status"] == 1 and "ran out of memory" in text and "Traceback" not in text
    return found


def shrinks(folder: Path) -> dict[str, Any]:
    """It goes on with fewer rows a pass and the same rows a step."""
    settings = {"steps": 2, "global_batch": TOO_MANY, "micro_batch": TOO_MANY, "on_oom": "shrink"}
    found = train(folder, config("shrink", settings))
    chosen = found["chosen"] or {}
    smaller = chosen.get("micro_batch", TOO_MANY) < TOO_MANY and chosen.get("global_batch") == TOO_MANY
    found["kept"] = found["status"] == 0 and found["steps"] == [1, 2] and smaller
    return found


def forecast(folder: Path) -> dict[str, Any]:
    """What was measured is within 10% of the forecast, or a sentence says so."""
    settings = {"steps": 30, "global_batch": 16, "micro_batch": 16}
    found = train(folder, config("forecast", settings, "pythia-160m"))
    off = {name: by for name, by in (found["off"] or {}).items() if by is not None}
    spoken_of = all(abs(by) <= 0.1 or "forecast" in "\n".join(found["said"]) for by in off.values())
    found["kept"] = found["status"] == 0 and bool(off) and spoken_of
    return found


def tests(folder: Path) -> dict[str, Any]:
    """Those that are skipped elsewhere."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *CUDA_TESTS]
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    said = [line for line in done.stdout.splitlines() if "FAILED" in line or " passed" in line or line.startswith("E ")]
    seconds = round(time.perf_counter() - began, 1)
    return {"status": done.returncode, "said": said[-40:], "seconds": seconds, "kept": done.returncode == 0}


PROMISES = {"runs-out": runs_out, "shrinks": shrinks, "forecast": forecast, "tests": tests}


def main(output: Path, chosen: list[str]) -> None:
    file = output / "promises.json"
    output.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    for name in chosen:
        with tempfile.TemporaryDirectory() as folder:
            found[name] = PROMISES[name](Path(folder))
        print(name, "kept" if found[name]["kept"] else "BROKEN", json.dumps(found[name], indent=1), flush=True)
        file.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", choices=PROMISES, default=list(PROMISES), help="what else is there stays")
    told = parser.parse_args()
    main(told.folder, told.only)
