"""bitsandbytes' 8-bit layers under PEFT's adapters: as measured on an H200, and published of older devices."""

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.plan.report import Plan, memory_of
from tests.plan.planning import plan

MEASURED = Path(__file__).parents[3] / "benchmarks" / "gpu" / "trainer_h200" / "trainer.jsonl"
INT8 = ("adapter.kind=qlora", "adapter.quantize=int8", "train.precision=bf16-true", "data.pack=true")


def step(found: Plan) -> float:
    return found.choice.speed.step_seconds


def asked(row: dict[str, Any]) -> Plan:
    return plan(
        *INT8,
        f"model.shape={row['model']}",
        f"adapter.rank={row['adapter']['rank']}",
        f"adapter.targets=[{','.join(row['adapter']['targets'])}]",
        f"data.max_length={row['sequence']}",
        f"train.micro_batch={row['micro_batch']}",
        f"train.global_batch={row['micro_batch']}",
        f"train.recompute={row['recompute']}",
        "hardware.gpu=h200",
        system="huggingface",
    )


def test_steps_on_an_h200_take_what_they_took_when_measured() -> None:
    rows = [json.loads(line) for line in MEASURED.read_text().splitlines()]
    rows = [row for row in rows if (row.get("adapter") or {}).get("quantize") == "int8"]
    assert len(rows) == 3
    for row in rows:
        found = asked(row).choice
        assert found.speed.tokens_per_second_per_gpu == pytest.approx(row["tokens_per_second_per_gpu"], rel=0.15)
        # All channels that the last layer of its MLP read had outliers, of random weights: one more copy of them.
        copies = 2 * row["micro_batch"] * row["sequence"] * 14_336 * 32 / 2**30
        assert found.memory.allocated / 2**30 + copies == pytest.approx(row["allocated_gib"], rel=0.01)


@pytest.mark.parametrize(
    ("device", "system", "tokens"),
    # Two published runs of llama-recipes' notebook: palmetto-llama-recipes in benchmarks/plan/published.
    [("a100-80gb", "huggingface@2023-08", 813.5), ("a100-40gb", "huggingface@2023-11", 739.0)],
)
def test_the_gradients_of_upcast_inputs_are_matmuls_in_fp32(device: str, system: str, tokens: float) -> None:
    settings = (
        *("model.shape=llama2-7b", "adapter.rank=8", "adapter.targets=[q_proj,v_proj]", "adapter.dropout=0.05"),
        *("data.max_length=2048", "train.micro_batch=2", "train.global_batch=4", "train.recompute=full"),
        *("train.precision=bf16-mixed", f"hardware.gpu={device}", "adapter.kind=qlora", "data.pack=true"),
    )
    traits = ("reentrant=true", "foreach_step=false")
    found = plan(*settings, "adapter.quantize=int8", system=system, traits=traits)
    assert found.choice.speed.tokens_per_second_per_gpu == pytest.approx(tokens, rel=0.12)
    assert step(found) > 2 * step(plan(*settings, "adapter.quantize=nf4", system=system, traits=traits))


def test_checkpointing_leaves_the_inputs_of_8_bit_layers_where_they_are() -> None:
    """They are attributes of autograd functions, unless the forward pass runs without autograd."""
    settings = (
        *("model.shape=llama3.1-8b", "hardware.gpu=h200", "data.max_length=2048", "train.micro_batch=2"),
        *("train.recompute=full", *INT8),
    )

    def held(*more: str, system: str = "huggingface") -> float:
        terms = memory_of(plan(*settings, *more, system=system).choice)["terms"]
        return float(terms["activations"].get("inputs of 8-bit layers", 0.0))

    tokens, hidden = 4096, 4096
    each = tokens * (2 * 4 * hidden + 2 * hidden + 2 * 14_336)
    assert held() == pytest.approx(32 * each / 2**30, rel=0.01)
    assert held(system="huggingface@2023-11") == 0
    # Inputs of blocks in host memory do not change that, and one norm for attention and MLP has one output.
    assert held("train.recompute=offload") == pytest.approx(32 * each / 2**30, rel=0.01)
    of_phi = tokens * (4 * 2560 + 2 * 2560 + 2 * 10_240)
    assert held("model.shape=phi-2") == pytest.approx(32 * of_phi / 2**30, rel=0.01)


def test_experts_are_8_bit_layers_only_where_they_are_modules() -> None:
    """One tensor of all experts is no linear layer, and stays in 16 bits."""
    settings = (
        *("model.shape=qwen3-30b-a3b", "hardware.gpu=b200", "data.max_length=1024", "data.pack=true"),
        *("train.micro_batch=1", "train.global_batch=1", "train.recompute=none", "train.precision=bf16-true"),
    )

    def steps(system: str) -> tuple[float, float]:
        return step(plan(*settings, *INT8, system=system)), step(plan(*settings, "adapter.kind=lora", system=system))

    eight, lora = steps("huggingface@2025-06")
    assert eight > lora + 48 * 100 * 3 * 0.5e-3  # the host waits in each layer of some 128 experts
    eight, lora = steps("huggingface")
    assert 0 < eight - lora < 48 * 4 * 3e-3
