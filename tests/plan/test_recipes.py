"""The recipes for GPUs: the jobs that the documents on distributed training describe, which fit where they say."""

import re
from pathlib import Path

import pytest
import yaml

from shoal import api
from shoal.catalogue.recipes import read_recipe, recipe_names
from shoal.config.schema import Config

FOLDER = Path(__file__).parents[2] / "recipes"
# GPU, devices, nodes, sequences per step, micro-batch, sequence length, rank of the adapter.
JOBS = {
    "llama2-7b-lora": ("a100-40gb", 4, 1, 64, 4, 2048, 8),
    "llama2-70b-lora": ("a100-80gb", 8, 1, 32, 1, 2048, 8),
    "llama3.1-405b-lora": ("h100-80gb", 8, 8, 128, 1, 4096, 16),
    "codellama-7b-chess": ("a100-80gb", 2, 1, 8, 4, 512, None),
    "pythia-1b": ("l40", 2, 1, 32, 16, 512, None),
    "llama2-7b-full": ("rtx4090", 4, 1, 16, 4, 2048, None),
}
FORECAST = re.compile(
    r"^# Forecast by shoal plan: ([\d.]+) GiB allocated, ([\d.]+) GiB reserved of ([\d.]+) GiB per device; "
    r"([\d,]+) tokens/s per device\.$",
    re.MULTILINE,
)


def load(name: str) -> Config:
    """The recipe as `shoal train` reads it; neither its weights nor its data have to be there."""
    return api.load_config(FOLDER / f"{name}.yaml", [])


def test_every_recipe_that_names_a_gpu_is_among_the_jobs() -> None:
    named = {name for name in recipe_names() if "gpu" in yaml.safe_load(read_recipe(name)).get("hardware", {})}
    assert named == JOBS.keys()


@pytest.mark.parametrize("name", JOBS)
def test_a_recipe_is_the_job_of_its_document_and_fits_on_the_gpus_that_it_names(name: str) -> None:
    config = load(name)
    gpu, devices, nodes, global_batch, micro_batch, length, rank = JOBS[name]
    found = api.plan(config).as_dict()
    assert found["fits"]
    assert not found["notes"]
    assert (found["hardware"]["gpu"], found["hardware"]["devices"], found["hardware"]["nodes"]) == (gpu, devices, nodes)
    assert found["chosen"]["world_size"] == devices * nodes
    assert (found["chosen"]["global_batch"], found["chosen"]["micro_batch"]) == (global_batch, micro_batch)
    assert config.data.max_length == length
    assert (config.adapter.kind, config.adapter.rank if rank else None) == ("lora" if rank else "none", rank)
    written = FORECAST.search(read_recipe(name))
    assert written is not None, "the comment has the forecast"
    allocated, reserved, memory, speed = (float(value.replace(",", "")) for value in written.groups())
    assert allocated == pytest.approx(found["memory"]["allocated_gib"], rel=0.02)
    assert reserved == pytest.approx(found["memory"]["reserved_gib"], rel=0.02)
    assert memory == pytest.approx(found["memory"]["device_gib"], abs=0.06)
    assert speed == pytest.approx(found["speed"]["tokens_per_second_per_gpu"], rel=0.05)
