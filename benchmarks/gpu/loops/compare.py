"""Cases in processes of their own, and their losses beside those of the plain loop."""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from loops.cases import BOUNDS, OVERHEAD_LIMIT, PATIENCE, PLACES, SEED, cases

COMMAND = Path(__file__).resolve().parents[1] / "own_loops.py"


def start(spec: dict[str, Any], processes: int) -> dict[str, Any]:
    """Run a case in processes of its own; its result, or why there is none."""
    folder = Path(spec["folder"])
    folder.mkdir(parents=True)
    (folder / "case.json").write_text(json.dumps(spec))
    workers, logs = [], [folder / f"rank-{rank}.log" for rank in range(processes)]
    for rank, log in enumerate(logs):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        if processes > 1:
            ranks = {"RANK": str(rank), "WORLD_SIZE": str(processes), "LOCAL_RANK": "0", "SHOAL_LAUNCH": str(folder)}
            # With different host ids, NCCL treats the processes as different nodes and does not check for a shared GPU.
            environment |= {**ranks, "NCCL_HOSTID": f"machine-{rank}"}
        command = [sys.executable, str(COMMAND), "--work", str(folder / "case.json")]
        with log.open("w") as output:
            workers.append(
                subprocess.Popen(command, env=environment, cwd=folder, stdout=output, stderr=subprocess.STDOUT)
            )
    deadline, late = time.monotonic() + PATIENCE, False
    for worker in workers:
        try:
            worker.wait(timeout=max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            late = True
    for worker in workers:
        if worker.poll() is None:
            worker.kill()
            worker.wait()
    if late or any(worker.returncode for worker in workers):
        written = [one for one in (*logs, *folder.glob("runs/*/logs/*")) if one.stat().st_size]
        why = f"more than {PATIENCE} seconds" if late else "a process failed"
        return {"failed": why, "log": [one.read_text(errors="replace")[-1500:] for one in written]}
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def spec_of(
    folder: Path,
    loop: str,
    precision: str,
    overrides: list[str],
    *,
    plain: bool = False,
    steps: int,
    runs: Path | None = None,
) -> dict[str, Any]:
    runs = runs or folder / "runs"
    common = ["log.every=1", "log.to=[]", f"run_dir={runs}", "checkpoint.at_end=false", f"seed={SEED}"]
    length = ["train.epochs=null", f"train.steps={steps}", f"train.precision={precision}"]
    compiled = [] if any(one.startswith("train.compile") for one in overrides) else ["train.compile=false"]
    return {
        "loop": loop,
        "precision": precision,
        "plain": plain,
        "steps": steps,
        "folder": str(folder),
        "runs": str(runs),
        "overrides": [*common, *length, *compiled, *overrides],
    }


def difference(found: list[float], expected: list[float]) -> float:
    assert len(found) == len(expected), f"{len(found)} losses for {len(expected)} steps"
    return max(abs(one / other - 1) for one, other in zip(found, expected, strict=True))


def compare(work: Path, only: list[str], steps: int, at_once: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every case beside the plain loop of the same precision."""
    chosen = [
        (", ".join([loop, precision, place, *more]), loop, precision, place, more)
        for loop, precision, place, more in cases()
    ]
    chosen = [one for one in chosen if not only or any(word in one[0] for word in only)]
    with ThreadPoolExecutor(at_once) as pool:
        plain = {
            (loop, precision): pool.submit(
                start, spec_of(work / f"plain-{loop}-{precision}", loop, precision, [], plain=True, steps=steps), 1
            )
            for loop, precision in dict.fromkeys((one[1], one[2]) for one in chosen)
        }
        started = []
        for number, (name, loop, precision, place, more) in enumerate(chosen):
            processes, overrides = PLACES[place]
            spec = spec_of(work / f"case-{number}", loop, precision, [*overrides, *more], steps=steps)
            started.append((name, loop, precision, processes, pool.submit(start, spec, processes)))
        for name, loop, precision, processes, case in started:
            yield name, judge(case.result(), plain[loop, precision].result(), precision, processes)


def judge(found: dict[str, Any], reference: dict[str, Any], precision: str, processes: int) -> dict[str, Any]:
    if failed := next((one for one in (found, reference) if "failed" in one), None):
        return failed
    record: dict[str, Any] = {
        "processes": processes,
        "loss": float(f"{difference(found['losses'], reference['losses']):.2e}"),
        "first_and_last": [round(found["losses"][index], 6) for index in (0, -1)],
    }
    if reference["evaluated"]:
        record["evaluation"] = float(f"{difference(found['evaluated'], reference['evaluated']):.2e}")
    worst = max(record["loss"], record.get("evaluation", 0.0))
    record["passed"] = worst <= BOUNDS[precision]
    return record


def resume(work: Path, steps: int) -> dict[str, Any]:
    """A run that stops halfway and is resumed has the losses of one that does not, bitwise."""
    settings = ["train.deterministic=true", "checkpoint.at_end=true"]
    parts = work / "parts"
    lengths: dict[str, tuple[int, Path | None]] = {
        "whole": (steps, None),
        "first": (steps // 2, parts),
        "second": (steps, parts),
    }
    found: dict[str, dict[str, Any]] = {}
    for name, (length, runs) in lengths.items():
        found[name] = start(spec_of(work / name, "weighted", "bf16-mixed", settings, steps=length, runs=runs), 1)
        if "failed" in found[name]:
            return found[name]
    losses, expected = found["second"]["losses"], found["whole"]["losses"]
    return {"passed": losses == expected, "loss": difference(losses, expected)}


def overhead(work: Path, kind: str, steps: int, rounds: int) -> dict[str, Any]:
    spec = {"loop": kind, "overhead": True, "steps": steps, "rounds": rounds, "folder": str(work / f"overhead-{kind}")}
    found = start(spec, 1)
    if "failed" in found:
        return found
    plain, ours = (statistics.median(found[name]) for name in ("plain", "run.steps"))
    record = {"plain_ms": round(plain, 3), "run_steps_ms": round(ours, 3), "added_ms": round(ours - plain, 3)}
    record |= {"overhead": round(ours / plain - 1, 4), "steps": steps, "rounds": found}
    if kind == "large":
        record["limit"], record["passed"] = OVERHEAD_LIMIT, ours / plain - 1 <= OVERHEAD_LIMIT
    return record
