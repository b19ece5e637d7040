"""LoRA and its variants train the same under every strategy as in one process, and on the frozen base as PEFT does."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.harness import settings, slow, train_again_on, train_in_whole_graphs, weights
from tests.parity.test_parity import (
    ALONE,
    EXACT_STEPS,
    FAMILIES,
    MICRO_BATCH,
    TOGETHER,
    Strategy,
    hold_equal,
)

LORA = {"kind": "lora", "rank": 4, "alpha": 8}
KINDS: dict[str, dict[str, Any]] = {
    "lora": LORA,
    "rslora": {**LORA, "rslora": True, "targets": ["q_proj", "v_proj"]},
    "dora": {**LORA, "dora": True},
    "also": {**LORA, "train_also": ["*norm*", "embed_tokens"]},
    "qlora": {**LORA, "kind": "qlora"},
    "qlora-dq": {**LORA, "kind": "qlora", "quantize": "nf4-dq"},
    "qdora": {**LORA, "kind": "qlora", "quantize": "nf4-dq", "dora": True},
}
# Layers with one input share a matmul in compiled blocks, unless those are recomputed. One rank, since each compiles.
SHARED = Strategy("compile_shared", {"strategy": "single"}, (1,), train={"compile": "aot_eager"})
BY_NAME = {strategy.name: strategy for strategy in [*ALONE, *TOGETHER, SHARED]}
QUICK = ("full_shard", "tp", "pp", "cp_gather")
# Without zero3, shard_grad_op and no_shard: other names of full_shard, zero2 and ddp (test_parity.py).
SLOW = (
    "ddp",
    "zero1",
    "offload_cpu",
    "zero2",
    "hybrid_shard",
    "offload_optimizer",
    "recompute_full",
    "recompute_selective",
    "recompute_offload",
    "compile",
    "compile_shared",
    "pp_interleaved",
    "pp_zero_bubble",
    "cp_ulysses",
    "fsdp_tp",
    "fsdp_pp",
    "tp_pp",
    "fsdp_cp",
    "pp_fsdp_tp",
)


@pytest.fixture(scope="session")
def reference(instructions: Path, tmp_path_factory: pytest.TempPathFactory):
    @cache
    def train(
        kind: str, family: str, layers: int, precision: str, global_batch: int, data: Path = instructions
    ) -> Path:
        config = _config(data, kind, family, layers, precision, global_batch)
        return train_again_on(1, config, tmp_path_factory.mktemp("reference"))

    return train


def _config(
    data: Path, kind: str, family: str, layers: int, precision: str, global_batch: int, **changes: Any
) -> dict[str, Any]:
    shape = {**FAMILIES[family], "layers": layers, "positions": 512}
    if KINDS[kind]["kind"] == "qlora":  # on two ranks, too, rows of whole blocks
        shape |= {"hidden": 128, "ffn": 256}
    if precision == "fp8":  # all matrices of the blocks
        shape |= {"ffn": 96}
    return settings(
        data,
        model__shape=shape,
        adapter=KINDS[kind],
        train__precision=precision,
        train__steps=EXACT_STEPS,
        train__global_batch=global_batch,
        train__micro_batch=MICRO_BATCH,
        **changes,
    )


def _compare(
    strategy: Strategy, data: Path, reference: Any, runs: Path, *, kind: str, family: str, precision: str
) -> None:
    world_size = strategy.world_sizes[0]
    grad_accum_steps = 4 if "pp" in strategy.parallel else 1
    global_batch = MICRO_BATCH * strategy.data_parallel(world_size) * grad_accum_steps
    config = _config(data, kind, family, strategy.layers, precision, global_batch, **strategy.changes(world_size))
    train = train_in_whole_graphs if "compile" in strategy.train else train_again_on
    run = train(world_size, config, runs)
    expected = reference(kind, family, strategy.layers, precision, global_batch, data)
    if precision == "32-true":
        hold_equal(run, expected, bitwise=strategy.bitwise and world_size == 2 and grad_accum_steps == 1)
    else:
        hold_equal(run, expected, bitwise=False, loss=2e-3, norm=2e-2)


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(one, marks=pytest.mark.slow) for one in SLOW)])
def test_lora_trains_the_same_as_in_one_process(name, instructions, text, reference, tmp_path):
    # Sequences of one length are compiled in a third of the time; `compile_shared` has lengths that vary.
    data = text if name == "compile" else instructions
    _compare(BY_NAME[name], data, reference, tmp_path, kind="lora", family="llama", precision="32-true")


def test_the_factors_of_an_adapter_are_not_units_of_their_own(instructions, reference, tmp_path):
    """A layer uses its factors without calling them: FSDP would not gather them."""
    smallest = Strategy("smallest_units", {"strategy": "fsdp", "wrap": {"min_params": 100}})
    _compare(smallest, instructions, reference, tmp_path, kind="lora", family="llama", precision="32-true")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["full_shard", "tp", "pp", "cp_gather", "zero1"])
def test_lora_on_another_family_trains_the_same_as_in_one_process(name, instructions, reference, tmp_path):
    _compare(BY_NAME[name], instructions, reference, tmp_path, kind="lora", family="pythia", precision="32-true")


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("full_shard", "bf16-mixed"),
        *(slow(name, precision) for name in ("ddp", "full_shard") for precision in ("bf16-true", "16-mixed")),
        *(slow(name, "bf16-mixed") for name in ("ddp", "tp")),
        *(slow(name, "fp8") for name in ("full_shard", "ddp", "recompute_full")),
    ],
)
def test_lora_in_low_precision_trains_nearly_the_same(name, precision, instructions, reference, tmp_path):
    _compare(BY_NAME[name], instructions, reference, tmp_path, kind="lora", family="llama", precision=precision)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("full_shard", kind) for kind in ("also", "qdora")),
        *(slow("full_shard", kind) for kind in ("rslora", "dora", "qlora", "qlora-dq")),
        *(slow("zero1", kind) for kind in ("dora", "also")),
        *(slow("pp", kind) for kind in ("also", "qlora-dq")),
        slow("cp_gather", "qdora"),
    ],
)
def test_its_variants_train_the_same_as_in_one_process(name, kind, instructions, reference, tmp_path):
    _compare(BY_NAME[name], instructions, reference, tmp_path, kind=kind, family="llama", precision="32-true")


@pytest.mark.parametrize(
    "name",
    ["tp", *(slow(one) for one in ("ddp", "fsdp_tp", "recompute_offload"))],
)
def test_qlora_trains_the_same_as_in_one_process(name, instructions, reference, tmp_path):
    _compare(BY_NAME[name], instructions, reference, tmp_path, kind="qlora", family="llama", precision="32-true")


@pytest.mark.parametrize("name", [slow("full_shard"), slow("tp")])
def test_qlora_in_bf16_trains_nearly_the_same(name, instructions, reference, tmp_path):
    _compare(BY_NAME[name], instructions, reference, tmp_path, kind="qlora", family="llama", precision="bf16-mixed")


def test_a_checkpoint_holds_the_adapter_and_not_the_base(instructions, reference, tmp_path):
    saved = weights(reference("lora", "llama", 2, "32-true", MICRO_BATCH))
    assert {name.split(".")[-2] for name in saved} == {"lora_A", "lora_B"}
