"""`benchmarks/gpu/ranks.py` without a GPU: each case is its recipe's job, and a record says what was measured."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shoal import api
from shoal.plan.models import read_shape

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu"
sys.path.insert(0, str(FOLDER))

import ranks  # noqa: E402


@pytest.mark.parametrize("name", ranks.CASES)
def test_a_case_is_its_recipe_but_for_weights_and_data(name: str, tmp_path: Path) -> None:
    case, file = ranks.CASES[name], FOLDER.parents[1] / "recipes" / f"{name}.yaml"
    recipe, measured = api.load_config(file, []), api.load_config(file, case.overrides(tmp_path, tiny=False))
    assert measured.model.shape == case.shape
    for block in ("adapter", "train", "parallel", "hardware"):
        assert getattr(measured, block) == getattr(recipe, block)
    assert (measured.data.max_length, measured.data.pack) == (recipe.data.max_length, recipe.data.pack)
    assert case.world == recipe.hardware.devices * recipe.hardware.nodes
    assert read_shape(measured.model) == read_shape(recipe.model)


def test_the_generated_data_fills_the_sequences(tmp_path: Path) -> None:
    ranks.write_data(tmp_path)
    texts = [json.loads(line)["text"] for line in (tmp_path / "texts.jsonl").read_text().splitlines()]
    assert min(map(len, texts)) > 512
    examples = [json.loads(line) for line in (tmp_path / "instructions.jsonl").read_text().splitlines()]
    tokens = sum(len(one["instruction"]) + len(one["output"]) for one in examples)
    assert tokens > 2 * 128 * 4096, "two steps of the largest recipe"


def test_a_case_that_takes_too_long_is_recorded_as_such(tmp_path: Path) -> None:
    assert ranks.main(tmp_path, ["pythia-1b"], tiny=True, seconds=0) == 1
    record = json.loads((tmp_path / "ranks.json").read_text())["pythia-1b"]
    assert record["status"] == "failed: not done after 0 s"


def test_measured_memory_is_one_line_of_the_comment_however_often_it_is_written(tmp_path: Path) -> None:
    recipe = FOLDER.parents[1] / "recipes" / "pythia-1b.yaml"
    original = [line for line in recipe.read_text().splitlines() if not line.startswith("# Measured, rank 0")]
    (tmp_path / recipe.name).write_text(recipe.read_text())
    for measured in (1.0, 16.04):
        rank = {"machine": {"device": "NVIDIA H200"}}
        record = {"status": "measured", "world_size": 2, "measured_gib": measured, "rank": rank}
        on_cpu = {**record, "rank": {"machine": {"device": "cpu"}}}
        failed = {"status": "failed: not done after 0 s"}
        (tmp_path / "ranks.json").write_text(json.dumps({"pythia-1b": record, "other": on_cpu, "third": failed}))
        ranks.annotate_recipes(tmp_path, tmp_path)
    written = (tmp_path / recipe.name).read_text().splitlines()
    added = [line for line in written if line not in original]
    assert len(added) == 1
    assert added[0].endswith("rank 0 of 2 on one NVIDIA H200 with random weights (benchmarks/gpu/ranks.py): 16.0 GiB.")
    assert written[written.index(added[0]) - 1].startswith("# Forecast by shoal plan")
    assert [line for line in written if line != added[0]] == original


@pytest.mark.slow
def test_forecast_and_measurement_of_a_rank_are_written_with_their_ratio(tmp_path: Path) -> None:
    (tmp_path / "ranks.json").write_text('{"earlier": {"status": "measured"}}')
    command = [sys.executable, str(FOLDER / "ranks.py"), str(tmp_path), "--tiny", "--only", "llama3.1-405b-lora"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads((tmp_path / "ranks.json").read_text())
    assert found.keys() == {"earlier", "llama3.1-405b-lora"}
    record = found["llama3.1-405b-lora"]
    assert record["planned"]["gpu"] == "h100-80gb"
    assert record["rank"]["chosen"]["mesh"]["dp_shard"] == 64
    assert record["ratio"] == pytest.approx(record["measured_gib"] / record["planned_gib"], abs=1e-4)
    assert "measured" in ended.stdout
