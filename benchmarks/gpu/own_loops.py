"""Training loops of one's own (`shoal.init`) on this GPU: `python benchmarks/gpu/own_loops.py OUTPUT_FOLDER`.

The examples of `examples/loops` and two loops of `loops/own.py`, which use the rest of the API (a frozen part, a
schedule, weights, accumulation, workers with pinned memory, evaluation, resume), are trained by shoal and by a plain
loop of torch alone: autocast, GradScaler, clipping and AdamW on the same samples. Their losses are compared. Two
processes share the GPU where there is one; each claims to be on a different node, because NCCL does not allow it
otherwise.

The overhead of `run.steps` is measured on a step of about 20 ms, and on one of a small model, where all that the host
does shows. Writes own_loops.json after every case. `--tiny`: small sizes, also on a CPU, to see that every case runs.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent / "src"), str(HERE)]

from loops.cases import AT_ONCE, BOUNDS, STEPS  # noqa: E402
from loops.compare import compare, overhead, resume  # noqa: E402
from loops.worker import run_worker  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--only", nargs="*", default=[], help="cases whose name has one of these words")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    file, steps = args.output / "own_loops.json", 4 if args.tiny else STEPS
    import torch

    machine: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.cuda.is_available()}
    if torch.cuda.is_available():
        machine["gpu"] = torch.cuda.get_device_name()
    kept: dict[str, Any] = json.loads(file.read_text())["cases"] if file.exists() else {}

    def record(name: str, found: dict[str, Any]) -> None:
        kept[name] = found
        report = {"machine": machine, "bounds": BOUNDS, "cases": kept}
        file.write_text(json.dumps(report, indent=1) + "\n")
        verdict = found.get("failed") or {True: "passed", False: "NOT WITHIN THE BOUND"}.get(found.get("passed"), "")
        shown = {key: value for key, value in found.items() if key not in ("log", "rounds", "passed", "failed")}
        print(f"{name}: {verdict} {json.dumps(shown)}", flush=True)
        for log in found.get("log", []):
            print(log, flush=True)

    with tempfile.TemporaryDirectory(prefix="own-loops-") as folder:
        work = Path(folder)
        for kind in ("large", "small"):
            if not args.only or f"overhead {kind}" in args.only:
                record(f"overhead {kind}", overhead(work, kind, *((12, 1) if args.tiny else (120, 5))))
        if not args.only or "resume" in args.only:
            record("resume", resume(work, steps))
        for name, found in compare(work, args.only, steps, 1 if args.tiny else AT_ONCE):
            record(name, found)
    return 0 if all(one.get("passed", "failed" not in one) for one in kept.values()) else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        run_worker(Path(sys.argv[2]))
    else:
        sys.exit(main())
