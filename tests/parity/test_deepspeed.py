"""`parallel.engine: deepspeed` trains as our own strategies do, and its checkpoints are ours.

With the real DeepSpeed on gloo, so all of it is slow, and skipped where DeepSpeed is not installed; .ci/run installs
it. Each case is compared with our engine on the same number of ranks.
"""

import importlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal import api
from shoal.mistakes import UserMistake
from tests.encoders import classifying, masked, write_labelled
from tests.harness import LLAMA, PYTHIA, lines, reference_run, settings, train_on, weights

pytestmark = pytest.mark.slow

STEPS = 3
UNTIED = {**LLAMA, "positions": 512, "tied": False}
NEOX = {**PYTHIA, "positions": 512, "tied": False}
ODD = {**LLAMA, "positions": 512, "tied": True, "vocab": 261, "hidden": 40}  # sizes that ranks share unevenly
# Shards of more than a megabyte: DeepSpeed keeps smaller ones in memory.
LARGE = {**UNTIED, "hidden": 512, "layers": 1, "vocab": 2048}
ACCUMULATED = {"train__micro_batch": 2}
LORA = {"adapter": {"kind": "lora", "rank": 4, "alpha": 8}}
CASES: dict[str, dict[str, Any]] = {
    "ddp": {"parallel__strategy": "ddp", **ACCUMULATED},
    "zero1": {"parallel__strategy": "zero1", **ACCUMULATED},
    # Every step is clipped.
    "zero2": {"parallel__strategy": "zero2", "model__shape": NEOX, "train__clip": 0.05, **ACCUMULATED},
    "zero3": {"parallel__strategy": "zero3", "model__shape": ODD, **ACCUMULATED},
    "shard_grad_op_lion": {
        "parallel__strategy": "fsdp",
        "parallel__sharding": "shard_grad_op",
        "train__optimizer": {"name": "lion"},
    },
    "zero3_recompute": {"parallel__strategy": "zero3", "train__recompute": "full", "train__loss_impl": "chunked"},
    "zero3_lora": {"parallel__strategy": "zero3", **LORA},
    "zero2_offload": {"parallel__strategy": "zero2", "parallel__offload": "optimizer"},
    "zero3_offload": {
        "parallel__strategy": "zero3",
        "parallel__offload": "cpu",
        "train__optimizer": {"name": "sgd", "momentum": 0.9},
        "model__shape": UNTIED,
    },
}
# Other objectives, each with data of its own.
OBJECTIVES: dict[str, dict[str, Any]] = {
    "dpo": {"parallel__strategy": "zero3", "data__max_length": 128, "data__pack": True, "train__micro_batch": 2},
    "masked_lm": {"parallel__strategy": "zero3", "train__micro_batch": 2},
    # Three classes: an odd number of parameters.
    "classify": {"parallel__strategy": "zero2", "data__validation": 0.2, "eval__every": STEPS},
}
IN_16_BITS: dict[str, dict[str, Any]] = {
    "ddp_bf16": {"parallel__strategy": "ddp", "train__precision": "bf16-mixed"},
    "zero1_bf16": {"parallel__strategy": "zero1", "train__precision": "bf16-mixed", **ACCUMULATED},
    "zero3_bf16": {"parallel__strategy": "zero3", "train__precision": "bf16-mixed", **ACCUMULATED},
    "zero2_lora_bf16": {"parallel__strategy": "zero2", "train__precision": "bf16-mixed", **LORA},
    # So large a scale that the first steps overflow, and are skipped.
    "zero2_fp16": {
        "parallel__strategy": "zero2",
        "train__precision": "16-mixed",
        "train__loss_scale": {"initial": 2.0**26},
        "train__steps": 6,
    },
}


@pytest.fixture(scope="module", autouse=True)
def _deepspeed() -> None:
    """Imported before ranks are forked. What it imports when it is first used takes most of a run's time."""
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_ACCELERATOR", "cpu")
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
        importlib.import_module("deepspeed.runtime.zero.stage3")


def config_of(data: Path, case: dict[str, Any]) -> dict[str, Any]:
    return settings(data, **{"train__steps": STEPS, **case})


def on_deepspeed(data: Path, case: dict[str, Any], runs: Path, ranks: int = 2, **options: Any) -> Path:
    return train_on(ranks, config_of(data, {**case, "parallel__engine": "deepspeed"}), runs, **options)


def hold_close(run: Path, reference: Path, *, loss: float, norm: float) -> None:
    found, expected = lines(run), lines(reference)
    assert [line["step"] for line in found] == [line["step"] for line in expected]
    assert [line["loss"] for line in found] == pytest.approx([line["loss"] for line in expected], rel=loss)
    for one, other in zip(found, expected, strict=True):
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=norm)
        assert (one["lr"], one["tokens"], one["loss_tokens"]) == (other["lr"], other["tokens"], other["loss_tokens"])


def samples(run: Path) -> list[dict[str, Any]]:
    found = (json.loads(line) for line in (run / "events.jsonl").read_text().splitlines())
    return [one for one in found if "prompt" in one]


@pytest.mark.parametrize("name", CASES)
def test_deepspeed_has_the_losses_and_weights_of_our_own_engine_in_fp32(
    name: str, instructions: Path, tmp_path: Path
) -> None:
    reference = reference_run(config_of(instructions, CASES[name]), 2)
    run = on_deepspeed(instructions, CASES[name], tmp_path)
    hold_close(run, reference, loss=2e-6, norm=1e-5)
    expected = weights(reference)
    for key, value in weights(run).items():
        assert value.dtype == expected[key].dtype
        torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_deepspeed_has_the_losses_of_our_own_engine_with_other_objectives(name: str, tmp_path: Path) -> None:
    if name == "dpo":
        rows = ({"prompt": f"{n} and {n}:", "chosen": " red" * (1 + n % 3), "rejected": " blue"} for n in range(60))
        data = tmp_path / "pairs.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = settings(data, train__objective="dpo", train__steps=STEPS, **OBJECTIVES[name])
    else:
        make = {"masked_lm": masked, "classify": classifying}[name]
        config = make(write_labelled(tmp_path / "labelled.jsonl"), train__steps=STEPS, **OBJECTIVES[name])
    reference = reference_run(config, 2)
    config["parallel"]["engine"] = "deepspeed"
    run = train_on(2, config, tmp_path)
    hold_close(run, reference, loss=2e-6, norm=1e-5)
    expected = weights(reference)
    for key, value in weights(run).items():
        torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("name", IN_16_BITS)
def test_deepspeed_has_the_losses_of_our_own_engine_in_16_bits(
    name: str, instructions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepspeed import get_accelerator

    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)  # DeepSpeed asks the kind of CPU
    reference = reference_run(config_of(instructions, IN_16_BITS[name]), 2)
    run = on_deepspeed(instructions, IN_16_BITS[name], tmp_path)
    found, expected = lines(run), lines(reference)
    assert [line["loss"] for line in found] == pytest.approx([line["loss"] for line in expected], rel=2e-3)
    assert [line["grad_norm"] is None for line in found] == [line["grad_norm"] is None for line in expected]
    assert all(value.dtype == torch.float32 for value in weights(run).values()), "checkpoints hold the fp32 weights"


@pytest.mark.parametrize(("strategy", "ranks"), [("zero1", 2), ("zero3", 3)])
def test_a_run_on_deepspeed_resumes_exactly_and_changes_to_our_engine_and_back(
    strategy: str, ranks: int, instructions: Path, tmp_path: Path
) -> None:
    case = {
        "parallel__strategy": strategy,
        "model__shape": ODD,
        "train__global_batch": 6,
        "train__micro_batch": 1,
        "train__schedule": {"warmup": 0, "name": "constant"},
        "train__steps": 4,
    }
    whole = on_deepspeed(instructions, case, tmp_path / "whole", ranks)
    first = {**case, "train__steps": 2}
    shutil.copytree(on_deepspeed(instructions, first, tmp_path / "parts", ranks), tmp_path / "both" / "run")
    run = on_deepspeed(instructions, case, tmp_path / "parts", ranks, resume=True)
    assert [line["loss"] for line in lines(run)] == [line["loss"] for line in lines(whole)]
    for name, value in weights(run).items():
        assert torch.equal(value, weights(whole)[name]), name

    train_on(1, config_of(instructions, {**case, "train__steps": 3}), tmp_path / "both", resume=True)
    run = on_deepspeed(instructions, case, tmp_path / "both", ranks, resume=True)
    hold_close(run, whole, loss=2e-6, norm=1e-5)


def test_state_and_weights_on_disk_train_as_in_memory(instructions: Path, tmp_path: Path) -> None:
    compiled = Path(os.environ.get("TORCH_EXTENSIONS_DIR", "/nowhere")) / "async_io" / "async_io.so"
    if not compiled.is_file():  # it takes minutes: tests/README.md
        pytest.skip("DeepSpeed's kernel for disks is not compiled")
    case = {"parallel__strategy": "zero3", "model__shape": LARGE, **ACCUMULATED}
    reference = reference_run(config_of(instructions, case), 2)
    folder = tmp_path / "disk"
    folder.mkdir()
    case["parallel__offload"] = {"optimizer": "nvme", "parameters": "nvme", "path": str(folder)}
    run = on_deepspeed(instructions, case, tmp_path)
    kept = {one.relative_to(folder).parts[1] for one in folder.rglob("*") if one.is_file()}
    assert kept == {"float32params", "optimizer"}
    hold_close(run, reference, loss=2e-6, norm=1e-5)
    expected = weights(reference)
    for key, value in weights(run).items():
        torch.testing.assert_close(value, expected[key], rtol=1e-3, atol=1e-5)


def test_offload_to_disk_without_libaio_or_a_compiler_is_one_sentence(
    instructions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    case = {"parallel__strategy": "zero3", "parallel__offload": {"optimizer": "nvme", "path": str(tmp_path)}}
    monkeypatch.setattr(AsyncIOBuilder, "is_compatible", lambda *_, **__: False)
    with pytest.raises(UserMistake, match=r"needs libaio, which is not installed: apt install libaio-dev"):
        on_deepspeed(instructions, case, tmp_path / "one")

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("Error building extension 'async_io'")

    monkeypatch.setattr(AsyncIOBuilder, "is_compatible", lambda *_, **__: True)
    monkeypatch.setattr(AsyncIOBuilder, "load", fail)
    with pytest.raises(UserMistake, match=r"could not compile with g\+\+ and ninja .*use offload cpu"):
        on_deepspeed(instructions, case, tmp_path / "two")


def test_the_lock_that_a_killed_compilation_has_left_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.file_baton import FileBaton

    from shoal.parallel.extension_lock import abandoned_lock

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert abandoned_lock("async_io") is None
    lock = tmp_path / "async_io" / "lock"
    holder = FileBaton(str(lock))
    assert holder.try_acquire()
    os.utime(lock, (1.0, 1.0))
    assert abandoned_lock("async_io") is None  # this process compiles
    os.close(holder.fd)
    sentence = abandoned_lock("async_io")
    assert sentence is not None
    assert str(lock) in sentence
    assert "delete the file" in sentence
    lock.touch()
    assert abandoned_lock("async_io") is None  # of a rank of another node that has started with this one


def test_a_run_on_deepspeed_evaluates_and_exports_what_transformers_loads(instructions: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    case = {
        "parallel__strategy": "zero3",
        "data__validation": 0.1,
        "eval": {"every": 1, "prompts": ["one two", "a"], "tokens": 3},
        "train__steps": 2,
    }
    reference = reference_run(config_of(instructions, case), 2)
    run = on_deepspeed(instructions, case, tmp_path)
    lines_of = [(one / "metrics.jsonl").read_text() for one in (run, reference)]
    assert all("eval_loss" in one for one in lines_of)
    hold_close(run, reference, loss=2e-6, norm=1e-5)  # evaluation has left no trace
    written = [samples(run), samples(reference)]
    assert len(written[0]) == 4
    assert [one["text"] for one in written[0]] == [one["text"] for one in written[1]]
    folder = api.export(run, to="hf", output=tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    trained = weights(run)
    assert folder == tmp_path / "hf"
    assert all(torch.equal(one, trained[name]) for name, one in model.named_parameters())
