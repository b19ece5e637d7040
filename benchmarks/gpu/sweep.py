"""Memory and speed of many runs on this GPU compared with the forecast: `python benchmarks/gpu/sweep.py FOLDER`.

Writes FOLDER/sweep.jsonl as it goes, then sweep.json and sweep.md. Several rows share a process, because importing
torch takes longer than most rows. `--forecast sweep.json` measures nothing: it compares committed measurements with the
forecast of the code as it is now, without a GPU.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent.parent / "src"
sys.path[:0] = [str(SOURCE), str(HERE)]

from sweeps.forecast import H200, forecast, forecast_figures  # noqa: E402
from sweeps.report import Records, add, markdown, read_records, write_records  # noqa: E402
from sweeps.rows import Row, select  # noqa: E402

KEPT_LINES = 15  # of the log, for a row whose process died


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    if args.forecast:
        print(markdown(_merged(args.forecast)), end="")
        return 0
    chosen = select(args.only, args.held_out, args.part)
    if args.list or not chosen:
        print("\n".join(map(_planned, chosen)) or f"No row matches {' or '.join(args.only)}.")
        return 0 if chosen else 2
    if args.output is None:
        print("Name the folder for the results.", file=sys.stderr)
        return 2
    args.output.mkdir(parents=True, exist_ok=True)
    records = _merged(args.combine or args.merge)
    for record in [] if args.combine else measure(chosen, args):
        add(records, record)
    write_records(args.output / "sweep.json", records)
    (args.output / "sweep.md").write_text(markdown(records))
    print(markdown(records), end="")
    return 0


class Results:
    """The records of this call, in the file to which the worker appends them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.path.write_text("")
        self.records: list[dict[str, Any]] = []

    def read(self) -> bool:
        """Read and print new records. Returns whether there were any."""
        lines = self.path.read_text().split("\n")[len(self.records) : -1]  # the last may be incomplete
        for line in lines:
            self.records.append(json.loads(line))
            print(_line(self.records[-1]), flush=True)
        return bool(lines)

    def append(self, record: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        self.read()


def measure(rows: list[Row], args: argparse.Namespace) -> list[dict[str, Any]]:
    """The records of the rows that were measured or failed before the time was over."""
    results, until = Results(args.output / "sweep.jsonl"), time.time() + args.seconds
    with tempfile.TemporaryDirectory(prefix="sweep-") as folder:
        current, left = Path(folder) / "current", {row.name: row for row in rows}
        while left and time.time() < until:
            before = len(results.records)
            current.write_text("")
            reason = _run_worker(list(left), current, args, results, until)
            for record in results.records:
                left.pop(record["row"], None)
            if (died := left.pop(current.read_text(), None)) is not None and time.time() < until:
                results.append({**died.as_dict(tiny=args.tiny), "status": f"failed: {reason}"})
            if len(results.records) == before:
                print(f"{len(left)} rows were not measured: {reason}", flush=True)
                break
    return results.records


def _run_worker(names: list[str], current: Path, args: argparse.Namespace, results: Results, until: float) -> str:
    """Measure rows in one process until it ends, hangs in a row, or the time is over. Returns why it ended."""
    folder, log = current.parent, args.output / "sweep.log"
    task = folder / "task.json"
    values = {"rows": names, "tiny": args.tiny, "until": until, "work": str(folder), "current": str(current)}
    task.write_text(json.dumps(values))
    paths = os.pathsep.join([str(SOURCE), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths, "SHOAL_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    with log.open("a") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "sweeps.worker", str(task), str(results.path.resolve())],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        began, reason = time.time(), ""
        while process.poll() is None and not reason:
            time.sleep(0.1)
            if results.read():
                began = time.time()
            if time.time() > until:
                reason = "no time left"
            elif time.time() - began > args.patience:
                reason = f"not done after {args.patience:.0f} s"
        if reason:
            # The whole group: child processes may hold GPU memory.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    results.read()
    tail = " / ".join(log.read_text(errors="replace").strip().splitlines()[-KEPT_LINES:])
    return reason or f"status {process.returncode}: {tail[-1500:]}"


def _merged(paths: list[Path]) -> Records:
    found: Records = {}
    for path in paths:
        for record in read_records(path).values():
            add(found, record)
    return found


def _planned(row: Row) -> str:
    resolved = forecast(row.values(), H200)
    figures = forecast_figures(resolved)
    seconds = resolved.speed.step_seconds
    fits = "" if resolved.fits else "  DOES NOT FIT"
    held_out = "  held out" if row.held_out else ""
    return (
        f"{row.name:52} {figures['allocated_gib']:7.2f} {figures['reserved_gib']:7.2f} GiB "
        f"{figures['tokens_per_second']:10,.0f} tokens/s {seconds:7.3f} s{held_out}{fits}"
    )


def _line(record: dict[str, Any]) -> str:
    if record["status"] != "measured":
        return f"{record['row']}: {record['status'][:300]}"
    measured, expected = record["measured"], record["forecast"]
    shown = [
        f"{name} {measured[name]:,.1f} / {expected[name]:,.1f} = {measured[name] / expected[name]:.3f}"
        for name in expected
        if measured[name] is not None
    ]
    return f"{record['row']}: {', '.join(shown)}; {record['seconds']:.0f} s"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare memory and speed on one GPU with the forecast.")
    parser.add_argument("output", type=Path, nargs="?", help="folder for sweep.jsonl, sweep.json and sweep.md")
    parser.add_argument("--only", nargs="+", default=[], metavar="PATTERN", help="only rows whose name contains this")
    parser.add_argument("--part", metavar="K/N", help="every N-th of them, beginning with the K-th")
    held = parser.add_mutually_exclusive_group()
    held.add_argument("--held-out", dest="held_out", action="store_true", default=None, help="only held-out rows")
    held.add_argument("--given", dest="held_out", action="store_false", help="only the other rows")
    parser.add_argument("--seconds", type=float, default=540, help="total time limit (540)")
    parser.add_argument("--patience", type=float, default=120, metavar="SECONDS", help="time limit of a row (120)")
    parser.add_argument("--merge", nargs="+", type=Path, default=[], metavar="FILE", help="keep results of these files")
    parser.add_argument("--combine", nargs="+", type=Path, metavar="FILE", help="only merge these results; no GPU")
    parser.add_argument("--forecast", nargs="+", type=Path, metavar="FILE", help="compare these results; no GPU")
    parser.add_argument("--tiny", action="store_true", help="small models, on a CPU: checks that rows run")
    parser.add_argument("--list", action="store_true", help="print the rows with their forecast on an H200")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
