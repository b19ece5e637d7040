"""Attention within the documents of packed sequences or a sliding window, with torch's flex attention.

A dense mask has an element for each pair of tokens, and kernels that take one compute every pair. Flex attention splits
the scores into tiles and computes only tiles in which some query attends to some key. Documents are consecutive in a
sequence, so the first and the last document of each tile determine which tiles those are.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

TILE = 128


def document_blocks(documents: Tensor, window: int | None = None) -> BlockMask:
    """The block mask of packed sequences: a query attends to the keys of its own document that are neither later nor
    `window` tokens earlier. `documents` holds the document id of each token, [batch, length], non-decreasing along a
    sequence."""
    length = documents.shape[1]
    reach = length if window is None else window
    edge = _edges(length, documents.device)
    first = documents[:, edge]
    last = documents[:, (edge + TILE - 1).clamp(max=length - 1)]
    needed, full = _causal_tiles(edge, window)
    # The last document of the keys is not before the first document of the queries: at least one pair is unmasked.
    needed = needed & (last[:, None, :] >= first[:, :, None])
    # One document from the first key to the last query: no pair is masked.
    full = full & (first[:, None, :] == last[:, :, None])

    def same_document(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (documents[batch, query] == documents[batch, key]) & (query >= key)

    def within_window(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return same_document(batch, head, query, key) & (query - key < reach)

    return _block_mask(needed, full, same_document if window is None else within_window, length)


def window_blocks(length: int, window: int, device: torch.device) -> BlockMask:
    """The block mask of causal attention to the last `window` tokens, the same for all sequences."""
    needed, full = _causal_tiles(_edges(length, device), window)

    def within_window(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (query - key < window)

    return _block_mask(needed[None], full[None], within_window, length)


def _edges(length: int, device: torch.device) -> Tensor:
    """The first token of each tile."""
    return torch.arange(-(-length // TILE), device=device) * TILE


def _causal_tiles(edge: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
    """[query tile, key tile]: (some query attends to some key, every query attends to every key)."""
    distance = edge[:, None] - edge[None, :]
    needed, full = distance >= 0, distance > 0
    if window is not None:
        # From the first query to the last key, and from the last query to the first key.
        needed = needed & (distance - (TILE - 1) < window)
        full = full & (distance + (TILE - 1) < window)
    return needed, full


def _block_mask(
    needed: Tensor, full: Tensor, seen: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor], length: int
) -> BlockMask:
    if length % TILE:  # the last tile is partial
        full[:, -1, :] = False
        full[:, :, -1] = False
    partial_counts, partial_tiles = _listed(needed & ~full)
    full_counts, full_tiles = _listed(full)
    blocks = BlockMask.from_kv_blocks(
        partial_counts, partial_tiles, full_counts, full_tiles, TILE, seen, seq_lengths=(length, length)
    )
    # GPT-2 reads `mask.ndim`, which BlockMask does not define.
    blocks.ndim = len(blocks.shape)  # type: ignore[attr-defined]
    return blocks


def _listed(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """For each row of tiles: the number of selected tiles, and the tile indices with the selected ones first."""
    counts = tiles.sum(-1, dtype=torch.int32)
    order = torch.argsort((~tiles).to(torch.int8), dim=-1, stable=True).to(torch.int32)
    return counts[:, None], order[:, None]  # the same for all heads


def flex_attend(query: Tensor, key: Tensor, value: Tensor, blocks: BlockMask, scale: float | None) -> Tensor:
    """Inputs are [batch, heads, length, head_dim]; keys and values may have fewer heads."""
    result: Tensor = flex_attention(
        query, key, value, block_mask=blocks, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    return result
