"""Attention within the documents of packed rows that skips what no query looks at: torch's flex attention.

A dense mask of a row costs a number for each pair of tokens, and the kernels that take one compute every pair. Here the
row is cut into tiles, and only tiles in which some query sees some key are computed. Which ones follows from the first
and the last document of each tile, because documents lie in a row one after the other.
"""

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

TILE = 128


def document_blocks(documents: Tensor) -> BlockMask:
    """Who sees whom: a query the keys of its own document that are not later. `documents` are the tokens' document
    numbers, rows × length, which never fall along a row."""
    length = documents.shape[1]
    tiles = -(-length // TILE)
    edge = torch.arange(tiles, device=documents.device) * TILE
    first = documents[:, edge]
    last = documents[:, (edge + TILE - 1).clamp(max=length - 1)]
    query, key = edge[:, None], edge[None, :]
    # The keys' last document is as late as the queries' first: somebody sees somebody.
    needed = (query >= key) & (last[:, None, :] >= first[:, :, None])
    # From the first key to the last query one document, and every key before every query: all see all.
    whole = (query > key) & (first[:, None, :] == last[:, :, None])
    if length % TILE:  # the last tile hangs over the edge
        whole[:, -1, :] = False
        whole[:, :, -1] = False

    def same_document(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (documents[row, query] == documents[row, key]) & (query >= key)

    partly_counts, partly = _listed(needed & ~whole)
    whole_counts, wholly = _listed(whole)
    blocks = BlockMask.from_kv_blocks(
        partly_counts, partly, whole_counts, wholly, TILE, same_document, seq_lengths=(length, length)
    )
    # It has a shape of four dimensions and does not say so, and that is what GPT-2 asks a mask.
    blocks.ndim = len(blocks.shape)  # type: ignore[attr-defined]
    return blocks


def _listed(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """For each row of tiles: how many are wanted, and which, those first."""
    counts = tiles.sum(-1, dtype=torch.int32)
    order = torch.argsort((~tiles).to(torch.int8), dim=-1, stable=True).to(torch.int32)
    return counts[:, None], order[:, None]  # alike for all heads


def flex_attend(query: Tensor, key: Tensor, value: Tensor, blocks: BlockMask, scale: float | None) -> Tensor:
    """Rows × heads × length × width; keys and values may have fewer heads."""
    result: Tensor = flex_attention(
        query, key, value, block_mask=blocks, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    return result
