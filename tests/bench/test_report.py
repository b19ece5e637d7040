"""Measured times compared with the ring formula, with hand-computed values."""

import json
from pathlib import Path

import pytest

from shoal.bench.collectives_report import CollectivesReport, Measured, Timing
from shoal.bench.output import write_report
from shoal.catalogue.gpus import find_link
from shoal.plan.speed.ring import OPERATIONS, Operation

MIB = 2**20


def timing(operation: Operation, size: int, seconds: float) -> Timing:
    return Timing(operation, size, seconds, 0.9 * seconds, 1.1 * seconds, 20, 1)


def report(*timings: Timing, link: str | None = None, faults: tuple[str, ...] = ()) -> CollectivesReport:
    found = Measured("NVIDIA H200", "nccl 2.28.9", "2.13.0", 64, 4, 1, "fp32", list(timings), list(faults))
    return CollectivesReport(Measured.from_dict(found.as_dict()), find_link(link) if link else None)


def test_the_bandwidths_of_100_mb_in_one_millisecond_on_four_ranks() -> None:
    found = report(timing("all-reduce", 100_000_000, 1e-3), timing("all-gather", 100_000_000, 1e-3)).as_dict()
    assert found["link"] == {"name": "measured", "bytes_per_second": pytest.approx(150e9)}
    reduced, gathered = found["rows"]
    assert (reduced["operation"], gathered["operation"]) == ("all-reduce", "all-gather")
    assert reduced["algorithm_bandwidth"] == pytest.approx(100e9)
    assert (reduced["bus_bandwidth"], reduced["share"]) == (pytest.approx(150e9), pytest.approx(1))
    # Half of the bytes in the same time: half of the best measured bandwidth.
    assert (gathered["bus_bandwidth"], gathered["share"]) == (pytest.approx(75e9), pytest.approx(0.5))
    assert gathered["formula_seconds"] == pytest.approx(0.5e-3)


def test_the_formula_uses_the_named_link() -> None:
    found = report(timing("all-reduce", 100_000_000, 1e-3), link="nvlink4")
    assert found.as_dict()["link"] == {"name": "nvlink4", "bytes_per_second": 450e9}
    assert found.share(found.measured.timings[0]) == pytest.approx(1 / 3)
    assert "The ring formula uses 450 GB/s, nvlink4's in the catalogue." in found.text()


def test_the_fit_is_over_the_bytes_that_a_link_carries() -> None:
    timings = [
        timing(operation, size, 10e-6 + factor * size / 100e9)
        for operation, factor in zip(OPERATIONS, (1.5, 0.75, 0.75), strict=True)
        for size in (MIB // 256, MIB // 16, MIB, 16 * MIB)
    ]
    found = report(*timings)
    for operation in OPERATIONS:
        fit = found.as_dict()["operations"][operation]["fit"]
        assert (fit["latency"], fit["bytes_per_second"]) == (pytest.approx(10e-6), pytest.approx(100e9))
    assert "all-reduce      10.0 µs + 1.5 × size / 100 GB/s" in found.text()


def test_the_table_has_a_line_for_each_measurement() -> None:
    lines = report(timing("all-reduce", 16 * MIB, 1e-3)).text().splitlines()
    assert lines[0] == "4 × NVIDIA H200 (nccl 2.28.9, fp32)"
    shown = ["all-reduce", "16 MiB", "1.00 ms", "900 µs – 1.10 ms", "16.8 GB/s", "25.2 GB/s", "100%"]
    assert [part.strip() for part in lines[3].split("  ") if part.strip()] == shown
    assert "all-gather      no fit" in "\n".join(lines)


def test_a_report_without_a_correct_result_can_be_printed() -> None:
    found = report(faults=("all-reduce of 4 KiB gave a wrong result on rank 1",))
    assert not found.correct
    assert found.as_dict()["link"] == {"name": "measured", "bytes_per_second": None}
    assert found.text()
    assert found.fault().startswith("The results are wrong: all-reduce of 4 KiB gave a wrong result on rank 1. ")


def test_without_matplotlib_the_json_is_written_and_the_missing_plot_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    notes = write_report(report(timing("all-reduce", MIB, 1e-3)).as_dict(), tmp_path, lambda: b"")
    assert notes == ["collectives.png was not written: plots need matplotlib; pip install 'shoal[plot]'."]
    assert [path.name for path in tmp_path.iterdir()] == ["collectives.json"]
    assert json.loads((tmp_path / "collectives.json").read_text())["config"]["ranks"] == 4
