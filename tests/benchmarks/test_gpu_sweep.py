"""`benchmarks/gpu/sweep.py` without a GPU: what its rows cover, comparison with the forecast, and a tiny sweep."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu"
sys.path.insert(0, str(FOLDER))

import sweep  # noqa: E402
from sweeps.forecast import H200, Compared, compare, forecast, forecast_figures, outside  # noqa: E402
from sweeps.report import add, markdown, read_records, summarize, write_records  # noqa: E402
from sweeps.rows import ROWS, count_steps, select  # noqa: E402

from shoal.catalogue.shapes import parameters  # noqa: E402


def record(index: int, factor: float = 1.0, **more: Any) -> dict[str, Any]:
    """A row whose measurement is `factor` times the forecast."""
    row = ROWS[index]
    figures = forecast_figures(forecast(row.values(), H200))
    measured = {name: value * factor for name, value in figures.items()}
    return {**row.as_dict(), "machine": H200, "status": "measured", "measured": measured, "forecast": figures, **more}


@pytest.fixture(scope="module")
def resolved() -> list[Any]:
    return [forecast(row.values(), H200) for row in ROWS]


def test_rows_cover_families_sizes_lengths_precisions_and_recomputation(resolved: list[Any]) -> None:
    assert len({row.name for row in ROWS}) == len(ROWS) >= 45
    assert sum(row.held_out for row in ROWS) >= len(ROWS) / 3
    for rows in (ROWS, select([], True, None)):
        assert {row.precision for row in rows} == {"bf16-mixed", "bf16-true", "16-mixed", "32-true", "fp8"}
        assert {row.recompute for row in rows} >= {"none", "cheap", "selective", "full"}
    assert any(row.recompute == "offload" for row in ROWS)
    shapes = [one.run.shape for one in resolved]
    assert {shape.family for shape in shapes} >= {"llama", "gpt2", "neox", "mistral", "qwen2", "qwen3"}
    sizes = [parameters(shape) for shape in shapes]
    assert min(sizes) < 0.14e9
    assert max(sizes) > 8e9
    assert {row.length for row in ROWS} >= {512, 1024, 2048, 4096, 8192, 16_384}


def test_every_row_fits_and_takes_seconds(resolved: list[Any]) -> None:
    assert all(one.fits for one in resolved)
    for one in resolved:
        warmup, steps = count_steps(one.speed.step_seconds)
        assert (warmup + steps) * one.speed.step_seconds < 20
    assert count_steps(0.01) == (12, 30)
    assert count_steps(10.0) == (3, 4)


def test_parts_are_every_row_once() -> None:
    parts = [select([], None, f"{index}/3") for index in (1, 2, 3)]
    assert sorted(row.name for part in parts for row in part) == sorted(row.name for row in ROWS)
    assert {len(part) for part in parts} <= {len(ROWS) // 3, len(ROWS) // 3 + 1}
    assert {row.held_out for row in select(["gpt2"], False, None)} == {False}
    with pytest.raises(SystemExit, match="between"):
        select([], None, "4/3")


def test_measurements_are_compared_with_the_forecast_of_this_code() -> None:
    records = [record(0, 1.04), record(2, 1.06), record(3, 0.89), {**record(4), "status": "failed: out of memory"}]
    # Whatever was forecast when it was measured.
    records[0]["forecast"] = dict.fromkeys(records[0]["forecast"], 1.0)
    compared = compare(records)
    assert len(compared) == 9
    assert [round(one.error, 3) for one in compared[:3]] == [0.04] * 3
    missed = [(one.row, one.figure) for one in outside(compared)]
    memory = ("allocated_gib", "reserved_gib")
    slow = [(records[2]["row"], figure) for figure in (*memory, "tokens_per_second")]
    assert sorted(missed) == sorted([*slow, *((records[1]["row"], figure) for figure in memory)])
    assert outside(compared, memory=0.12, speed=0.12) == []


def test_the_summary_names_the_worst_row_of_all_and_of_those_held_out() -> None:
    rows = [Compared("a", "reserved_gib", 1.1, 1.0, False), Compared("b", "reserved_gib", 0.98, 1.0, True)]
    recorded = [rows[0], Compared("b", "reserved_gib", 0.98, 0.9, True)]
    found = summarize(rows, recorded)
    assert found["reserved GiB, all rows"] == {"rows": 2, "median": 0.06, "bias": 0.04, "worst": 0.1, "worst_row": "a"}
    assert found["reserved GiB, held out, as recorded"]["worst"] == 0.0889


def test_a_failure_does_not_replace_a_measurement(tmp_path: Path) -> None:
    failed = {**record(0), "status": "failed: status -9"}
    lines = tmp_path / "sweep.jsonl"
    lines.write_text("".join(json.dumps(one) + "\n" for one in (record(0), failed, {**record(1), "status": "failed"})))
    records = read_records(lines)
    assert [one["status"] for one in records.values()] == ["measured", "failed"]
    add(records, record(1))
    write_records(tmp_path / "sweep.json", records)
    assert read_records(tmp_path / "sweep.json") == records
    add(records, {**record(2), "status": "failed: status -9"})
    printed = markdown(records)
    assert f"| {ROWS[0].name} | 12." in printed
    assert f"- {ROWS[2].name}: failed: status -9" in printed


def test_results_of_several_calls_are_combined_and_compared_without_a_gpu(tmp_path: Path, capsys) -> None:
    for index in (1, 0):
        write_records(tmp_path / f"{index}.json", {ROWS[index].name: record(index, 1.2)})
    files = [str(tmp_path / "1.json"), str(tmp_path / "0.json")]
    assert sweep.main([str(tmp_path / "both"), "--combine", *files]) == 0
    assert list(read_records(tmp_path / "both" / "sweep.json")) == [ROWS[0].name, ROWS[1].name]
    capsys.readouterr()
    assert sweep.main(["--forecast", str(tmp_path / "both" / "sweep.json")]) == 0
    printed = capsys.readouterr().out
    assert "6 of 6 figures are outside" in printed
    assert printed.count("| **1.200** |") == 6


WORKER = """#!{python}
import json, sys, time
task, results = sys.argv[-2:]
task = json.load(open(task))
first, *others = task["rows"]
open(task["current"], "w").write(first)
if "32x1024" in first:
    open(results, "a").write({line!r} + "\\n")
    open(task["current"], "w").write(others[0])
    sys.exit("it died")
time.sleep(60)
"""


def test_rows_whose_process_dies_or_hangs_are_recorded_and_the_others_measured(tmp_path: Path, monkeypatch) -> None:
    worker = tmp_path / "worker"
    worker.write_text(WORKER.format(python=sys.executable, line=json.dumps(record(0, seconds=1.0))))
    worker.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(worker))
    assert sweep.main([str(tmp_path), "--only", *(row.name for row in ROWS[:3]), "--patience", "1.5"]) == 0
    measured, died, hung = read_records(tmp_path / "sweep.json").values()
    assert measured["status"] == "measured"
    assert died["status"].startswith("failed: status 1: ")
    assert "it died" in died["status"]
    assert hung["status"] == "failed: not done after 2 s"
    assert [measured["row"], died["row"], hung["row"]] == [row.name for row in ROWS[:3]]


@pytest.mark.slow
def test_a_tiny_sweep_measures_several_rows_in_one_process(tmp_path: Path) -> None:
    rows = ["smollm2-135m 8x2048", "gpt2 16x512"]
    command = [sys.executable, str(FOLDER / "sweep.py"), str(tmp_path), "--tiny", "--only", *rows]
    settings = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, env=settings, check=False)
    assert ended.returncode == 0, ended.stderr
    records = read_records(tmp_path / "sweep.json")
    assert [one["status"] for one in records.values()] == ["measured", "measured"], records
    for one in records.values():
        assert one["measured"]["tokens_per_second"] > 0
        assert len(one["measured"]["step_seconds"]) == one["steps"] == 2
    assert (tmp_path / "sweep.log").read_text().count("parameters, single") == 2
