"""`shoal bench rank`: one rank of a larger job, compared with the forecast."""

import json
import resource
from pathlib import Path

import pytest

from shoal.bench.rank import RankReport, report_steps
from shoal.bench.steps import Steps
from shoal.mistakes import UserMistake
from tests.bench.tracing import SMALL, trace_run
from tests.launch.command import forked_shoal, shoal, write_config

SHAPE = {"family": "llama", "hidden": 256, "layers": 3, "heads": 4, "kv_heads": 2, "ffn": 688, "vocab": 512}
CHOSEN = {
    "strategy": "fsdp", "reason": "set in the config", "world_size": 8, "data_parallel": 8, "micro_batch": 1,
    "grad_accum_steps": 1, "recompute": "none",
    "global_batch": 8, "mesh": {"dp_shard": 8, "tp": 1},
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = {
        "model": {"shape": SHAPE, "tokenizer": "bytes"},
        "data": {"source": "text", "path": "none.txt", "max_length": 512},
        "train": {"global_batch": 8, "micro_batch": 1},
        "parallel": {"strategy": "fsdp"},
        "hardware": {"gpu": "h100-80gb"},
    }
    write_config(tmp_path, config)
    return tmp_path


@pytest.mark.slow
def test_forecast_measured_and_difference_have_the_same_keys(folder, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # without a GPU a rank is traced unless --real is given
    result = forked_shoal(folder, "bench", "rank", "run.yaml", "--world", "8", "--json")
    assert result.status == 0, result.err
    found = json.loads(result.out)
    assert (found["traced"], found["world_size"], found["device"]) == (True, 8, "h100-80gb")
    assert found["chosen"]["mesh"]["dp_shard"] == 8
    assert found["forecast"].keys() == found["measured"].keys()
    assert found["forecast"]["terms"].keys() == found["measured"]["terms"].keys()
    assert {"weights", "gradients", "optimizer state", "activations", "head and loss"} <= found["measured"][
        "terms"
    ].keys()
    for side in ("forecast", "measured"):
        whole = found[side]["moments"][found[side]["terms_at"]]
        assert sum(found[side]["terms"].values()) == pytest.approx(whole, abs=0.001)
    expected = found["measured"]["allocated_gib"] / found["forecast"]["allocated_gib"] - 1
    assert found["difference"]["allocated_gib"] == pytest.approx(expected, abs=0.01)
    assert "step 2 of 2" in result.err, "progress is printed"
    assert {path.name for path in folder.iterdir()} <= {"run.yaml", "cache", "hub"}, "nothing is left behind"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        pytest.param(["parallel.pp=2"], "does not support pipeline parallelism", marks=pytest.mark.slow),
        (["hardware.gpu=h10"], "h100-80gb"),
        (["--world", "0"], "--world"),
    ],
)
def test_a_run_that_cannot_be_traced_is_a_mistake_in_one_sentence(arguments, sentence, folder):
    result = forked_shoal(folder, "bench", "rank", "run.yaml", "--traced", *arguments)
    assert result.status == 2
    assert sentence in result.err
    assert "Traceback" not in result.err


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("parallel.pp=2", "does not support pipeline parallelism"),
        ("parallel.offload=cpu", "use parallel.offload none"),
        ("train.precision=fp8", "use train.precision bf16-mixed"),
        ("train.global_batch=7", "the nearest values that are: 8"),
        ("parallel.tp=3", "cannot be sharded"),
    ],
)
def test_a_run_that_cannot_be_traced_raises_a_user_mistake(override, sentence):
    with pytest.raises(UserMistake, match=sentence):
        trace_run(8, SMALL, "parallel.strategy=fsdp", override)


@pytest.mark.slow
def test_blocks_as_wide_as_those_of_a_405b_model_are_traced_in_little_memory(folder):
    wide = "{family: llama, hidden: 16384, layers: 6, heads: 128, kv_heads: 8, ffn: 53248, vocab: 128256, tied: false}"
    result = shoal(
        folder, "bench", "rank", "run.yaml", f"model.shape={wide}", "data.max_length=2048", "parallel.tp=8",
        "train.recompute=full", "train.global_batch=64", "--world", "512", "--traced", "--json",
    )  # fmt: skip
    assert result.status == 0, result.err
    found = json.loads(result.out)
    assert found["parameters"] > 20e9
    assert abs(found["difference"]["allocated_gib"]) < 0.15
    # The maximum over all child processes so far: 1 GiB. The weights alone would be 80 GiB.
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 2**20


def make_report(**terms: tuple[float, float]) -> RankReport:
    forecast, measured = ({name: pair[side] for name, pair in terms.items()} for side in (0, 1))
    sides = [{"allocated_gib": sum(side.values()), "terms": side, "moments": {}} for side in (forecast, measured)]
    return RankReport(True, 8, CHOSEN, "h100-80gb", {}, 10, *sides)


def test_terms_that_differ_by_a_tenth_are_reported():
    notes = make_report(weights=(10.0, 10.9), activations=(20.0, 26.0), gradients=(5.0, 4.0)).notes()
    assert notes[1:] == ["memory: 17% more than forecast.", "activations: 30% more than forecast.",
                         "gradients: 20% less than forecast."]  # fmt: skip


def test_differences_of_small_terms_are_not_reported():
    assert len(make_report(weights=(100.0, 100.0), head=(0.5, 0.9)).notes()) == 1


def test_a_term_that_was_not_forecast_is_reported():
    report = make_report(weights=(10.0, 10.0), buffers=(0.0, 0.5))
    assert report.notes()[1:] == ["buffers: 0.50 GiB, but none was forecast."]
    assert "buffers" not in report.difference["terms"]


def steps(reserved: float | None, device: str) -> Steps:
    return Steps(
        tokens_per_second=900.0, tokens_per_second_mean=900.0, loss_tokens_per_second=300.0,
        step_seconds=1.0, data_seconds=0.0, mfu=0.4,
        mfu_formula="", allocated_gib=33.0, reserved_gib=reserved, first_step_seconds=9.0, warmup=2, steps=3,
        world_size=8, losses=[], seconds=[], chosen=CHOSEN, machine={"device": device, "torch": "2"},
    )  # fmt: skip


def test_on_a_gpu_memory_and_speed_are_compared_with_the_forecast():
    forecast = {"allocated_gib": 30.0, "reserved_gib": 40.0, "tokens_per_second": 1000.0, "step_seconds": 0.9}
    report = report_steps(steps(42.0, "NVIDIA H100"), forecast)
    assert report.difference["allocated_gib"] == pytest.approx(0.1)
    assert report.difference["tokens_per_second"] == pytest.approx(-0.1)
    assert report.as_dict()["tokens_per_second"] == 900.0, "the measured steps are included"
    assert "33.00" in report.text()
    assert "tokens/s, compute only" in report.text()


def test_a_real_run_on_a_cpu_has_no_forecast():
    report = report_steps(steps(None, "cpu"), None)
    assert report.difference == {}
    assert "nothing to compare" in report.text()
