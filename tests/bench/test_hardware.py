"""`shoal bench hardware`: a machine is measured, and the forecast is of that machine."""

import json
from pathlib import Path

import pytest
import torch
import yaml

from shoal import api
from shoal.bench import device_speed, hardware, host
from shoal.bench.hardware import unknown_gpu, usual_speeds
from shoal.bench.host import HostTimes
from shoal.catalogue.gpus import find_gpu
from shoal.mistakes import UserMistake
from shoal.plan.machine import processor_name
from tests.launch.command import forked_shoal
from tests.plan.planning import plan, tokens_per_second

SHORT = ("model.shape=qwen2.5-0.5b", "hardware.gpu=h200", "train.micro_batch=1", "train.global_batch=1")
SHORT += ("data.max_length=256", "train.cuda_graphs=false", "train.steps=10")
LARGE = ("model.shape=llama3.2-1b", "train.micro_batch=4", "train.global_batch=4", "data.max_length=4096")
MEASURED = Path(__file__).parents[2] / "benchmarks" / "hardware" / "h200.json"


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_speed, "MEASURED_SECONDS", 0.0)
    monkeypatch.setattr(device_speed, "WARMUP_SECONDS", 0.0)
    monkeypatch.setattr(device_speed, "CPU_SIZES", (64, 96))
    monkeypatch.setattr(device_speed, "CPU_LENGTH", 128)
    monkeypatch.setattr(host, "STEPS", 8)


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures a CPU")
def test_a_machine_is_written_as_a_config_that_others_include(quickly: None, tmp_path: Path) -> None:
    said: list[str] = []
    found = api.bench_hardware(output=tmp_path / "machine.yaml", report=said.append)
    assert said[-1] == "measuring attention and copies …"
    block = yaml.safe_load((tmp_path / "machine.yaml").read_text())["hardware"]
    assert block["gpu"]["like"] == "cpu"
    assert block["gpu"]["name"] == processor_name()
    assert block == json.loads(json.dumps(found.as_dict()["hardware"]))
    speeds = {row["what"]: row["measured"] for row in found.rows}
    assert speeds["matmuls in fp32"] == block["gpu"]["fp32_matmul_tflops"] > 0
    assert speeds["host, per block"] == block["host_block_ms"] > 0

    run = tmp_path / "run.yaml"
    run.write_text("include: [machine.yaml]\nname: r\nmodel: {shape: gpt2}\ntrain: {steps: 10, global_batch: 1}\n")
    included = api.plan(run)
    assert included.choice.machine.gpu.measured.fp32 == pytest.approx(1e12 * block["gpu"]["fp32_matmul_tflops"])
    faster = api.plan(run, overrides=[f"hardware.gpu.fp32_matmul_tflops={2 * block['gpu']['fp32_matmul_tflops']}"])
    assert faster.choice.speed.step_seconds < included.choice.speed.step_seconds


def test_processes_of_a_cpu_share_what_was_measured_of_it() -> None:
    gpu = "hardware.gpu={like: cpu, fp32_matmul_tflops: 0.4, copy_gb_per_second: 40}"
    model = ("model.shape=gpt2", "train.micro_batch=4", "data.max_length=512", "train.steps=10", gpu)
    one = plan(*model, "train.global_batch=8", "parallel.strategy=single")
    two = plan(*model, "train.global_batch=8", "hardware.devices=2", "parallel.strategy=ddp")
    assert two.choice.machine.gpu.measured.fp32 == 0.2e12
    assert two.choice.speed.step_seconds >= one.choice.speed.step_seconds


def test_what_a_gpu_reaches_is_what_it_is_forecast_with() -> None:
    usual = usual_speeds(find_gpu("h200"))
    block = ", ".join(f"{key}: {value}" for key, value in usual.items())
    speed = tokens_per_second(*LARGE, "hardware.gpu=h200")
    # With the speeds that the catalogue has, nothing changes.
    assert tokens_per_second(*LARGE, f"hardware.gpu={{like: h200, {block}}}") == pytest.approx(speed, rel=0.01)
    half = {key: value / 2 for key, value in usual.items()}
    block = ", ".join(f"{key}: {value}" for key, value in half.items())
    assert tokens_per_second(*LARGE, f"hardware.gpu={{like: h200, {block}}}") == pytest.approx(speed / 2, rel=0.05)


def test_a_measured_h200_that_nobody_knows_is_forecast_as_the_one_of_the_catalogue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured = json.loads(MEASURED.read_text())["hardware"]["gpu"]
    hoppers = {name: gpu for name, gpu in hardware.GPUS.items() if gpu.compute_capability != (9, 0)}
    with monkeypatch.context() as without:
        without.setattr(hardware, "GPUS", hoppers)
        similar = unknown_gpu((9, 0), 132, 1.98e9, 1e9 * measured["copy_gb_per_second"])
    assert similar["like"] == "a100-80gb"
    assert similar["compute_capability"] == "9.0"
    block = ", ".join(f"{key}: {value!r}" for key, value in {**measured, **similar}.items())
    known = tokens_per_second(*LARGE, "hardware.gpu=h200")
    assert tokens_per_second(*LARGE, f"hardware.gpu={{{block}}}") == pytest.approx(known, rel=0.1)
    assert tokens_per_second(*LARGE, "hardware.gpu=a100-80gb") < known / 2


def test_a_gpu_of_a_new_generation_is_like_one_that_has_its_number_formats() -> None:
    for capability, copied in (((8, 7), 170e9), ((13, 0), 900e9), ((13, 0), 6000e9)):
        like = find_gpu(unknown_gpu(capability, 100, 2e9, copied)["like"])
        assert like.bf16 is not None
    assert find_gpu(unknown_gpu((6, 1), 20, 1.5e9, 300e9)["like"]).bf16 is None
    assert "tflops" not in unknown_gpu((13, 0), 100, None, 900e9)
    # fp8, if it was measured, can be forecast also where the device that it is like has none.
    block = "{like: a100-80gb, compute_capability: 9.0, fp8_matmul_tflops: 1300, matmul_tflops: 700}"
    faster = tokens_per_second(*LARGE, f"hardware.gpu={block}", "train.precision=fp8")
    assert faster > tokens_per_second(*LARGE, f"hardware.gpu={block}")


def test_a_machine_is_planned_as_the_one_that_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card with PCI Express keeps it; and on the machine itself, all of its devices are planned for."""
    from shoal.plan import machine

    block = "hardware.gpu={like: a100-80gb, name: NVIDIA A100 80GB PCIe, matmul_tflops: 230}"
    model = ("model.shape=gpt2", "train.steps=10", block)
    assert plan(*model).choice.machine.link.name == "pcie4"
    assert plan(*model).choice.machine.devices == 1
    monkeypatch.setattr(machine, "_present", lambda driver: ["NVIDIA A100 80GB PCIe"] * 4)
    here = plan(*model, "train.global_batch=4").choice.machine
    assert (here.devices, here.host_gib) == (4, machine.host_memory_gib())


def test_a_measured_link_carries_what_was_measured() -> None:
    eight = ("model.shape=llama3-8b", "hardware.gpu=h100-80gb", "hardware.devices=8", "parallel.strategy=fsdp")
    eight += ("data.max_length=2048", "train.micro_batch=1", "train.global_batch=8", "train.steps=10")
    nominal, reached = (
        tokens_per_second(*eight, f"hardware.link={{gb_per_second: 20, latency_us: 5, measured: {measured}}}")
        for measured in ("false", "true")
    )
    assert reached > 1.1 * nominal


def test_training_takes_what_was_measured_on_such_a_device() -> None:
    from shoal.config.schema import HardwareConfig
    from shoal.plan.machine import machine_at_hand

    block = {"gpu": {"like": "a100-80gb", "name": "NVIDIA Something", "matmul_tflops": 100.0}}
    given = HardwareConfig.model_validate(block)
    here = machine_at_hand("NVIDIA Something", 40.0, 1, hardware=given)
    assert (here.gpu.measured.matmuls, here.gpu.memory_gib) == (100e12, 40.0)
    other = machine_at_hand("NVIDIA H200", 139.8, 1, hardware=given)
    assert (other.gpu.name, other.gpu.measured.matmuls) == ("h200", None)
    elsewhere = HardwareConfig.model_validate({**block, "host_block_ms": 9.0, "link": {"measured": True}})
    assert machine_at_hand("NVIDIA H200", 139.8, 1, hardware=elsewhere) == other


def test_training_on_another_device_than_was_measured_is_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    from shoal.config.load import config_from_mapping
    from shoal.launch.rank import warn_of_settings
    from shoal.observe.progress import Reporter
    from shoal.parallel.device import Device

    def said(name: str, device: Device) -> str:
        gpu = {"like": "cpu", "name": name, "matmul_tflops": 1.0}
        config = config_from_mapping({"model": {"shape": "gpt2"}, "hardware": {"gpu": gpu}})
        assert config.hardware.is_cpu  # a job of it asks for no GPU
        warn_of_settings(config, 1, device, Reporter(enabled=True))
        return capsys.readouterr().err

    assert said(processor_name(), Device(None, None)) == ""
    assert "was measured on NVIDIA X: this run trains on a CPU, and is" in said("NVIDIA X", Device(None, None))
    assert "this run trains on NVIDIA Y, and is" in said("NVIDIA X", Device(None, 40.0, (8, 0), "NVIDIA Y"))


def test_a_busy_host_is_called_one() -> None:
    steady = HostTimes([0.010] * 10, [0.026] * 10)
    assert steady.block_ms == pytest.approx(2.0)
    assert not steady.caveats
    busy = HostTimes([0.010] * 10, [0.026] * 7 + [0.068] * 3)
    assert busy.block_ms == pytest.approx(2.0)
    assert "2.6 times as long" in busy.caveats[0]


def test_where_it_cannot_be_written_one_sentence_says_so_before_anything_is_measured(tmp_path: Path) -> None:
    ended = forked_shoal(tmp_path, "bench", "hardware", "--output", "machine.json")
    assert (ended.status, ended.out) == (2, "")
    assert ended.err == "shoal: --output machine.json: the file is a config; call it machine.yaml.\n"
    (tmp_path / "run.yaml").write_text("name: mine\n")
    with pytest.raises(UserMistake, match="was not written by shoal bench hardware"):
        api.bench_hardware(output=tmp_path / "run.yaml")
    with pytest.raises(UserMistake, match="the folder nowhere does not exist or is not writable"):
        api.bench_hardware(output="nowhere/machine.yaml")


def test_a_slower_host_makes_a_run_slower_that_waits_for_it() -> None:
    usual, slow = tokens_per_second(*SHORT), tokens_per_second(*SHORT, "hardware.host_block_ms=4")
    assert usual == tokens_per_second(*SHORT, "hardware.host_block_ms=2")
    assert 1.8 < usual / slow < 2.05
    # One that the device hides changes nothing.
    long = (*SHORT, "train.micro_batch=32", "train.global_batch=32", "data.max_length=2048")
    assert tokens_per_second(*long) == tokens_per_second(*long, "hardware.host_block_ms=4")
    # A CPU computes what it launches itself.
    cpu = ("model.shape=gpt2", "train.steps=1", "hardware.gpu=cpu")
    assert tokens_per_second(*cpu, "hardware.host_block_ms=200") < tokens_per_second(*cpu)


def test_a_plan_that_waits_for_its_host_names_the_measurement() -> None:
    notes = " ".join(plan(*SHORT).notes)
    assert "shoal bench hardware measures it for hardware.host_block_ms" in notes
    given = plan(*SHORT, "hardware.host_block_ms=4")
    assert "shoal bench hardware" not in " ".join(given.notes)
    assert json.loads(json.dumps(given.as_dict()))["hardware"]["host_block_ms"] == 4
