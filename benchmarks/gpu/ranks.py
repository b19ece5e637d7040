"""Memory and speed of one rank of each large recipe, on one GPU: `python benchmarks/gpu/ranks.py FOLDER`.

FOLDER/ranks.json has, for each recipe, what `shoal plan` forecasts for the GPUs that it names, what `shoal bench rank`
forecasts and measures for the same job on this GPU, and the ratio of measured to planned memory. The job is that of the
recipe but for the weights, which are random, and the data: generated here, in byte tokens, with full sequences. Each
case is a process of its own. No rank needs more than 65 GiB of the GPU. `--tiny` measures small models on a CPU, to
check that it runs. `--annotate` measures nothing: it writes what ranks.json has into the comments of the recipes.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SEED = 1234
# The instructions fill the batches of every recipe once; their lengths in bytes are like those of real ones.
EXAMPLES, SHORTEST, LONGEST = 6000, 50, 900
TEXTS, TEXT_LENGTH = 2000, 1200
TINY = "hidden: 64, layers: 2, heads: 4, ffn: 128, vocab: 320, positions: 256"


@dataclass(frozen=True)
class Case:
    """A recipe, the shape of its model, and what to measure."""

    recipe: str
    shape: str
    world: int
    data: str = "instructions"
    steps: int = 2
    family: str = "llama"

    def overrides(self, folder: Path, *, tiny: bool) -> list[str]:
        """The recipe with random weights and generated data."""
        shape = f"{{family: {self.family}, {TINY}}}" if tiny else self.shape
        found = ["model.from=null", f"model.shape={shape}", "model.tokenizer=bytes", "data.source=json"]
        found += [f"data.path={folder / self.data}.jsonl"]
        if self.data == "texts":
            found += ["data.format=text", "data.long_documents=truncate"]
        if tiny:
            found += ["data.max_length=256", "train.precision=32-true"]
        return found


# The largest last, so that the others are measured if time runs out.
CASES = {
    case.recipe: case
    for case in (
        Case("pythia-1b", "pythia-1b", 2, data="texts", steps=5, family="neox"),
        Case("codellama-7b-chess", "codellama-7b", 2, data="texts", steps=5),
        Case("llama2-7b-lora", "llama2-7b", 4),
        Case("llama2-70b-lora", "llama2-70b", 8),
        Case("llama3.1-405b-lora", "llama3.1-405b", 64, steps=1),  # some 40 seconds each
    )
}


def write_data(folder: Path) -> None:
    """Instructions of varied lengths to pack, and texts longer than a sequence."""
    source = random.Random(SEED)
    text = "".join(source.choices("abcdefghijklmnopqrstuvwxyz     ", k=50_000))

    def words(length: int) -> str:
        start = source.randrange(len(text) - length)
        return text[start : start + length]

    examples = [
        {"instruction": words(SHORTEST), "output": words(source.randint(SHORTEST, LONGEST))} for _ in range(EXAMPLES)
    ]
    texts = [{"text": words(TEXT_LENGTH)} for _ in range(TEXTS)]
    for name, records in (("instructions", examples), ("texts", texts)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def shoal(arguments: list[str], seconds: float) -> dict[str, Any]:
    """The JSON object that a command prints; a RuntimeError with its message if it fails."""
    paths = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "shoal", *arguments, "--json"]
    process = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=max(seconds, 0.1))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the process that trains too: it would keep the GPU's memory
        process.communicate()
        raise RuntimeError(f"not done after {max(seconds, 0):.0f} s") from None
    if process.returncode:
        raise RuntimeError(err.strip()[-1000:] or f"status {process.returncode}")
    found: dict[str, Any] = json.loads(out)
    return found


def measure(case: Case, folder: Path, *, tiny: bool, seconds: float) -> dict[str, Any]:
    """Plan and measure one case; a failure is recorded."""
    began, recipe = time.perf_counter(), str(ROOT / "recipes" / f"{case.recipe}.yaml")
    record: dict[str, Any] = {"recipe": f"recipes/{case.recipe}.yaml", "shape": case.shape, "world_size": case.world}
    try:
        plan = shoal(["plan", recipe], seconds)
        speed = plan["speed"]
        record["planned"] = {
            "gpu": plan["hardware"]["gpu"],
            **{key: plan["memory"][key] for key in ("allocated_gib", "reserved_gib")},
            "tokens_per_second_per_gpu": speed["tokens_per_second_per_gpu"],
        }
        options = ["--world", str(case.world), "--real", "--warmup", "1", "--steps", str(case.steps)]
        left = seconds - (time.perf_counter() - began)
        record["rank"] = shoal(["bench", "rank", recipe, *case.overrides(folder, tiny=tiny), *options], left)
        measured, planned = record["rank"]["measured"]["allocated_gib"], record["planned"]["allocated_gib"]
        record |= {"planned_gib": planned, "measured_gib": measured, "ratio": round(measured / planned, 4)}
        if record["rank"]["forecast"]:
            forecast = record["rank"]["forecast"]["allocated_gib"]
            record |= {"forecast_gib": forecast, "ratio_to_forecast": round(measured / forecast, 4)}
        record["status"] = "measured"
    except RuntimeError as failure:
        record["status"] = f"failed: {failure}"
    record["seconds"] = round(time.perf_counter() - began, 1)
    return record


def summarize(record: dict[str, Any]) -> str:
    name = record["recipe"]
    if record["status"] != "measured":
        return f"{name}: {record['status']}"
    return (
        f"{name}: {record['measured_gib']:.2f} GiB measured, {record['planned_gib']:.2f} planned, ratio "
        f"{record['ratio']:.3f}; rank 0 of {record['world_size']} on {record['rank']['machine']['device']}, "
        f"{record['seconds']:.0f} s"
    )


def annotate(recipe: str, record: dict[str, Any]) -> str:
    """The recipe's text with the measured memory in a line of its comment, after the forecast."""
    rank = record["rank"]
    line = (
        f"# Measured, rank 0 of {record['world_size']} on one {rank['machine']['device']} with random weights "
        f"(benchmarks/gpu/ranks.py): {record['measured_gib']:.1f} GiB."
    )
    lines = [one for one in recipe.splitlines() if not one.startswith("# Measured, rank 0 of ")]
    forecast = next(index for index, one in enumerate(lines) if one.startswith("# Forecast by shoal plan: "))
    return "\n".join([*lines[: forecast + 1], line, *lines[forecast + 1 :]]) + "\n"


def annotate_recipes(folder: Path, recipes: Path) -> None:
    for name, record in json.loads((folder / "ranks.json").read_text()).items():
        if record["status"] == "measured" and record["rank"]["machine"]["device"] != "cpu":
            file = recipes / f"{name}.yaml"
            file.write_text(annotate(file.read_text(), record))


def main(folder: Path, chosen: list[str], *, tiny: bool, seconds: float) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    file, until = folder / "ranks.json", time.perf_counter() + seconds
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    with tempfile.TemporaryDirectory() as data:
        write_data(Path(data))
        for name in chosen:
            found[name] = measure(CASES[name], Path(data), tiny=tiny, seconds=until - time.perf_counter())
            print(summarize(found[name]), flush=True)
            file.write_text(json.dumps(found, indent=1) + "\n")
    return int(any(found[name]["status"] != "measured" for name in chosen))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), help="keeps the others of ranks.json")
    parser.add_argument("--tiny", action="store_true", help="small models, on a CPU")
    parser.add_argument("--seconds", type=float, default=540, help="after which no case is started, and one is stopped")
    parser.add_argument("--annotate", action="store_true", help="only write ranks.json into the recipes' comments")
    given = parser.parse_args()
    if given.annotate:
        annotate_recipes(given.folder, ROOT / "recipes")
        sys.exit()
    sys.exit(main(given.folder, given.only, tiny=given.tiny, seconds=given.seconds))
