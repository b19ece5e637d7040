"""The results: kept as JSON, merged with earlier ones, shown as a Markdown table."""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from peers import numerics
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

    def take_over(self, earlier: "Report") -> None:
        """What was measured before. It must be of the same machine; newer packages are worth a word."""
        if earlier.tiny != self.tiny or earlier.machine["gpu"] != self.machine["gpu"]:
            raise SystemExit(
                "--merge: these were measured on another machine, or with --tiny; merge them with nothing."
            )
        if earlier.machine["packages"] != self.machine["packages"]:
            print("--merge: those were measured with other versions of the packages.", file=sys.stderr)
        self.cases, self.numeric = earlier.cases, earlier.numeric

    def packing(self) -> dict[str, float]:
        """Targets a second in packed rows, divided by those in rows padded to the longest of their batch."""
        speeds = {name: one["tokens_per_second"] for name, one in self.cases.items() if one["status"] == MEASURED}
        packed = speeds.get("packing-packed")
        return {name: packed / speed for name, speed in speeds.items() if packed and name.startswith("packing-padded")}

    def drifts(self) -> dict[str, numerics.Drift]:
        """How far the losses are from fp32."""
        return numerics.drifts({name: one["losses"] for name, one in self.numeric.items() if _measured(one)})


def write_report(path: Path, report: Report) -> None:
    """Whole or not at all."""
    whole = {
        "machine": report.machine,
        "tiny": report.tiny,
        "jobs": JOBS,
        "cases": _in_order(report.cases, CASES),
        "packed_against_padded": report.packing(),
        "numerics": _in_order(report.numeric, numerics.CASES),
        "distance_from_fp32": {name: asdict(drift) for name, drift in report.drifts().items()},
        "promised_distance": {name: asdict(one) for name, one in numerics.promises(report.drifts()).items()},
    }
    new = path.with_suffix(".new")
    new.write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n")
    new.replace(path)


def read_report(path: Path) -> Report:
    found = json.loads(path.read_text())
    return Report(found["machine"], found["tiny"], found["cases"], found["numerics"])


def markdown(report: Report) -> str:
    return "\n".join([*_speed_lines(report), *_packing_lines(report), *_numerics_lines(report)])


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
        yield "MFU is tokens a second × operations a token / the chip's peak in bf16. Operations a token:"
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


def _packing_lines(report: Report) -> Iterator[str]:
    for name, ratio in report.packing().items():
        yield ""
        yield f"Packed rows: {ratio:.2f} × the targets a second of {report.cases[name]['label']}."


def _numerics_lines(report: Report) -> Iterator[str]:
    if not report.numeric:
        return
    records, drifts = _in_order(report.numeric, numerics.CASES), report.drifts()
    promises = numerics.promises(drifts)
    steps = max((len(record["losses"]) for record in records.values() if _measured(record)), default=0)
    yield ""
    yield f"| {steps} steps from the same weights: the loss against fp32's | mean | largest | at the end | promised |"
    yield "| --- | --- | --- | --- | --- |"
    for name, record in records.items():
        drift = drifts.get(name)
        if drift is None:
            why = "the reference" if name == numerics.REFERENCE else "not as many losses as the reference"
            yield f"| {record['label']} | {why if _measured(record) else record['status'][:100]} | | | |"
        else:
            numbers = f"{drift.mean:.2e} | {drift.largest:.2e} | {drift.last:.2e}"
            yield f"| {record['label']} | {numbers} | {_promised(promises.get(name))} |"


def _promised(promise: numerics.Promise | None) -> str:
    if promise is None:
        return ""
    largest = "" if promise.largest is None else f", largest {promise.largest:.0e}"
    return f"mean {promise.mean:.1e}{largest}: {'kept' if promise.kept else 'NOT KEPT'}"


def _in_order(records: Records, cases: list[Any]) -> Records:
    return {case.name: records[case.name] for case in cases if case.name in records}


def _measured(record: dict[str, Any]) -> bool:
    return record["status"] == MEASURED


def _shown(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)
