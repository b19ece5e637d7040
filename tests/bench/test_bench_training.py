"""`shoal bench train` and `shoal bench rank`: they measure the real training loop and leave no files."""

import json
from pathlib import Path

import pytest

from tests.harness import settings
from tests.launch.command import forked_shoal, write_config


@pytest.fixture
def folder(instructions: Path, tmp_path: Path) -> Path:
    write_config(tmp_path, settings(instructions, train__steps=1000, data__validation=0.1))
    return tmp_path


def test_bench_train_measures_the_steps_after_warmup_and_saves_nothing(folder):
    result = forked_shoal(
        folder, "bench", "train", "run.yaml", "train.lr=1e-3", "--steps", "4", "--warmup", "2", "--json"
    )
    assert result.status == 0, result.err
    found = json.loads(result.out)
    assert (found["warmup"], found["steps"], len(found["losses"])) == (2, 4, 6)
    assert found["losses"][-1] < found["losses"][0]
    assert sorted(found["seconds"][2:])[1] <= found["step_seconds"] <= sorted(found["seconds"][2:])[2]
    assert found["tokens_per_second"] > 0
    assert found["first_step_seconds"] > found["step_seconds"]
    assert found["reserved_gib"] is None
    assert found["mfu"] is None, "a CPU's peak is not known"
    assert found["machine"]["device"] == "cpu"
    assert {path.name for path in folder.iterdir()} <= {"run.yaml", "cache", "hub"}, "nothing is left behind"


@pytest.mark.slow
def test_bench_rank_runs_one_rank_and_counts_its_own_tokens(folder):
    result = forked_shoal(
        folder, "bench", "rank", "run.yaml", "parallel.strategy=fsdp", "train.global_batch=32", "train.micro_batch=4",
        "--world", "8", "--real", "--steps", "2", "--warmup", "1", "--json",
    )  # fmt: skip
    assert result.status == 0, result.err
    found = json.loads(result.out)
    assert found["world_size"] == found["chosen"]["mesh"]["dp_shard"] == 8
    assert (found["traced"], found["difference"]) == (False, {}), "there is no forecast for a CPU"
    # The tokens of this rank only, which has an eighth of the sequences.
    assert found["tokens_per_second"] * found["step_seconds"] < 4 * 144


@pytest.mark.slow
def test_bench_train_does_not_touch_the_fallback_of_the_run(folder):
    saved = folder / "fallback" / "run" / "checkpoints" / "step-00000100"
    saved.mkdir(parents=True)
    (saved / "MANIFEST.json").write_text("{}")
    options = ["checkpoint.fallback=fallback", "--steps", "1", "--warmup", "1"]
    result = forked_shoal(folder, "bench", "train", "run.yaml", *options)
    assert result.status == 0, result.err
    assert (saved / "MANIFEST.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["train", "run.yaml", "train.global_batch=7"], "micro_batch"),
        (
            ["rank", "run.yaml", "parallel.strategy=ddp", "train.global_batch=32", "--world", "8", "--real"],
            "bench train",
        ),
    ],
)
def test_a_run_that_cannot_be_measured_is_a_mistake_in_one_sentence(arguments, sentence, folder):
    result = forked_shoal(folder, "bench", *arguments)
    assert result.status == 2
    assert sentence in result.err
    assert "Traceback" not in result.err
