"""The published results of other sources: what they hold, which are held out, and the error of the forecast on them."""

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FOLDER = BENCHMARKS / "plan" / "published"


@cache
def script() -> Any:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import plan_errors
        import plan_published
    finally:
        sys.path.remove(str(BENCHMARKS))
    return plan_published, plan_errors


def test_every_row_has_a_source_with_an_address_and_says_what_is_unknown():
    sources = json.loads((FOLDER / "sources.json").read_text())
    rows = [json.loads(line) for line in (FOLDER / "rows.jsonl").read_text().splitlines()]
    assert len(rows) > 400
    assert {row["source"] for row in rows} == set(sources)
    assert all("http" in one["address"] and one["date"] for one in sources.values())
    assert all("unknown" in row and ("memory" in row or "tokens_per_second_per_gpu" in row) for row in rows)
    # A third of those that were collected before the split was held out first, and opened when others took its place.
    split = [one for one in sources.values() if not one.get("later")]
    assert sum(one.get("opened", False) for one in split) == len(split) // 3
    assert not any(one["held_out"] and one.get("opened") for one in sources.values())


def test_held_out_rows_are_read_only_when_asked_for():
    published, _ = script()
    given, held = (published.rows_of(held_out=which) for which in (False, True))
    assert not {row["source"] for row in given} & {row["source"] for row in held}
    assert len(given) + len(held) == len((FOLDER / "rows.jsonl").read_text().splitlines())
    assert all(published.sources()[row["source"]]["held_out"] for row in held)


def test_the_error_on_other_sources_is_bounded():
    memory, *found, speeds, median, ninety = json.loads((FOLDER / "errors.json").read_text())["– new sources"]
    assert min(int(memory), int(speeds)) > 100
    shares = [float(cell.rstrip("%")) / 100 for cell in (*found, median, ninety)]
    assert all(share < most for share, most in zip(shares, (0.036, 0.145, 0.073, 0.27), strict=True))


def test_a_rows_recomputed_parts_give_a_memory_forecast_and_no_row_is_there_twice():
    published, _ = script()
    lines = (FOLDER / "rows.jsonl").read_text().splitlines()
    ours = [line for line in lines if json.loads(line)["source"] == "litgpt-config-hub"]
    assert len(ours) == len(set(ours))
    line = next(json.loads(line) for line in lines if "recomputed_parts" in line)
    models = json.loads((FOLDER / "models.json").read_text())
    row = published.read_row({**line, "memory": [1, "GiB", "allocated"]}, models)
    assert {one.what for one in published.compare([row], all_counted=True)} == {"memory", "speed"}


@pytest.mark.slow
def test_the_written_errors_are_those_of_this_code():
    published, report = script()
    figures = published.compare(published.read_published())
    written = json.loads((FOLDER / "errors.json").read_text())
    assert written == {name: report.cells(some) for name, some in report.groups(figures)}, "run plan_errors.py"


def test_a_constant_is_replaced_for_its_own_source_and_put_back():
    _, report = script()
    before = dict(report.FAMILIES)
    with report.without(report.WITHOUT[0]):
        assert report.FAMILIES["a100-80gb"] != before["a100-80gb"]
    assert before == report.FAMILIES


def test_a_speed_above_the_peak_of_the_device_is_not_counted():
    published, _ = script()
    rows = [row for row in published.read_published() if "peak" in row.not_counted]
    assert rows
    assert not {one.row for one in published.compare(rows)} & {row for row in rows if row.gib is None}
    assert all(one.what == "memory" for one in published.compare(rows))


def test_a_memory_that_is_no_peak_of_the_run_as_stated_is_not_counted():
    published, _ = script()
    rows = [row for row in published.read_published() if row.memory_not_counted]
    assert rows
    assert all(one.what == "speed" for one in published.compare(rows))
    assert {one.what for one in published.compare(rows, all_counted=True)} == {"memory", "speed"}


def test_the_libraries_of_a_row_are_those_of_the_wheels_that_it_ran_with():
    published, _ = script()
    years = {(row.source, row.run.gpu.name): row.run.traits.software for row in published.read_published() if row.run}
    # PyTorch 2.5 and 2.6 in 2025, on Hopper; PyTorch 2.8; a container, and nightly builds.
    for source, gpu, year in (
        ("torchtune-clusters", "h100-80gb", 2024),
        ("torchtune-clusters", "a100-80gb", 2025),
        ("smollm3", "h100-80gb", 2024),  # by its date
        ("scicom-throughput", "h100-80gb", 2025),
        ("lsai-ddp", "gh200-120gb", 2025),
        ("aws-torchtitan", "h100-80gb", 2025),
    ):
        assert years[source, gpu] == year, source


@pytest.mark.parametrize("name", ["docs/plan-accuracy.md"])
def test_the_documents_have_the_table(name):
    _, report = script()
    text = (BENCHMARKS.parent / name).read_text()
    table = text[text.index(report.BEGIN) : text.index(report.END)]
    written = json.loads((FOLDER / "errors.json").read_text())
    assert all(f"| {' | '.join([row, *cells])} |" in table for row, cells in written.items())
