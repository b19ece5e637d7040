"""The operations of eager blocks, counted on blocks of transformers."""

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from shoal.catalogue.gpus import GPUS
from shoal.plan.speed.compute import block_compute
from shoal.plan.speed.forecast import forecast_speed
from shoal.plan.speed.host import GAP, host_seconds
from shoal.plan.speed.launched import block_operations
from shoal.plan.systems.modelled import SYSTEMS
from tests.plan.planning import make_run

ROOT = Path(__file__).parents[3]
TRAITS = SYSTEMS["huggingface"]
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}


class Operations(TorchDispatchMode):
    """Counts what is dispatched, and views, which launch no kernel, as half."""

    count = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 0.5 if func.is_view or func.overloadpacket in VIEWS else 1.0
        return func(*args, **(kwargs or {}))


VIEWS = {torch.ops.aten._unsafe_view, torch.ops.aten._reshape_alias}


def operations(config: Any, attention: str, blocks: int) -> float:
    config.num_hidden_layers = blocks
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).to(torch.bfloat16).train()
    inputs = torch.zeros((2, 8), dtype=torch.long)
    with Operations() as counted:
        model(input_ids=inputs, labels=inputs).loss.backward()
    return counted.count


@pytest.mark.parametrize(
    ("model_type", "shape", "attention"),
    [("llama", "llama3.2-1b", "sdpa"), ("qwen3", "qwen3-0.6b", "eager"), ("gpt_neox", "pythia-160m", "sdpa")],
)
def test_the_operations_of_a_block_are_those_of_transformers(model_type: str, shape: str, attention: str) -> None:
    grouped = {} if model_type == "gpt_neox" else {"num_key_value_heads": 2, "head_dim": 8}
    config = AutoConfig.for_model(model_type, **SIZES, **grouped)
    counted = operations(config, attention, 2) - operations(config, attention, 1)
    path = "scores" if attention == "eager" else "fused"
    run = make_run(shape, compiled=False, attention=path, precision="bf16-true", traits=SYSTEMS["huggingface"])
    assert block_operations(run) == pytest.approx(counted, rel=0.1)


def test_rotary_embeddings_as_complex_numbers_are_half_as_many_operations() -> None:
    turns = torch.polar(torch.ones(8, 4), torch.ones(8, 4))[None, :, None, :]
    heads = [torch.ones(2, 8, count, 8, dtype=torch.bfloat16, requires_grad=True) for count in (4, 2)]
    with Operations() as counted:
        # As torchtitan's apply_rotary_emb computes it.
        pairs = [torch.view_as_complex(one.float().reshape(*one.shape[:-1], -1, 2)) for one in heads]
        rotated = [torch.view_as_real(one * turns).flatten(3).to(torch.bfloat16) for one in pairs]
        torch.autograd.grad(rotated, heads, [torch.ones_like(one) for one in rotated])
    run = make_run("llama3.2-1b", compiled=False, precision="bf16-true", traits=SYSTEMS["torchtitan"])
    halves = run.with_(traits=replace(run.traits, rotary="halves"))
    assert block_operations(halves) - block_operations(run) == pytest.approx(45 - counted.count, abs=3)
    # And fewer addresses are computed: those of one cast; the product moves its bytes, in pairs, meanwhile.
    elements, h200 = run.tokens * (run.shape.query_width + run.shape.kv_width), 4.8e12
    elementwise = block_compute(run.with_(gpu=GPUS["h200"])).elementwise
    fused = block_compute(run.with_(gpu=GPUS["h200"], traits=replace(run.traits, fused_rotary=True))).elementwise
    kernels = elements * (1 / 330e9 + (8 + 6) / (0.8 * h200) - 4 / (0.64 * h200))
    assert elementwise.forward - fused.forward == pytest.approx(kernels, rel=0.02)


def test_blocks_with_more_operations_wait_longer_for_the_host() -> None:
    traits = SYSTEMS["huggingface"]
    run = make_run("llama3-8b", "b200", length=128, compiled=False, precision="bf16-true", traits=traits)
    eager = run.with_(attention="scores")

    def host(run: Any) -> float:
        parts = {part.name: part.amount for part in forecast_speed(run).step.parts}
        device = sum(parts[name] for name in ("matmuls", "attention", "elementwise kernels", "head and loss"))
        return device + parts["kernel launch overhead"]

    assert host(run) == pytest.approx(32 * 2.0e-3)
    assert host(eager) == pytest.approx(32 * 2.0e-3 * 207 / 171)


def test_the_cores_of_a_grace_take_longer_unless_blocks_are_graphs() -> None:
    run = make_run("llama3-8b", "h200", length=16, micro_batch=1, compiled=False, traits=SYSTEMS["megatron"])
    hosts = {name: host_seconds(run.with_(gpu=GPUS[name]), 32) for name in ("h200", "b200", "gh200", "gb200")}
    assert hosts["h200"] == hosts["b200"]
    assert [hosts[name] / hosts["h200"] for name in ("gh200", "gb200")] == pytest.approx([33.17 / 19.04, 37.08 / 19.04])

    graphs = replace(SYSTEMS["megatron"], graphs_layers=True)
    run = run.with_(gpu=GPUS["gb200"], compiled=True)
    steps = [forecast_speed(run.with_(traits=one)).step for one in (run.traits, graphs)]
    waits = [sum(part.amount for part in step.parts if part.name == "kernel launch overhead") for step in steps]
    assert waits[0] > 0.1 > waits[1] == 0


def test_checkpointing_takes_the_host_almost_a_block_more_and_less_if_it_is_reentrant():
    block = make_run("llama2-7b", "h200", length=16, micro_batch=1, compiled=False, traits=SYSTEMS["huggingface"])
    alone = host_seconds(block.with_(recompute="none"), 32)
    again = host_seconds(block.with_(recompute="full"), 32)
    reentrant = block.with_(recompute="full", traits=replace(block.traits, reentrant=True))
    assert again == pytest.approx(1.9 * alone)
    assert host_seconds(reentrant, 32) == pytest.approx(1.4 * alone)


def test_the_host_s_time_is_that_of_the_operations() -> None:
    def block(shape: str, gpu: str, attention: Any = "fused") -> float:
        settings: dict[str, Any] = {"compiled": False, "precision": "bf16-true", "traits": TRAITS}
        dropout = shape == "bert-base"
        run = make_run(shape, gpu, attention=attention, dropout=dropout, attention_dropout=dropout, **settings)
        return host_seconds(run, 1)

    measured = json.loads((ROOT / "benchmarks" / "gpu" / "trainer_h200" / "block_host.json").read_text())["cases"]
    neox, gpt2 = (
        next(one["block_ms"] for one in measured if one["family"] == family and one["weights"] == "bf16") / 1e3
        for family in ("neox", "gpt2")
    )
    assert block("pythia-160m", "h200") == pytest.approx(neox, rel=0.05)
    assert block("gpt2", "h200") == pytest.approx(gpt2, rel=0.25)
    # BERT's are slower: 17 ms for 12 blocks on an A100, and 23 ms with eager attention.
    assert block("bert-base", "a100-80gb") == block("bert-base", "h200") == pytest.approx(1.4e-3, rel=0.02)
    assert block("bert-base", "h200", "scores") == pytest.approx(1.79e-3, rel=0.02)
    assert block("llama2-7b", "a100-80gb") == block("llama2-7b", "h200") == 2.0e-3


def test_hooks_of_checkpointing_take_as_long_in_blocks_with_fewer_operations() -> None:
    measured = json.loads((ROOT / "benchmarks" / "gpu" / "trainer_h200" / "block_host.json").read_text())["cases"]
    for family, shape in (("neox", "pythia-160m"), ("gpt2", "gpt2")):
        settings: dict[str, Any] = {"compiled": False, "precision": "bf16-true", "recompute": "full", "traits": TRAITS}
        run = make_run(shape, "h200", dropout=shape == "gpt2", attention_dropout=shape == "gpt2", **settings)
        found = next(
            one["block_ms"]
            for one in measured
            if one["family"] == family and one["weights"] == "bf16" and one["recompute"] and one["adapter"] is None
        )
        assert host_seconds(run, 1) == pytest.approx(found / 1e3, rel=0.1)


def test_the_moment_between_two_kernels_is_what_traced_steps_have_beside_them() -> None:
    path = ROOT / "benchmarks" / "gpu" / "trainer_h200" / "kernels.jsonl"
    traced = [json.loads(line) for line in path.read_text().splitlines()]
    # Steps with 8-bit layers wait for the device in every one of them.
    traced = [one for one in traced if "int8" not in one["name"]]
    # Steps whose device is busy for most of the time do not wait for their host.
    busy = [one for one in traced if one["busy_ms"] > 0.8 * one["step_ms"]]
    gaps = [(one["step_ms"] - one["busy_ms"] - one["between_ms"]) * 1e-3 / one["launches"] for one in busy]
    assert len(busy) == 12
    assert statistics.median(gaps) == pytest.approx(GAP, rel=0.2)
