"""The results: written as JSON, merged with earlier ones, printed as a Markdown table."""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from peers import numerics
from peers.aims import aim_lines
from peers.cases import CASES, JOBS
from peers.measure import MEASURED

Records = dict[str, dict[str, Any]]


@dataclass
class Report:
    """Records by the name of their case."""

    machine: dict[str, Any]
    tiny: bool
    cases: Records = field(default_factory=dict)
    numeric: Records = field(default_factory=dict)

    def merge(self, earlier: "Report") -> None:
        """Include earlier results. They must be of the same kind of machine; other package versions give a warning."""
        if earlier.tiny != self.tiny or earlier.machine["gpu"] != self.machine["gpu"]:
            raise SystemExit("--merge: the file was measured on another machine, or only one of the two with --tiny.")
        if earlier.machine["packages"] != self.machine["packages"]:
            print("--merge: the file was measured with other package versions.", file=sys.stderr)
        self.cases, self.numeric = earlier.cases, earlier.numeric

    def packing(self) -> dict[str, float]:
        """Loss tokens per second of packed sequences, relative to sequences padded to the longest of their batch."""
        speeds = {name: one["tokens_per_second"] for name, one in self.cases.items() if one["status"] == MEASURED}
        packed = speeds.get("packing-packed")
        return {name: packed / speed for name, speed in speeds.items() if packed and name.startswith("packing-padded")}

    def drifts(self) -> dict[str, numerics.Drift]:
        """Difference of the losses from fp32."""
        return numerics.drifts({name: one["losses"] for name, one in self.numeric.items() if _measured(one)})


def write_report(path: Path, report: Report) -> None:
    """Write atomically."""
    content = {
        "machine": report.machine,
        "tiny": report.tiny,
        "jobs": JOBS,
        "cases": _in_order(report.cases, CASES),
        "packed_relative_to_padded": report.packing(),
        "numerics": _in_order(report.numeric, numerics.CASES),
        "difference_from_fp32": {name: asdict(drift) for name, drift in report.drifts().items()},
        "bounds": {name: asdict(one) for name, one in numerics.check_bounds(report.drifts()).items()},
    }
    new = path.with_suffix(".new")
    new.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    new.replace(path)


def read_report(path: Path) -> Report:
    found = json.loads(path.read_text())
    return Report(found["machine"], found["tiny"], found["cases"], found["numerics"])


def markdown(report: Report) -> str:
    return "\n".join([*_speed_lines(report), *_aims(report), *_packing_lines(report), *_numerics_lines(report)])


def _speed_lines(report: Report) -> Iterator[str]:
    if not report.cases:
        return
    yield "| job and tool | tokens/s | MFU | allocated GiB | reserved GiB | first step after | last loss |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    formulas: dict[str, None] = {}
    for job, heading in JOBS.items():
        members = [record for record in _in_order(report.cases, CASES).values() if record["job"] == job]
        if members:
            yield f"| **{heading}** | | | | | | |"
        for record in members:
            yield f"| {record['label']} | {' | '.join(_cells(record))} |"
            if record.get("mfu_formula"):
                formulas[f"{heading}: {record['mfu_formula']}"] = None
    if formulas:
        yield ""
        yield "MFU is tokens per second × FLOPs per token / the GPU's bf16 peak. FLOPs per token:"
        yield from (f"- {formula}" for formula in formulas)


def _cells(record: dict[str, Any]) -> list[str]:
    if not _measured(record):
        return [record["status"][:100], *[""] * 5]
    return [
        _shown(record["tokens_per_second"], "{:,.0f}"),
        _shown(record["mfu"], "{:.1%}"),
        _shown(record["allocated_gib"], "{:.1f}"),
        _shown(record["reserved_gib"], "{:.1f}"),
        _shown(record["first_step_seconds"], "{:.0f} s"),
        _shown(record["losses"][-1] if record["losses"] else None, "{:.4f}"),
    ]


def _aims(report: Report) -> Iterator[str]:
    measured = {name: record for name, record in report.cases.items() if _measured(record)}
    lines = list(aim_lines(measured, report.machine["gpu"]))
    if lines:
        yield from ("", "Aims:", *lines)


def _packing_lines(report: Report) -> Iterator[str]:
    for name, ratio in report.packing().items():
        yield ""
        yield f"Packed sequences: {ratio:.2f} × the loss tokens per second of {report.cases[name]['label']}."


def _numerics_lines(report: Report) -> Iterator[str]:
    if not report.numeric:
        return
    records, drifts = _in_order(report.numeric, numerics.CASES), report.drifts()
    bounds = numerics.check_bounds(drifts)
    steps = max((len(record["losses"]) for record in records.values() if _measured(record)), default=0)
    yield ""
    yield f"| {steps} steps from the same weights: difference of the loss from fp32 | mean | max | last | bound |"
    yield "| --- | --- | --- | --- | --- |"
    for name, record in records.items():
        drift = drifts.get(name)
        if drift is None:
            why = "the reference" if name == numerics.REFERENCE else "fewer losses than the reference"
            yield f"| {record['label']} | {why if _measured(record) else record['status'][:100]} | | | |"
        else:
            figures = f"{drift.mean:.2e} | {drift.maximum:.2e} | {drift.last:.2e}"
            yield f"| {record['label']} | {figures} | {_bound_text(bounds.get(name))} |"


def _bound_text(bound: numerics.Bound | None) -> str:
    if bound is None:
        return ""
    maximum = "" if bound.maximum is None else f", max {bound.maximum:.0e}"
    return f"mean {bound.mean:.1e}{maximum}: {'met' if bound.met else 'NOT MET'}"


def _in_order(records: Records, cases: list[Any]) -> Records:
    return {case.name: records[case.name] for case in cases if case.name in records}


def _measured(record: dict[str, Any]) -> bool:
    return record["status"] == MEASURED


def _shown(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)
