"""Every strategy equals one process: the same sequences, losses, gradient norms and weights.

Each case trains two steps on sequences of very different lengths, and is compared with one process on
the same micro-batches: bitwise where the design promises it, with tolerances where sums are taken in another order.

Each strategy is tested with both families, with and without gradient accumulation, and in both precisions; much of that
is marked slow.
"""

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import LLAMA, PYTHIA, lines, settings, train_again_on, weights

FAMILIES = {
    "llama": {**LLAMA, "heads": 8, "kv_heads": 4, "tied": True},
    "pythia": {**PYTHIA, "tied": False},
}
PIPELINE_LAYERS = 4  # for four stages, or two of two parts each; two layers show what the other dimensions compute
MICRO_BATCH = 2
EXACT_STEPS = (
    2  # a wrong gradient shows in the first, wrong weights in the second, wrong moments in the weights after it
)


@dataclass(frozen=True)
class Strategy:
    """A parallel configuration, and the world sizes to test it at."""

    name: str
    parallel: dict[str, Any]
    world_sizes: tuple[int, ...] = (2, 4)
    train: dict[str, Any] = field(default_factory=dict)
    bitwise: bool = False  # on two ranks, without gradient accumulation, in fp32

    def degree(self, key: str, world_size: int) -> int:
        """The degree of tp, pp or cp; ALL is the world size."""
        value = self.parallel.get(key, 1)
        return world_size if value == ALL else value

    def changes(self, world_size: int) -> dict[str, Any]:
        filled = {key: world_size if value == ALL else value for key, value in self.parallel.items()}
        return {f"parallel__{key}": value for key, value in filled.items()} | {
            f"train__{key}": value for key, value in self.train.items()
        }

    @property
    def layers(self) -> int:
        return PIPELINE_LAYERS if "pp" in self.parallel else LLAMA["layers"]

    def data_parallel(self, world_size: int) -> int:
        within = 1
        for key in ("tp", "pp", "cp"):
            within *= self.degree(key, world_size)
        return world_size // within


ALL = "all"
FSDP = {"strategy": "fsdp"}
OTHER_NAMES = ("zero3", "shard_grad_op", "no_shard")  # of full_shard, zero2 and ddp
# Those, and what two others do together: slow.
LIKE_ANOTHER = (
    *OTHER_NAMES,
    "recompute_every_second",
    "wrap_by_size",
    "tp_pp",
    "fsdp_pp",
    "fsdp_cp",
)
ALONE = [
    Strategy("ddp", {"strategy": "ddp"}, bitwise=True),
    Strategy("zero1", {"strategy": "zero1"}, bitwise=True),
    Strategy("zero2", {"strategy": "zero2"}, bitwise=True),
    Strategy("zero3", {"strategy": "zero3"}, bitwise=True),
    Strategy("full_shard", {**FSDP, "sharding": "FULL_SHARD"}, bitwise=True),
    Strategy("shard_grad_op", {**FSDP, "sharding": "SHARD_GRAD_OP"}, bitwise=True),
    Strategy("hybrid_shard", {**FSDP, "sharding": "HYBRID_SHARD", "replicate": 2}),
    Strategy("no_shard", {**FSDP, "sharding": "NO_SHARD"}, bitwise=True),
    Strategy("wrap_by_size", {**FSDP, "wrap": {"min_params": 1500}}, bitwise=True),
    Strategy("not_resharded", {**FSDP, "reshard": False, "prefetch": 0}, bitwise=True),
    Strategy("resharded_to_pairs", {**FSDP, "reshard": 2, "prefetch": 2}, (4,)),
    Strategy("offload_cpu", {**FSDP, "offload": "cpu"}, bitwise=True),
    Strategy("offload_optimizer", {"strategy": "zero1", "offload": "optimizer"}, bitwise=True),
    Strategy("recompute_full", FSDP, train={"recompute": "full"}, bitwise=True),
    Strategy("recompute_selective", {"strategy": "ddp"}, train={"recompute": "selective"}, bitwise=True),
    Strategy("recompute_offload", FSDP, train={"recompute": "offload"}, bitwise=True),
    Strategy("recompute_every_second", FSDP, train={"recompute": {"every": 2}}, bitwise=True),
    Strategy("compile", FSDP, train={"compile": "aot_eager", "recompute": "selective"}),
    Strategy("tp", {"tp": ALL}),
    Strategy("pp", {"pp": ALL}),
    Strategy("pp_interleaved", {"pp": 2, "pp_schedule": "interleaved"}),
    Strategy("pp_zero_bubble", {"pp": 2, "pp_schedule": "zero-bubble"}),
    Strategy("cp_gather", {"cp": ALL}),
    Strategy("cp_ulysses", {"cp": ALL, "cp_method": "ulysses"}),
]
TOGETHER = [
    Strategy("fsdp_tp", {**FSDP, "tp": 2}, (4,)),
    Strategy("fsdp_pp", {**FSDP, "pp": 2}, (4,)),
    Strategy("tp_pp", {"tp": 2, "pp": 2}, (4,)),
    Strategy("fsdp_cp", {**FSDP, "cp": 2}, (4,)),
    Strategy("hybrid_tp", {**FSDP, "sharding": "hybrid_shard", "replicate": 2, "tp": 2}, (8,)),
    Strategy("pp_fsdp_tp", {**FSDP, "pp": 2, "tp": 2}, (8,)),
]
# Less usual combinations: tested once each.
UNUSUAL = [
    Strategy("zero1_tp_cp", {"strategy": "zero1", "tp": 2, "cp": 2}, (8,)),
    Strategy("zero1_pp_interleaved", {"strategy": "zero1", "pp": 2, "pp_schedule": "interleaved"}, (4,)),
    Strategy("zero2_pp_zero_bubble", {"strategy": "zero2", "pp": 2, "pp_schedule": "zero-bubble"}, (4,)),
    Strategy("zero_bubble_chunked", {"pp": 2, "pp_schedule": "zero-bubble"}, (2,), train={"loss_impl": "chunked"}),
    Strategy("pp_cp", {"pp": 2, "cp": 2, "cp_method": "ulysses"}, (4,)),
    Strategy("tp_recompute", {"tp": 2}, (2,), train={"recompute": "selective"}),
    Strategy("pp_offload", {"pp": 2}, (2,), train={"recompute": "offload"}),
    Strategy("zero_bubble_offload", {"pp": 2, "pp_schedule": "zero-bubble"}, (2,), train={"recompute": "offload"}),
    Strategy("offload_compile", FSDP, (2,), train={"compile": "aot_eager", "recompute": "offload"}),
    Strategy("tp_compile", {"tp": 2}, (2,), train={"compile": "aot_eager"}),
    Strategy("cp_compile", {"cp": 2}, (2,), train={"compile": "aot_eager"}),
    Strategy("wrap_compile", {**FSDP, "wrap": {"min_params": 1500}}, (2,), train={"compile": "aot_eager"}),
]

EIGHT_BITS = {"optimizer": {"name": "adamw8bit"}}
IN_EIGHT_BITS = [
    Strategy("ddp", {"strategy": "ddp"}, (2,), train=EIGHT_BITS, bitwise=True),
    Strategy("zero1", {"strategy": "zero1"}, (2,), train=EIGHT_BITS, bitwise=True),
    Strategy("fsdp", FSDP, train=EIGHT_BITS, bitwise=True),
    Strategy("offload_cpu", {**FSDP, "offload": "cpu"}, (2,), train=EIGHT_BITS, bitwise=True),
    Strategy("offload_optimizer", {"strategy": "zero1", "offload": "optimizer"}, (2,), train=EIGHT_BITS, bitwise=True),
    Strategy("pp", {"pp": 2}, (2,), train=EIGHT_BITS),
    Strategy("cp", {"cp": 2}, (2,), train=EIGHT_BITS),
]


def cases(strategies: list[Strategy], *, exact: bool) -> list[Any]:
    """In fp32 each strategy on its fewest ranks with Llama, and on its most with Pythia and gradient accumulation. In
    bf16 on its fewest ranks with accumulation, one family after the other. Not slow: in fp32 without accumulation, on
    up to four ranks. Compiled models, which take longest by far, eight ranks, and other names of a strategy have one
    case, in fp32."""
    found = []
    for index, strategy in enumerate(strategies):
        small, large = strategy.world_sizes[0], strategy.world_sizes[-1]
        accumulated = 4 if "pp" in strategy.parallel else 2  # a micro-batch for each stage of a pipeline
        compiles = "compile" in strategy.train  # in bf16: tests/train/test_mixed_precision.py
        few, many = (small, "llama", 1), (large, "pythia", accumulated)
        if exact:
            once = compiles or strategy.name in OTHER_NAMES
            chosen = [few] if once else [many] if small == 8 else [few, many]
        else:
            fewest = large if "replicate" in strategy.parallel else small  # on two ranks nothing is sharded
            once = compiles or small == 8 or strategy.name in OTHER_NAMES
            chosen = [] if once else [(fewest, ("llama", "pythia")[index % 2], accumulated)]
        for world_size, family, grad_accum_steps in chosen:
            quick = exact and not compiles and world_size < 8 and grad_accum_steps == 1
            quick = quick and strategy.name not in LIKE_ANOTHER
            name = f"{strategy.name}-{world_size}-{family}-{grad_accum_steps}"
            marks = () if quick else pytest.mark.slow
            found.append(pytest.param(strategy, world_size, family, grad_accum_steps, id=name, marks=marks))
    return found


@pytest.fixture(scope="session")
def reference(instructions: Path, tmp_path_factory: pytest.TempPathFactory):
    """The run of one process with the same batch, trained once for all cases that share it."""

    @cache
    def train(
        family: str, layers: int, precision: str, global_batch: int, optimizer: str = "adamw", data: Path = instructions
    ) -> Path:
        changes = {"train__optimizer": {"name": optimizer}}
        config = _config(data, family, layers, precision, global_batch, **changes)
        return train_again_on(1, config, tmp_path_factory.mktemp("reference"))

    return train


def _config(data: Path, family: str, layers: int, precision: str, global_batch: int, **changes: Any) -> dict[str, Any]:
    return settings(
        data,
        model__shape={**FAMILIES[family], "layers": layers, "positions": 512},
        train__precision=precision,
        train__steps=EXACT_STEPS,
        train__global_batch=global_batch,
        train__micro_batch=MICRO_BATCH,
        **changes,
    )


def hold_equal(
    run: Path, expected: Path, *, bitwise: bool, loss: float = 2e-6, norm: float = 1e-5, weight: float | None = None
) -> None:
    found, wanted = lines(run), lines(expected)
    steps = [line["step"] for line in wanted]
    assert [line["step"] for line in found] == steps == list(range(1, max(steps, default=0) + 1))
    assert len(steps) >= EXACT_STEPS
    assert [line["tokens"] for line in found] == [line["tokens"] for line in wanted]
    assert [line["lr"] for line in found] == [line["lr"] for line in wanted]
    one, other = weights(run), weights(expected)
    assert {name: tensor.shape for name, tensor in one.items()} == {
        name: tensor.shape for name, tensor in other.items()
    }
    if bitwise:
        assert [line["loss"] for line in found] == [line["loss"] for line in wanted]
        assert [line["grad_norm"] for line in found] == [line["grad_norm"] for line in wanted]
        assert [name for name in one if not torch.equal(one[name], other[name])] == []
    for key, bound in (("loss", loss), ("grad_norm", norm)):
        assert [line[key] for line in found] == pytest.approx([line[key] for line in wanted], rel=bound)
    # AdamW turns the smallest gradients, which are rounding errors, into full updates: the bound on weights is loose.
    difference = max(float((one[name] - other[name]).abs().max()) for name in one)
    assert difference < (20 * loss if weight is None else weight)


def train_with(
    strategy: Strategy, world_size: int, family: str, grad_accum_steps: int, precision: str, data: Path, runs: Path
) -> Path:
    global_batch = MICRO_BATCH * strategy.data_parallel(world_size) * grad_accum_steps
    config = _config(data, family, strategy.layers, precision, global_batch, **strategy.changes(world_size))
    return train_again_on(world_size, config, runs)


@pytest.mark.parametrize(("strategy", "world_size", "family", "grad_accum_steps"), cases(ALONE + TOGETHER, exact=True))
def test_a_strategy_trains_the_same_as_one_process(
    strategy, world_size, family, grad_accum_steps, instructions, reference, tmp_path
):
    run = train_with(strategy, world_size, family, grad_accum_steps, "32-true", instructions, tmp_path)
    global_batch = MICRO_BATCH * strategy.data_parallel(world_size) * grad_accum_steps
    expected = reference(family, strategy.layers, "32-true", global_batch)
    hold_equal(run, expected, bitwise=strategy.bitwise and world_size == 2 and grad_accum_steps == 1)


@pytest.mark.parametrize(("strategy", "world_size", "family", "grad_accum_steps"), cases(ALONE + TOGETHER, exact=False))
def test_in_bf16_a_strategy_trains_nearly_the_same_as_one_process(
    strategy, world_size, family, grad_accum_steps, instructions, reference, tmp_path
):
    run = train_with(strategy, world_size, family, grad_accum_steps, "bf16-mixed", instructions, tmp_path)
    global_batch = MICRO_BATCH * strategy.data_parallel(world_size) * grad_accum_steps
    expected = reference(family, strategy.layers, "bf16-mixed", global_batch)
    hold_equal(run, expected, bitwise=False, loss=2e-3, norm=1e-2)


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(
            strategy,
            id=strategy.name,
            marks=() if strategy.name in ("zero_bubble_chunked", "tp_recompute") else pytest.mark.slow,
        )
        for strategy in UNUSUAL
    ],
)
def test_an_unusual_combination_trains_the_same_as_one_process(strategy, instructions, text, reference, tmp_path):
    (world_size,) = strategy.world_sizes
    grad_accum_steps = 4 if "pp" in strategy.parallel else 2
    # Sequences of one length are compiled in a third of the time; `compile` above has lengths that vary.
    data = text if "compile" in strategy.train else instructions
    run = train_with(strategy, world_size, "llama", grad_accum_steps, "32-true", data, tmp_path)
    global_batch = MICRO_BATCH * strategy.data_parallel(world_size) * grad_accum_steps
    expected = reference("llama", strategy.layers, "32-true", global_batch, data=data)
    hold_equal(run, expected, bitwise=False)


@pytest.mark.parametrize(
    ("strategy", "world_size"),
    [
        pytest.param(
            strategy,
            size,
            id=f"{strategy.name}-{size}",
            marks=() if size == 2 and strategy.name in ("zero1", "fsdp", "pp") else pytest.mark.slow,
        )
        for strategy in IN_EIGHT_BITS
        for size in strategy.world_sizes
    ],
)
def test_a_strategy_has_the_same_8_bit_moments_as_one_process(strategy, world_size, instructions, reference, tmp_path):
    """If sums are taken in another order, a moment may be quantized to the adjacent code. The update of its weight then
    differs by a fraction of the learning rate, which losses and norms do not show."""
    run = train_with(strategy, world_size, "pythia", 1, "32-true", instructions, tmp_path)
    global_batch = MICRO_BATCH * strategy.data_parallel(world_size)
    expected = reference("pythia", strategy.layers, "32-true", global_batch, "adamw8bit")
    hold_equal(run, expected, bitwise=strategy.bitwise and world_size == 2, weight=1e-3)
