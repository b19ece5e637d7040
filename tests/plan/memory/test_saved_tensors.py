"""Forecast activations of a block, compared with what autograd saves in a real block of every family."""

from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch
import torch._functorch.config
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from shoal.catalogue.gpus import LINKS, find_gpu
from shoal.catalogue.shapes import ModelShape, shape_from_sizes
from shoal.models.anatomy import read_anatomy
from shoal.models.families import transformers_config
from shoal.parallel.compile import REASONS_TO_KEEP, compile_blocks
from shoal.parallel.float8 import use_float8
from shoal.parallel.recompute import recompute_blocks
from shoal.plan.memory.activations import block_input, block_kept
from shoal.plan.memory.checkpointed import block_selected
from shoal.plan.run.run import Run

MICRO_BATCH, LENGTH = 2, 256
TOKENS = MICRO_BATCH * LENGTH


def shape_of(family: str, layers: int, kv_heads: int) -> ModelShape:
    return shape_from_sizes(
        family, hidden=128, layers=layers, heads=4, kv_heads=kv_heads, ffn=384, vocab=64, positions=LENGTH, tied=True
    )


def forecast_run(family: str, kv_heads: int, *, compiled: bool, recompute: str = "none") -> Run:
    gpu = find_gpu("h200")
    return Run(
        shape=shape_of(family, 2, kv_heads),
        gpu=gpu,
        link=LINKS[gpu.link],
        network=LINKS["infiniband-ndr"],
        length=LENGTH,
        micro_batch=MICRO_BATCH,
        compiled=compiled,
        recompute=recompute,
        precision="bf16-true",
    )


def saved_per_block(
    family: str, kv_heads: int, *, recompute: str = "none", backend: str | None = None, float8: bool = False
) -> float:
    """Bytes saved for the backward pass per block: without those of embedding, head, and what all blocks share."""
    one, two = (shape_of(family, layers, kv_heads) for layers in (1, 2))
    if backend is None:
        return _saved_by_model(two, recompute, None) - _saved_by_model(one, recompute, None)
    # The others do not depend on the compiler, so that one block is compiled and not three.
    others = 2 * _saved_eagerly(one) - _saved_eagerly(two)
    return _saved_by_model(one, recompute, backend, float8) - others


@cache
def _saved_eagerly(shape: ModelShape) -> int:
    return _saved_by_model(shape, "none", None)


def _saved_by_model(shape: ModelShape, recompute: str, backend: str | None, float8: bool = False) -> int:
    model = AutoModelForCausalLM.from_config(transformers_config(shape), dtype=torch.bfloat16).train()
    model.set_attn_implementation("sdpa")
    blocks = read_anatomy(model).block_modules(model)
    if float8:
        use_float8(blocks)
    recompute_blocks(blocks, recompute)
    if backend is not None:
        torch._dynamo.reset()
        compile_blocks(blocks, backend, keeps_all=recompute == "none")
    return _saved(model)


def _saved(model: nn.Module) -> int:
    tokens = torch.zeros(MICRO_BATCH, LENGTH, dtype=torch.long)
    return saved_bytes(model, lambda: model(input_ids=tokens, use_cache=False).logits.float().sum())


def saved_bytes(model: nn.Module, forward: Callable[[], Tensor]) -> int:
    """Bytes of all tensors that autograd saves in a forward pass, without parameters and buffers."""
    own = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    saved: dict[int, tuple[int, Tensor]] = {}  # holds the tensor, so that its memory is not reused

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(size for size, _ in saved.values())


@pytest.fixture(autouse=True)
def _restore_compiler_settings() -> Iterator[None]:
    """`compile_blocks` changes functorch settings of the whole process."""
    before = {reason: getattr(torch._functorch.config, reason) for reason in REASONS_TO_KEEP}
    yield
    for reason, value in before.items():
        setattr(torch._functorch.config, reason, value)


FAMILIES = [("llama", 2), ("llama", 4), ("mistral", 2), ("qwen2", 2), ("qwen3", 2), ("neox", 4), ("gpt2", 4)]


@pytest.mark.parametrize(("family", "kv_heads"), FAMILIES)
def test_an_eager_block_saves_what_is_forecast(family: str, kv_heads: int) -> None:
    expected = block_kept(forecast_run(family, kv_heads, compiled=False)).amount
    assert expected == pytest.approx(saved_per_block(family, kv_heads), rel=0.01)


def test_a_fully_checkpointed_block_saves_its_input() -> None:
    expected = block_input(forecast_run("llama", 2, compiled=False))
    assert expected == pytest.approx(saved_per_block("llama", 2, recompute="full"), rel=0.01)


# A backend that partitions forward and backward as inductor does, without compiling.
PARTITIONED = "aot_eager_decomp_partition"


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "cheap"])
@pytest.mark.parametrize(("family", "kv_heads"), FAMILIES)
def test_a_compiled_block_saves_what_is_forecast(family: str, kv_heads: int, recompute: str) -> None:
    expected = block_kept(forecast_run(family, kv_heads, compiled=True, recompute=recompute)).amount
    found = saved_per_block(family, kv_heads, recompute=recompute, backend=PARTITIONED)
    assert expected == pytest.approx(found, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("float8", [False, True])
def test_a_compiled_checkpointed_block_saves_its_input_also_around_an_autograd_function(float8: bool) -> None:
    expected = block_input(forecast_run("llama", 2, compiled=True, recompute="full"))
    found = saved_per_block("llama", 2, recompute="full", backend=PARTITIONED, float8=float8)
    assert expected == pytest.approx(found, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "kv_heads"), [("llama", 2), ("neox", 4), ("gpt2", 4)])
def test_a_compiled_selectively_checkpointed_block_saves_what_is_forecast(family: str, kv_heads: int) -> None:
    expected = block_selected(forecast_run(family, kv_heads, compiled=True, recompute="selective")).amount
    found = saved_per_block(family, kv_heads, recompute="selective", backend=PARTITIONED)
    assert expected == pytest.approx(found, rel=0.02)
