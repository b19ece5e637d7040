"""Memory and speed of encoders on this GPU beside their forecast: `python benchmarks/gpu/encoders.py OUTPUT_FOLDER`.

bert-base (110M parameters) on 64 sequences of 512 tokens: masked LM without and with dropout, with padding, and
classification. Each case is one `shoal bench train`. The texts are byte tokens of Python's standard library. Writes
encoders.json after every case and prints a table. `--tiny`: a small model on a CPU, to see that every case runs.
"""

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

SOURCE = str(Path(__file__).resolve().parents[2] / "src")
sys.path.insert(0, SOURCE)

LENGTH, BATCH = 512, 64
TINY = {"family": "bert", "hidden": 64, "layers": 2, "heads": 4, "vocab": 264, "positions": 64}
# By name: changes of the config.
CASES: dict[str, dict[str, Any]] = {
    "masked-lm": {},
    "masked-lm-dropout": {"model.dropout": 0.1},
    "masked-lm-recompute": {"train.recompute": "full"},
    "masked-lm-padded": {"data.pack": False, "data.path": "rows.jsonl", "data.source": "json"},
    "classify": {
        "train.objective": "classify", "data.label": "label", "data.pack": False, "data.path": "rows.jsonl",
        "data.source": "json", "model.add_tokens": [],
    },
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--only", nargs="*", default=list(CASES))
    parser.add_argument("--warmup", type=int, default=6)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    file = args.output / "encoders.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    with tempfile.TemporaryDirectory(prefix="encoders-") as folder:
        work = Path(folder)
        write_data(work, 64 if args.tiny else LENGTH, 200 if args.tiny else 20_000)
        for name in args.only:
            found[name] = run_case(name, work, args)
            file.write_text(json.dumps(found, indent=2) + "\n")
            print(name, summary(found[name]), flush=True)
    return 0


def write_data(work: Path, length: int, rows: int) -> None:
    """text.txt, and rows.jsonl of texts between half and the whole length with a label."""
    library = Path(sysconfig.get_path("stdlib"))
    text = "".join(one.read_text(errors="ignore") for one in sorted(library.glob("*.py")))
    text = text.encode("ascii", "ignore").decode()
    (work / "text.txt").write_text(text)
    lines = []
    for row in range(rows):
        size = length // 2 + (row * 7919) % (length // 2 - 2)
        start = (row * 104_729) % (len(text) - length)
        lines.append(json.dumps({"text": text[start : start + size], "label": f"class {row % 10}"}) + "\n")
    (work / "rows.jsonl").write_text("".join(lines))


def run_case(name: str, work: Path, args: argparse.Namespace) -> dict[str, Any]:
    length = 64 if args.tiny else LENGTH
    batch = 4 if args.tiny else BATCH
    config: dict[str, Any] = {
        "name": name,
        "model": {"shape": TINY if args.tiny else "bert-base", "tokenizer": "bytes", "add_tokens": ["<mask>"]},
        "data": {"source": "text", "path": "text.txt", "max_length": length, "pack": True, "validation": 0},
        "train": {"objective": "masked_lm", "global_batch": batch, "micro_batch": batch, "lr": 1e-4, "steps": 1000},
    }
    for key, value in CASES[name].items():
        block, key = key.split(".")
        config[block][key] = value
    (work / f"{name}.yaml").write_text(json.dumps(config))
    measured = shoal(
        work, "bench", "train", f"{name}.yaml", "--warmup", str(args.warmup), "--steps", str(args.steps), "--json"
    )
    planned = shoal(work, "plan", f"{name}.yaml", "--json", *(["hardware.gpu=cpu"] if args.tiny else []))
    return {"measured": measured, "forecast": planned}


def shoal(work: Path, *command: str) -> dict[str, Any]:
    """What a command prints as JSON, or its last line if it fails."""
    path = os.pathsep.join([SOURCE, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "SHOAL_CACHE": str(work / "cache")}
    done = subprocess.run(
        [sys.executable, "-m", "shoal", *command],
        cwd=work,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode not in (0, 3):  # 3: the plan says that it does not fit
        return {"failed": (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]}
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def summary(record: dict[str, Any]) -> str:
    """Measured, and measured / forecast."""
    measured, planned = record["measured"], record["forecast"]
    if failed := measured.get("failed") or planned.get("failed"):
        return f"failed: {failed}"
    memory, seconds = planned["memory"]["allocated_gib"], planned["speed"]["step_seconds"]
    return (
        f"{measured['allocated_gib']:.2f} GiB ({measured['allocated_gib'] / memory:.3f} of the forecast), "
        f"{measured['step_seconds'] * 1e3:.1f} ms per step ({measured['step_seconds'] / seconds:.3f})"  # with padding
    )


if __name__ == "__main__":
    sys.exit(main())
