"""Attention within the documents of packed sequences, with torch's flex attention.

A dense mask has an element for each pair of tokens, and kernels that take one compute every pair. Flex attention splits
the scores into tiles and computes only tiles in which some query attends to some key. Documents are consecutive in a
sequence, so the first and the last document of each tile determine which tiles those are.
"""

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

TILE = 128


def document_blocks(documents: Tensor, window: int | None = None) -> BlockMask:
    """The block mask of packed sequences: a query attends to the keys of its own document that are neither later nor
    `window` tokens earlier. `documents` holds the document id of each token, [batch, length], non-decreasing along a
    sequence."""
    length = documents.shape[1]
    tiles = -(-length // TILE)
    edge = torch.arange(tiles, device=documents.device) * TILE
    first = documents[:, edge]
    last = documents[:, (edge + TILE - 1).clamp(max=length - 1)]
    query, key = edge[:, None], edge[None, :]
    # The last document of the keys is not before the first document of the queries: at least one pair is unmasked.
    needed = (query >= key) & (last[:, None, :] >= first[:, :, None])
    # One document from the first key to the last query, and every key before every query: no pair is masked.
    full = (query > key) & (first[:, None, :] == last[:, :, None])
    if window is not None:
        # The distances from the first query to the last key, and from the last query to the first key.
        needed = needed & (query - key - (TILE - 1) < window)
        full = full & (query - key + (TILE - 1) < window)
    if length % TILE:  # the last tile is partial
        full[:, -1, :] = False
        full[:, :, -1] = False

    def same_document(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (documents[batch, query] == documents[batch, key]) & (query >= key)

    def within_window(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return same_document(batch, head, query, key) & (query - key < window)

    seen = same_document if window is None else within_window
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
