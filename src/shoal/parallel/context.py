"""Context parallelism: each rank holds a shard of every sequence, and only attention needs the other shards.

`gather`: an all-gather of keys and values; queries stay local. A later query attends to more keys, so a rank takes one
chunk from the front of the sequence and its mirror image from the back, which balances the load.
`ulysses`: an all-to-all gives each rank all tokens of some heads, and a second one reverts it.
"""

from dataclasses import dataclass, replace
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shoal.catalogue.families import find_plan
from shoal.config.mesh import Mesh
from shoal.data.loader import MicroBatch
from shoal.models.attention import MASKLESS, document_mask, window_within
from shoal.models.attention_kernels import (
    HEADS,
    SEQUENCE,
    attend_from_end,
    attends_from_end,
    must_repeat_keys,
    repeat_heads,
)
from shoal.parallel.collectives import all_gather, all_to_all
from shoal.parallel.micro_batches import Prepare
from shoal.plan.check import check_ulysses, check_window


def check_context_parallel(model: Any, mesh: Mesh, method: str, longest: int) -> None:
    """Raise a UserMistake unless `model` supports sharded sequences of up to `longest` tokens."""
    if mesh.cp == 1 and mesh.tp == 1:
        return
    key = "parallel.cp" if mesh.cp > 1 else "parallel.tp"
    find_plan(model.config.model_type, key)
    if mesh.cp == 1:
        return
    settings = model.config.get_text_config()
    check_window(mesh.cp, window_within(settings, longest), longest)
    check_ulysses(mesh.cp, mesh.tp, method, settings.num_attention_heads)


@dataclass(frozen=True)
class SequenceShard:
    """The shard of each sequence that this rank holds."""

    group: dist.ProcessGroup
    method: str

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    def local_labels(self, labels: Tensor) -> Tensor:
        return labels.index_select(1, self.token_indices(labels.shape[1], labels.device))

    def shard(self, batch: MicroBatch) -> MicroBatch:
        """This rank's tokens of a batch; positions are those in the full sequence."""
        length = batch.inputs.shape[1]
        mine = self.token_indices(length, batch.inputs.device)
        mask = None
        if batch.documents is not None:
            mask = document_mask(batch.documents)
            mask = mask.index_select(2, mine) if self.method == "gather" else mask
        positions = batch.positions
        if positions is None:
            positions = torch.arange(length, device=mine.device).expand(batch.inputs.shape)
        return replace(
            batch,
            inputs=batch.inputs.index_select(1, mine),
            labels=batch.labels.index_select(1, mine),
            positions=positions.index_select(1, mine),
            # Not for attention, which has the mask: answers of pairs are divided between ranks, and put together again.
            documents=None
            if batch.reference is None or batch.documents is None
            else batch.documents.index_select(1, mine),
            mask=mask,
        )

    def token_indices(self, length: int, device: torch.device) -> Tensor:
        """The indices of this rank's tokens in a sequence of `length`."""
        everything = torch.arange(length, device=device)
        if self.method == "ulysses":
            return everything.chunk(self.size)[self.rank]
        parts = everything.chunk(2 * self.size)
        return torch.cat([parts[self.rank], parts[-1 - self.rank]])

    def attention(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Replaces the attention function of a transformers model."""
        attend = self._attend_gathered if self.method == "gather" else self._attend_ulysses
        query, key = query.to(value.dtype), key.to(value.dtype)  # rotary embeddings are applied in fp32
        found = attend(query, key, value, attention_mask, scaling, dropout)
        return found.transpose(HEADS, SEQUENCE).contiguous(), None

    def _attend_gathered(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None, dropout: float
    ) -> Tensor:
        both = all_gather(torch.stack([key, value]), SEQUENCE + 1, self.group)
        # Ranks hold chunks (first, last), (second, last but one), …: restore the order of the sequence.
        parts = both.chunk(2 * self.size, SEQUENCE + 1)
        keys, values = torch.cat([*parts[0::2], *parts[1::2][::-1]], SEQUENCE + 1).unbind(0)
        if mask is not None:
            return attend(query, keys, values, mask, scaling, dropout)
        length = query.shape[SEQUENCE] // 2
        ends = (length * (self.rank + 1), length * (2 * self.size - self.rank))
        found = [
            attend_before(part, keys[:, :, :end], values[:, :, :end], scaling, dropout)
            for part, end in zip(torch.split(query, length, SEQUENCE), ends, strict=True)
        ]
        return torch.cat(found, SEQUENCE)

    def _attend_ulysses(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None, dropout: float
    ) -> Tensor:
        repeat = self.size // gcd(key.shape[HEADS], self.size)  # fewer key heads than ranks: repeat them
        both = torch.stack([key, value]).repeat_interleave(repeat, HEADS + 1)
        query = all_to_all(query, HEADS, SEQUENCE, self.group)
        keys, values = all_to_all(both, HEADS + 1, SEQUENCE + 1, self.group).unbind(0)
        return all_to_all(attend(query, keys, values, mask, scaling, dropout), SEQUENCE, HEADS, self.group)


def split_sequence(model: Any, group: dist.ProcessGroup, method: str) -> SequenceShard:
    """Give `model` an attention function for sharded sequences."""
    from transformers import AttentionInterface

    shard = SequenceShard(group, method)
    name = f"{MASKLESS}_{method}"
    AttentionInterface.register(name, shard.attention)
    model.set_attn_implementation(name)
    return shard


def attend_before(query: Tensor, keys: Tensor, values: Tensor, scaling: float | None, dropout: float) -> Tensor:
    """Causal attention of queries that belong to the last tokens of `keys`."""
    queries, length = query.shape[SEQUENCE], keys.shape[SEQUENCE]
    if queries == length:
        return attend(query, keys, values, None, scaling, dropout)
    if attends_from_end(query, values):
        return attend_from_end(query, keys, values, scaling, dropout)
    mask = torch.ones(queries, length, dtype=torch.bool, device=query.device).tril(length - queries)
    return attend(query, keys, values, mask, scaling, dropout)


def attend(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float | None, dropout: float
) -> Tensor:
    if must_repeat_keys(query, keys, values, masked=mask is not None):
        times = query.shape[HEADS] // keys.shape[HEADS]
        keys, values = repeat_heads(keys, times), repeat_heads(values, times)
    return F.scaled_dot_product_attention(
        query,
        keys,
        values,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[HEADS] != keys.shape[HEADS],
    )


def preparation(sequence: SequenceShard | None, device: torch.device, *, fill: bool) -> Prepare:
    """Move a micro-batch to the device, and shard its sequences or add position ids where the model needs that. Its
    loss tokens are counted before: afterwards the host would have to wait for the device."""

    def loss_tokens(batch: MicroBatch) -> int | None:
        if sequence is None or batch.loss_tokens is not None:
            return batch.counted()
        return replace(batch, labels=sequence.local_labels(batch.labels)).counted()

    def prepare(batch: MicroBatch) -> MicroBatch:
        batch = replace(batch.to(device), loss_tokens=loss_tokens(batch))
        if sequence is not None:
            return sequence.shard(batch)
        if fill and batch.positions is None:
            # transformers would number the tokens of its input, which may be a shard of the sequence.
            positions = torch.arange(batch.inputs.shape[1], device=device).expand(batch.inputs.shape)
            return replace(batch, positions=positions)
        return batch

    return prepare
