"""The tiles that flex attention computes for packed sequences, compared with the dense mask."""

from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask

from shoal.catalogue.shapes import shape_from_sizes
from shoal.data.loader import MicroBatch
from shoal.models.anatomy import read_anatomy
from shoal.models.attention import document_mask, skips_tiles
from shoal.models.families import transformers_config
from shoal.models.flex import TILE, document_blocks, flex_attend
from shoal.models.loss import LanguageModel
from tests.models.small import FAMILIES, VOCAB, drawn, tokens


def random_documents(batch: int, length: int, longest: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(length + longest)
    lines = []
    for _ in range(batch):
        sizes = torch.randint(1, longest + 1, (length,), generator=generator)
        lines.append(torch.repeat_interleave(torch.arange(length), sizes)[:length])
    return torch.stack(lines).to(torch.int32)


@pytest.mark.parametrize("window", [None, 1, 100, 129, 256])
@pytest.mark.parametrize(("length", "longest"), [(512, 40), (512, 700), (640, 300), (300, 90), (64, 20), (384, 10_000)])
def test_every_unmasked_pair_is_computed_and_full_tiles_are_unmasked(length, longest, window):
    documents = random_documents(3, length, longest)
    blocks = document_blocks(documents, window)
    exact = document_mask(documents, window)[:, 0]
    tiles = -(-length // TILE)
    padded = torch.zeros(3, tiles * TILE, tiles * TILE, dtype=torch.bool)
    padded[:, :length, :length] = exact
    by_tile = padded.view(3, tiles, TILE, tiles, TILE).transpose(2, 3)
    some, every = by_tile.any(-1).any(-1), by_tile.all(-1).all(-1)

    def listed(counts: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        wanted = torch.arange(tiles) < counts[:, 0, :, None]
        return torch.zeros(3, tiles, tiles, dtype=torch.bool).scatter(2, indices[:, 0].long(), wanted)

    partial = listed(blocks.kv_num_blocks, blocks.kv_indices)
    full = listed(blocks.full_kv_num_blocks, blocks.full_kv_indices)
    # With a window, a tile may contain a document's keys and be near enough, but not both in one pair.
    assert torch.equal((partial | full) & some, some) if window else torch.equal(partial | full, some)
    assert torch.equal(full, every)
    assert not (partial & full).any()


@pytest.mark.parametrize("window", [None, 70])
def test_tiled_attention_equals_attention_with_the_dense_mask(window):
    documents = random_documents(2, 300, 120)
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, heads, 300, 16) for heads in (4, 2, 2))
    found = flex_attend(query, key, value, document_blocks(documents, window), 0.25)
    exact = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=document_mask(documents, window), scale=0.25, enable_gqa=True
    )
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_accepts_a_block_mask(family):
    """Models inspect the mask before attention does: GPT-2 reads its ndim."""
    hold_tiles_equal_to_the_dense_mask(with_heads_of(16, family))


@pytest.mark.parametrize(("family", "windows"), [("mistral", 2), ("qwen3", 1)])
def test_block_masks_contain_the_window_of_each_kind_of_layers(family, windows):
    settings = with_heads_of(16, family)
    settings.sliding_window = 4
    if family != "mistral":
        kinds = ["full_attention"] * (2 - windows) + ["sliding_attention"] * windows
        settings.layer_types, settings.use_sliding_window = kinds, True
    found = hold_tiles_equal_to_the_dense_mask(settings)
    settings.sliding_window = None
    assert found != pytest.approx(hold_tiles_equal_to_the_dense_mask(settings), rel=1e-5)


@pytest.mark.parametrize("family", ["mistral", "qwen3"])
def test_block_masks_of_a_window_are_made_once_and_give_the_same_loss(family):
    settings = with_heads_of(16, family)
    settings.sliding_window = 150
    if family == "qwen3":
        settings.layer_types, settings.use_sliding_window = ["full_attention", "sliding_attention"], True
    model = drawn(settings, longest=300)
    module = LanguageModel(model, read_anatomy(model), "plain")
    batch = MicroBatch(tokens(2, 300), tokens(2, 300, seed=6))
    with torch.no_grad():
        expected = module(batch)[0].item()
        module.windows_in_tiles = True
        assert module(batch)[0].item() == pytest.approx(expected, rel=1e-6)
    one, other = (module.model_kwargs(batch)["attention_mask"] for _ in range(2))
    assert one is other
    assert isinstance(one, BlockMask) or one["full_attention"] is None  # causal attention needs no mask
    short = MicroBatch(tokens(2, 100), tokens(2, 100, seed=6))
    assert "attention_mask" not in module.model_kwargs(short)


def hold_tiles_equal_to_the_dense_mask(settings: Any) -> float:
    model = drawn(settings, longest=300)
    assert skips_tiles(model, "auto", compiled=True)
    documents = random_documents(2, 300, 120)
    batch = MicroBatch(tokens(2, 300), tokens(2, 300, seed=6), documents=documents)
    with torch.no_grad():  # uncompiled and on a CPU it has no backward pass
        dense, tiled = (
            LanguageModel(model, read_anatomy(model), "plain", skips_tiles=tiles)(batch)[0].item()
            for tiles in (False, True)
        )
    assert tiled == pytest.approx(dense, rel=1e-5)
    return float(dense)


def test_head_dimensions_too_small_for_the_kernel_use_dense_masks():
    assert not skips_tiles(drawn(with_heads_of(8, "llama")), "auto", compiled=True)


def with_heads_of(width: int, family: str) -> Any:
    shape = shape_from_sizes(family, hidden=4 * width, layers=2, heads=4, vocab=VOCAB, positions=300, tied=True)
    return transformers_config(shape)
