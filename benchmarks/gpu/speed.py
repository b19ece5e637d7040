"""How fast shoal and its peers train on this GPU: `python benchmarks/gpu/speed.py OUTPUT_FOLDER`.

One process a case, the same weights and rows for all. Writes speed.json and speed.png into the folder and prints a
table; what each case is stands in README.md beside this.
"""

import argparse
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent / "src"), str(HERE)]

from peers import cases, chart, numerics  # noqa: E402
from peers.machine import describe_machine  # noqa: E402
from peers.measure import MEASURED, Session, measure, prepare, summary  # noqa: E402
from peers.report import Report, markdown, read_report, write_report  # noqa: E402


def main(arguments: list[str] | None = None) -> int:
    told = parse(arguments)
    among = numerics if told.numerics else cases
    if told.list:
        print("\n".join(case.name for case in among.CASES))
        return 0
    chosen = among.select(told.only, told.tiny)
    if not chosen:
        print(f"No case has {' or '.join(told.only)} in its name; --list prints the names.", file=sys.stderr)
        return 2
    report = Report(machine=describe_machine(), tiny=told.tiny)
    if told.merge:
        report.take_over(read_report(told.merge))
    results = report.numeric if told.numerics else report.cases
    told.output.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + told.seconds if told.seconds else float("inf")
    with tempfile.TemporaryDirectory(prefix="speed-") as folder:
        session = Session(Path(folder), told.warmup, told.steps, told.patience, until, report.machine["gpu"])
        # Before shoal is asked for rows: its cases look for them there.
        os.environ["SHOAL_CACHE"] = str(session.cache)
        if told.numerics:
            weights, steps = session.work / "weights", numerics.TINY_STEPS if told.tiny else numerics.STEPS
            numerics.write_weights(weights, chosen[0].shape)
            session = replace(session, weights=weights, warmup=1, steps=steps - 1)
        prepare(chosen, session)
        for case in chosen:
            record = measure(case, session)
            print(f"{case.name}: {summary(record)}", file=sys.stderr, flush=True)
            attempted = record["status"] == MEASURED or record["status"].startswith("failed")
            if attempted or case.name not in results:
                results[case.name] = record
            # After every case, so that a call that is cut short leaves what it has.
            write_report(told.output / "speed.json", report)
    chart.draw(told.output / "speed.png", report)
    print(markdown(report))
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure shoal and its peers on one GPU.")
    parser.add_argument("output", type=Path, help="folder for speed.json and speed.png")
    parser.add_argument("--only", nargs="+", default=[], metavar="PATTERN", help="only cases with this in their name")
    parser.add_argument("--numerics", action="store_true", help="losses against fp32, instead of speed")
    parser.add_argument("--merge", type=Path, metavar="JSON", help="keep what this has and is not measured again")
    parser.add_argument("--seconds", type=float, help="in all; cases not begun by then are recorded as not run")
    parser.add_argument("--patience", type=float, default=200, metavar="SECONDS", help="for one case (200)")
    parser.add_argument("--tiny", action="store_true", help="small enough for a CPU: shows that cases run, not speed")
    parser.add_argument("--warmup", type=int, help="steps that are not measured (6)")
    parser.add_argument("--steps", type=int, help="steps that are (12)")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    told = parser.parse_args(arguments)
    told.warmup = told.warmup or (2 if told.tiny else 6)
    told.steps = told.steps or (2 if told.tiny else 12)
    return told


if __name__ == "__main__":
    raise SystemExit(main())
