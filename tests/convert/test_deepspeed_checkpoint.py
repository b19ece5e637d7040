"""Checkpoints that the real DeepSpeed wrote become the weights that its own zero_to_fp32 makes of them."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal import api
from tests.convert.imported import model_of, save_config
from tests.harness import run_ranks

pytestmark = pytest.mark.slow


def save_with_deepspeed(model: Any, stage: int, folder: Path, precision: dict[str, Any]) -> None:
    """Two steps on each of two ranks, and DeepSpeed's checkpoint."""

    def train() -> None:
        import deepspeed

        deepspeed.ops.__compatible_ops__ = {}  # no compiled collectives
        torch.manual_seed(int(torch.distributed.get_rank() if torch.distributed.is_initialized() else 0))
        decayed = [one for one in model.parameters() if one.dim() > 1]
        others = [one for one in model.parameters() if one.dim() == 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.AdamW(groups, lr=1e-2),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "zero_optimization": {
                    "stage": stage,
                    "reduce_bucket_size": 100_000,
                    "allgather_bucket_size": 100_000,
                },
                **precision,
            },
        )
        for _ in range(2):
            tokens = torch.randint(0, 60, (1, 8))
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()
        engine.save_checkpoint(str(folder))

    run_ranks(2, lambda: with_process_group(train))


def with_process_group(function: Any) -> None:
    import os

    store = torch.distributed.FileStore(str(Path(os.environ["SHOAL_LAUNCH"]) / "store"), 2)
    torch.distributed.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=2)
    function()
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("stage", "precision"), [(2, {}), (3, {}), (3, {"bf16": {"enabled": True}})], ids=["zero2", "zero3", "zero3-bf16"]
)
def test_a_real_checkpoint_is_imported_as_zero_to_fp32_converts_it(
    stage: int, precision: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    model = model_of("llama")
    config = save_config(model, tmp_path / "config")
    save_with_deepspeed(model, stage, tmp_path / "ds", precision)
    convert = importlib.import_module("deepspeed.utils.zero_to_fp32")
    expected = convert.get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "ds"))

    api.import_checkpoint(tmp_path / "ds", tmp_path / "out", model=config)
    from safetensors.torch import load_file

    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found
    before = dict(model.named_parameters())
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name
    assert any(not torch.equal(found[name], before[name]) for name in found), "two steps have changed the weights"
