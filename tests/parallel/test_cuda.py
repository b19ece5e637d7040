"""On a CUDA device: DDP and FSDP with a world size of one train the same as plain training.

The config never selects ddp or fsdp for one process, so these tests parallelize the model. They run only on a GPU.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from shoal.config import config_from_mapping
from shoal.data.loader import MicroBatch, StepBatch
from shoal.models.attention import attend
from shoal.models.prepare import blueprint, prepare_model
from shoal.optim.loss_scaler import LossScaler
from shoal.optim.optimizer import make_optimizer
from shoal.parallel.compile import compile_blocks as compile_together
from shoal.parallel.context import attend_before
from shoal.parallel.ranks import Ranks
from shoal.parallel.recompute import recompute_blocks
from shoal.train.step import TrainStep
from tests.harness import parallelized

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(scope="module", autouse=True)
def _group_of_one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
    yield
    dist.destroy_process_group()


def _losses(
    strategy: str,
    precision: str,
    compile_blocks: bool,
    optimizer: str = "adamw",
    family: str = "llama",
    recompute: str | dict[str, int] = "none",
    documents: int | None = None,
    window: int | None = None,
) -> list[tuple[float, float]]:
    """(loss, gradient norm) of five steps. `documents`: sequences are packed with documents of this many tokens.
    `window`: attention has a sliding window of this many."""
    device = torch.device("cuda", 0)
    shape = {"family": family, "hidden": 256, "layers": 3, "heads": 4, "vocab": 512, "positions": 256}
    if family in ("llama", "mistral"):
        shape["kv_heads"] = 2
    config = config_from_mapping(
        {
            "model": {"shape": shape, "tokenizer": "bytes"},
            "data": {"source": "text", "path": str(Path(__file__)), "max_length": 256, "pack": documents is not None},
            "train": {
                "precision": precision,
                "compile": compile_blocks,
                "recompute": recompute,
                "lr": 1e-3,
                "optimizer": {"name": optimizer},
            },
        }
    )
    drawn = blueprint(config.model)
    if window is not None:
        drawn.settings.sliding_window = window
    prepared = prepare_model(drawn, longest=256)
    model = parallelized(prepared, config, strategy=strategy, ranks=Ranks(0, 1, 0, device), micro_batch=4)
    step = TrainStep(
        model,
        make_optimizer(
            model.parameters,
            config.train,
            model.anatomy,
            placement=model.placement,
            copies=model.low_precision,
        ),
        LossScaler(device, enabled=model.precision.scaled),
        clip=None,
    )
    generator = torch.Generator().manual_seed(0)
    packed = {}
    if documents is not None:
        indices = torch.arange(256).expand(4, 256)
        packed = {"positions": indices % documents, "documents": (indices // documents).to(torch.int32)}
    found = []
    for _ in range(5):
        tokens = torch.randint(0, 512, (4, 257), generator=generator)
        micro_batch = MicroBatch(tokens[:, :-1], tokens[:, 1:], **packed)
        batch = StepBatch([micro_batch], weight=4 * 256, sequence_ids=np.arange(4))
        result = step(batch, 1e-3)
        found.append((result.sums[0].item() / result.weight, result.norm.item()))
    return found


@pytest.mark.parametrize("compile_blocks", [False, True])
@pytest.mark.parametrize(("precision", "bound"), [("32-true", 1e-5), ("bf16-mixed", 2e-3), ("16-mixed", 2e-3)])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_strategy_on_one_gpu_trains_the_same_as_plain_training(strategy, precision, bound, compile_blocks):
    plain = _losses("single", precision, compile_blocks=False)
    found = _losses(strategy, precision, compile_blocks)
    assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in plain], rel=bound)
    assert [norm for _, norm in found] == pytest.approx([norm for _, norm in plain], rel=10 * bound)


@pytest.mark.parametrize("recompute", ["none", "cheap", "selective", "full", "offload", {"every": 2}], ids=str)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_packed_sequences_train_the_same_with_flex_attention_and_a_dense_mask(family, recompute):
    """Compiled blocks use flex attention, with every kind of activation checkpointing."""
    dense = _losses("single", "bf16-mixed", compile_blocks=False, family=family, documents=100)
    found = _losses("single", "bf16-mixed", True, family=family, documents=100, recompute=recompute)
    assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in dense], rel=2e-3)
    assert [norm for _, norm in found] == pytest.approx([norm for _, norm in dense], rel=2e-2)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("documents", [None, 100])
def test_a_sliding_window_trains_the_same_in_every_kernel(documents, recompute):
    """Flex attention in compiled blocks; flash attention, or with documents a dense mask, in eager ones; fp32 in parts
    of the sequence."""
    settings = {"family": "mistral", "window": 60, "documents": documents}
    wide = _losses("single", "32-true", False, **settings)
    for compiled in (False, True):
        found = _losses("single", "bf16-mixed", compiled, recompute=recompute, **settings)
        assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in wide], rel=2e-3)
        assert [norm for _, norm in found] == pytest.approx([norm for _, norm in wide], rel=3e-2)
    same = _losses("single", "32-true", True, recompute=recompute, **settings)
    assert [loss for loss, _ in same] == pytest.approx([loss for loss, _ in wide], rel=1e-5)


@pytest.mark.parametrize(("dtype", "window"), [(torch.float32, None), (torch.bfloat16, 512), (torch.float32, 512)])
def test_attention_stores_no_scores(dtype, window):
    layer, (heads, length) = torch.nn.Module(), (8, 4096)
    layer.is_causal, layer.num_key_value_groups = True, 4  # type: ignore[assignment]
    query, key, value = (
        torch.randn(1, each, length, 64, device="cuda", dtype=dtype, requires_grad=True) for each in (heads, 2, 2)
    )
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attend(layer, query, key, value, None, dropout=0.1, sliding_window=window)[0].sum().backward()
    assert torch.cuda.max_memory_allocated() - before < heads * length * length * query.element_size() / 2


@pytest.mark.parametrize("compile_blocks", [False, True])
@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_offloaded_activations_train_the_same_as_recomputed_ones(strategy, compile_blocks):
    full, offload = (_losses(strategy, "32-true", compile_blocks, recompute=kind) for kind in ("full", "offload"))
    assert [loss for loss, _ in offload] == pytest.approx([loss for loss, _ in full], rel=1e-5)
    assert [norm for _, norm in offload] == pytest.approx([norm for _, norm in full], rel=1e-4)


class _Residual(torch.nn.Linear):
    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return given + super().forward(given).relu()


@pytest.mark.parametrize("compile_blocks", [False, True])
def test_offloading_frees_the_device_without_synchronizing(compile_blocks):
    peaks, gradients = {}, {}
    for kind in ("full", "offload"):
        torch.manual_seed(0)
        blocks = [_Residual(1024, 1024, device="cuda") for _ in range(12)]
        recompute_blocks(blocks, kind)
        if compile_blocks:
            compile_together(blocks, "inductor", keeps_all=False)
        inputs = torch.randn(8, 1024, 1024, device="cuda")
        for attempt in range(4):
            if attempt == 2:  # buffers are allocated and blocks compiled
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                torch.cuda.set_sync_debug_mode("error")
            hidden = inputs
            for block in blocks:
                hidden = block(hidden)
            hidden.square().sum().backward()
        torch.cuda.set_sync_debug_mode("default")
        peaks[kind] = torch.cuda.max_memory_allocated()
        gradients[kind] = [block.weight.grad for block in blocks]
    # Of twelve inputs, few are on the device: in use, being copied in either direction, and the first, which we hold.
    assert peaks["full"] - peaks["offload"] >= 6 * inputs.nbytes
    for one, other in zip(gradients["offload"], gradients["full"], strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", ["adamw", "adamw8bit"])
def test_a_gpu_rounds_stochastically_with_the_bits_of_a_cpu(name):
    """Up to values that are almost halfway between two others."""
    settings = {"model": {"shape": "gpt2"}, "train": {"optimizer": {"name": name, "rounding": "stochastic"}}}
    config, found = config_from_mapping(settings), []
    for device in ("cpu", "cuda"):
        generator = torch.Generator().manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(300, 500, generator=generator).bfloat16().to(device))
        made = make_optimizer({"weight": weight}, config.train, None)  # type: ignore[arg-type]
        weight.grad = torch.randn(300, 500, generator=generator).bfloat16().to(device)
        made.step(1e-3, torch.tensor(True, device=device))
        found.append(weight.detach().cpu())
    assert float((found[0] == found[1]).float().mean()) > 0.995


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_8_bit_moments_train_nearly_the_same_as_fp32_ones(strategy, precision):
    plain = _losses("single", precision, compile_blocks=False)
    found = _losses(strategy, precision, compile_blocks=False, optimizer="adamw8bit")
    assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in plain], rel=1e-2)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
def test_a_skipped_step_changes_nothing_and_does_not_synchronize(optimizer):
    device = torch.device("cuda", 0)
    weight = torch.nn.Parameter(torch.ones(80, 80, device=device))
    config = config_from_mapping({"model": {"shape": "gpt2"}, "train": {"optimizer": {"name": optimizer}}})
    made = make_optimizer({"weight": weight}, config.train, None)  # type: ignore[arg-type]
    weight.grad = torch.full_like(weight, torch.nan)
    usable = torch.tensor(False, device=device)
    made.step(0.1, usable)  # the first step creates the state, and synchronizes
    torch.cuda.set_sync_debug_mode("error")
    try:
        made.step(0.1, usable)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(weight, torch.ones_like(weight))
    assert not any(value.any() for value in made.state().values())


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("queries", [1, 64, 100])
def test_queries_of_the_last_tokens_attend_to_all_earlier_keys(queries, dtype, compiles):
    """The kernels of context parallelism equal the mask that it has on a CPU, also in compiled blocks."""
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (
        torch.randn(2, heads, length, 64, generator=generator) for heads, length in ((8, queries), (4, 256), (4, 256))
    )
    inputs = [one.requires_grad_() for one in (query, keys, values)]
    on_gpu = [one.detach().cuda().to(dtype).requires_grad_() for one in inputs]
    wanted = attend_before(*inputs, None, 0.0)
    found = (torch.compile(attend_before) if compiles else attend_before)(*on_gpu, None, 0.0)
    torch.testing.assert_close(found.float().cpu(), wanted, rtol=0.02, atol=0.02)
    for theirs, ours in zip(
        torch.autograd.grad(wanted.sum(), inputs), torch.autograd.grad(found.sum(), on_gpu), strict=True
    ):
        torch.testing.assert_close(ours.float().cpu(), theirs, rtol=0.03, atol=0.03)
