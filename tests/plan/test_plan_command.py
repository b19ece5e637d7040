"""`shoal plan` as a user runs it: its output, its exit statuses, and that it is fast and does not import torch."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from shoal.cli import main

EIGHT = ["model.shape=llama3-8b", "hardware.gpu=h100-80gb", "hardware.devices=8", "train.steps=100"]


def run_plan(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str, str]:
    """(status, standard output, standard error) of `shoal plan ARGUMENTS`."""
    monkeypatch.setattr(sys, "argv", ["shoal", "plan", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def plan_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, dict[str, Any]]:
    status, out, _ = run_plan(monkeypatch, capsys, *arguments, "--json")
    return status, json.loads(out)


def test_overrides_alone_describe_a_run(monkeypatch, capsys):
    status, found = plan_json(monkeypatch, capsys, *EIGHT)
    assert status == 0
    assert found["fits"] is True
    assert {"allocated_gib", "reserved_gib", "terms"} <= found["memory"].keys()
    assert {"tokens_per_second_per_gpu", "mfu", "step_seconds", "terms"} <= found["speed"].keys()
    assert 0 < found["memory"]["allocated_gib"] < found["memory"]["reserved_gib"] < 80
    assert 0.2 < found["speed"]["mfu"] < 0.8
    assert found["chosen"]["strategy"] == "fsdp"
    assert found["chosen"]["reason"]
    # Each that differs: zero3 is fsdp by another name.
    assert {"ddp", "zero1", "zero2", "fsdp"} == {row["strategy"] for row in found["alternatives"]}
    assert all({"fits", "reserved_gib", "tokens_per_second_per_gpu"} <= row.keys() for row in found["alternatives"])
    assert {"largest_micro_batch", "longest_sequence", "fewest_gpus"} == found["limits"].keys()
    assert found["speed"]["seconds_to_finish"] == pytest.approx(100 * found["speed"]["step_seconds"], abs=1)


def test_a_file_with_overrides_is_planned_as_it_would_be_trained(monkeypatch, capsys, tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text("name: small\nmodel: {shape: gpt2}\nhardware: {gpu: t4}\ntrain: {precision: 16-mixed}\n")
    status, out, _ = run_plan(monkeypatch, capsys, str(file), "train.global_batch=8", "data.max_length=512")
    assert status == 0
    assert out.startswith("small: single on 1 × t4 fits (one device).")


def test_what_is_not_built_yet_can_be_planned(monkeypatch, capsys):
    status, found = plan_json(
        monkeypatch, capsys, "model.shape=llama2-7b", "hardware.gpu=rtx4090", "adapter.kind=qlora",
        "train.recompute=auto", "train.global_batch=16", "data.max_length=1024",
    )  # fmt: skip
    assert status == 0
    assert found["model"]["trained"] < found["model"]["parameters"] / 100


def test_a_run_that_does_not_fit_is_status_3_with_changes_to_paste(monkeypatch, capsys):
    arguments = ["model.shape=llama3-70b", "hardware.gpu=h100-80gb", "hardware.devices=8", "hardware.nodes=2"]
    status, found = plan_json(monkeypatch, capsys, *arguments)
    assert status == 3
    assert found["fits"] is False
    changes = found["changes"]
    assert changes
    assert all({"set", "saves_gib", "slower", "fits"} <= change.keys() for change in changes)
    # With the suggested text appended, the same command reports that the run fits.
    fitting = next(change for change in changes if change["fits"])
    again, better = plan_json(monkeypatch, capsys, *arguments, *fitting["set"])
    assert again == 0
    assert better["memory"]["reserved_gib"] == pytest.approx(fitting["reserved_gib"], rel=0.01)
    status, out, _ = run_plan(monkeypatch, capsys, *arguments)
    assert status == 3
    assert "does NOT fit" in out
    assert fitting["set"][0] in out


def test_changes_are_ordered_by_what_they_affect_and_then_by_time(monkeypatch, capsys):
    _, found = plan_json(
        monkeypatch, capsys, "model.shape=llama3-8b", "hardware.gpu=a100-80gb", "data.max_length=2048",
        "train.micro_batch=8", "train.global_batch=8",
    )  # fmt: skip
    order = ["execution", "numerics", "what is trained", "hardware"]
    assert found["changes"]
    ranks = [(order.index(change["affects"]), change["slower"]) for change in found["changes"] if change["fits"]]
    assert ranks == sorted(ranks)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["model.shape=llama3-9b"], "Did you mean llama3-8b"),
        (["model.shape=gpt2", "hardware.gpu=h100"], "Did you mean h100-80gb or"),
        (["model.shape=gpt2", "hardware.network=infiniband"], "Did you mean infiniband"),
        (["model.from=nobody/llama-2-8b"], "Did you mean"),
        (["model.shape={hidden: 100, heads: 7}"], "is not divisible by 7 heads"),
        ([*EIGHT, "train.global_batch=60"], "nearest values that are: 56 and 64"),
        ([*EIGHT, "train.global_batch=64", "train.micro_batch=3"], "the nearest values that are: 48 and 72"),
        ([*EIGHT, "parallel.tp=3", "data.max_length=3072"], "groups of 3"),
        (["model.shape=smollm2-135m", "hardware.gpu=l4", "hardware.devices=2", "parallel.tp=2"], "9 attention heads"),
        ([*EIGHT[:2], "hardware.devices=8", "parallel.strategy=single"], "contradicts parallel.strategy single"),
        (["model.shape=gpt2", "hardware.gpu=v100-16gb", "train.precision=bf16-mixed"], "use 16-mixed"),
        (["model.shape=gpt2", "hardware.gpu=a100-40gb", "train.precision=fp8"], "use bf16-mixed"),
        (["nowhere.yaml"], "does not exist"),
        (["model.shape=gpt2", "--like", "torchtitn"], "Did you mean torchtitan or torchtune"),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(monkeypatch, capsys, arguments, sentence):
    status, out, err = run_plan(monkeypatch, capsys, *arguments)
    assert status == 2
    assert out == ""
    assert err.startswith("shoal: ")
    assert sentence in err
    assert "Traceback" not in err


def test_without_a_gpu_auto_means_the_cpu_and_says_so(monkeypatch, capsys):
    status, out, _ = run_plan(monkeypatch, capsys, "model.shape=gpt2", "data.max_length=256", "train.global_batch=8")
    if "no local GPU" not in out:
        pytest.skip("there is a local GPU")
    assert status == 0
    assert "× cpu" in out


def test_the_plan_is_plotted(monkeypatch, capsys, tmp_path: Path):
    picture = tmp_path / "made" / "plan.png"
    status, _, _ = run_plan(monkeypatch, capsys, *EIGHT, "--plot", str(picture))
    assert status == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    status, _, err = run_plan(monkeypatch, capsys, *EIGHT, "--plot", str(picture / "plan.png"))
    assert status == 2
    assert "plan.png cannot be written: File exists." in err or "Not a directory." in err


def test_hardware_can_be_described_in_the_config(monkeypatch, capsys):
    given = ["model.shape=llama3-8b", "hardware.devices=8", "train.steps=10", "train.global_batch=64"]
    _, usual = plan_json(monkeypatch, capsys, *given, "hardware.gpu=h100-80gb")
    _, larger = plan_json(
        monkeypatch, capsys, *given, "hardware.gpu={like: h100-80gb, memory_gib: 200, tflops: 2000}",
        "hardware.link={gb_per_second: 900}", "hardware.price=2.5",
    )  # fmt: skip
    assert larger["memory"]["device_gib"] == 200
    assert larger["speed"]["tokens_per_second_per_gpu"] > 1.5 * usual["speed"]["tokens_per_second_per_gpu"]
    assert larger["speed"]["cost"] == pytest.approx(2.5 * larger["speed"]["gpu_hours"], abs=0.02)
    assert usual["speed"]["cost"] is None


def test_another_systems_code_can_be_forecast(monkeypatch, capsys):
    arguments = [
        *EIGHT,
        "train.loss_impl=plain",
        "train.recompute=selective",
        "train.micro_batch=1",
        "train.global_batch=8",
    ]
    _, ours = plan_json(monkeypatch, capsys, *arguments)
    _, theirs = plan_json(monkeypatch, capsys, *arguments, "--like", "torchtitan")
    assert ours["memory"]["allocated_gib"] != theirs["memory"]["allocated_gib"]
    assert any("torchtitan" in note for note in theirs["notes"])


@pytest.mark.parametrize("gpu", ["cpu", "h100-80gb"])
def test_the_memory_of_a_tiny_model_is_not_all_zeros(gpu, monkeypatch, capsys):
    tiny = "model.shape={family: llama, hidden: 64, layers: 2, heads: 2, vocab: 260}"
    _, said, _ = run_plan(monkeypatch, capsys, tiny, f"hardware.gpu={gpu}", "train.steps=10", "data.max_length=64")
    memory = said[said.index("memory per device") : said.index("speed:")]
    assert " MiB allocated, " in memory
    weights = next(line for line in memory.splitlines() if line.endswith("  weights"))
    assert float(weights.split()[1]) > 0.1


def test_a_run_that_waits_for_its_host_says_that_its_speed_is_less_certain(monkeypatch, capsys):
    small = ("model.shape=smollm2-135m", "hardware.gpu=h100-80gb", "data.max_length=1024", "--like", "transformers")

    def said(micro_batch: int) -> list[str]:
        _, found = plan_json(monkeypatch, capsys, *small, f"train.micro_batch={micro_batch}")
        return [note for note in found["notes"] if "host" in note]

    (note,) = said(1)
    assert "waits 90% of the step for its host to launch kernels" in note
    assert not said(32)


def test_values_that_can_only_be_forecast_are_named_by_plan_and_not_by_train(monkeypatch, capsys, tmp_path: Path):
    (tmp_path / "run.yaml").write_text("name: x\nmodel: {shape: llama3-8b}\ndata: {path: a.txt}\n")
    asked = [str(tmp_path / "run.yaml"), "train.optimizer.name=adafactr"]
    status, _, planned = run_plan(monkeypatch, capsys, *asked)
    assert status == 2
    assert "Did you mean adafactor?" in planned
    monkeypatch.setattr(sys, "argv", ["shoal", "train", *asked])
    with pytest.raises(SystemExit):
        main()
    trained = capsys.readouterr().err
    assert "adafactor" not in trained
    assert "adamw8bit" in trained


def test_a_mixture_of_experts_over_several_devices_says_what_is_not_forecast(monkeypatch, capsys):
    arguments = ["model.shape=qwen3-30b-a3b", "hardware.gpu=h100-80gb", "hardware.devices=8", "train.steps=100"]
    assert "expert parallelism" in run_plan(monkeypatch, capsys, *arguments)[1]
    assert "expert parallelism" not in run_plan(monkeypatch, capsys, *EIGHT)[1]
