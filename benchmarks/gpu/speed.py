"""Training speed of shoal and other tools on this GPU: `python benchmarks/gpu/speed.py OUTPUT_FOLDER`.

One process per case, with the same weights and sequences for all. Writes speed.json and speed.png to the folder and
prints a table. README.md in this folder describes each case.
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
    args = parse(arguments)
    module = numerics if args.numerics else cases
    if args.list:
        print("\n".join(case.name for case in module.CASES))
        return 0
    chosen = module.select(args.only, args.tiny)
    if not chosen:
        print(f"No case matches {' or '.join(args.only)}; --list prints the names.", file=sys.stderr)
        return 2
    report = Report(machine=describe_machine(), tiny=args.tiny)
    if args.merge:
        report.merge(read_report(args.merge))
    results = report.numeric if args.numerics else report.cases
    args.output.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + args.seconds if args.seconds else float("inf")
    with tempfile.TemporaryDirectory(prefix="speed-") as folder:
        session = Session(Path(folder), args.warmup, args.steps, args.patience, until, report.machine["gpu"])
        # Set before sequences are prepared: shoal's cases use the same cache.
        os.environ["SHOAL_CACHE"] = str(session.cache)
        if args.numerics:
            weights, steps = session.work / "weights", numerics.TINY_STEPS if args.tiny else numerics.STEPS
            numerics.write_weights(weights, chosen[0].shape)
            session = replace(session, weights=weights, warmup=1, steps=steps - 1)
        prepare(chosen, session)
        for case in chosen:
            record = measure(case, session)
            print(f"{case.name}: {summary(record)}", file=sys.stderr, flush=True)
            attempted = record["status"] == MEASURED or record["status"].startswith("failed")
            if attempted or case.name not in results:
                results[case.name] = record
            # After every case, so that an interrupted call keeps its results.
            write_report(args.output / "speed.json", report)
    chart.draw(args.output / "speed.png", report)
    print(markdown(report))
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure shoal and other tools on one GPU.")
    parser.add_argument("output", type=Path, help="folder for speed.json and speed.png")
    parser.add_argument("--only", nargs="+", default=[], metavar="PATTERN", help="only cases whose name contains this")
    parser.add_argument("--numerics", action="store_true", help="compare losses with fp32 instead of measuring speed")
    parser.add_argument("--merge", type=Path, metavar="JSON", help="keep results of this file")
    parser.add_argument("--seconds", type=float, help="total time limit; later cases are recorded as not run")
    parser.add_argument("--patience", type=float, default=200, metavar="SECONDS", help="time limit of a case (200)")
    parser.add_argument("--tiny", action="store_true", help="small enough for a CPU: checks that cases run")
    parser.add_argument("--warmup", type=int, help="warmup steps (6)")
    parser.add_argument("--steps", type=int, help="measured steps (12)")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    args = parser.parse_args(arguments)
    args.warmup = args.warmup or (2 if args.tiny else 6)
    args.steps = args.steps or (2 if args.tiny else 12)
    return args


if __name__ == "__main__":
    raise SystemExit(main())
