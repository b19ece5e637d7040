"""Activation offloading: the same gradients as full activation checkpointing, with the inputs of blocks in host buffers
that are reused. On a CPU the buffers are ordinary memory, and the rest is the same."""

from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from shoal.parallel.compile import compile_blocks
from shoal.parallel.offload import HostBuffers
from shoal.parallel.recompute import recompute_blocks

BLOCKS, HIDDEN = 3, 32


class Stack(nn.Module):
    """Blocks as a model calls them, and the memory of the inputs that they were given."""

    def __init__(self, how: str, backend: str | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = {"hidden_size": HIDDEN, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
        settings = LlamaConfig(**sizes, num_hidden_layers=BLOCKS, attn_implementation="sdpa")
        self.rotary = LlamaRotaryEmbedding(settings)
        self.blocks = nn.ModuleList(LlamaDecoderLayer(settings, index) for index in range(BLOCKS))
        recompute_blocks(list(self.blocks), how)
        if backend is not None:
            compile_blocks(list(self.blocks), backend, keeps_all=False)
        self.inputs: list[Any] = []

    def forward(self, length: int, seed: int = 0) -> Tensor:
        given = torch.randn(2, length, HIDDEN, generator=torch.Generator().manual_seed(seed), requires_grad=True)
        hidden = given * 2  # not a leaf, which autograd holds
        positions = self.rotary(hidden, torch.arange(length)[None])
        self.inputs = []
        for block in self.blocks:
            self.inputs.append(ref(hidden.untyped_storage()))
            hidden = block(hidden, position_embeddings=positions)
        return hidden.square().sum()

    @property
    def buffers_of_host(self) -> HostBuffers:
        found = self.blocks[0].offloaded_inputs.buffers
        assert isinstance(found, HostBuffers)
        return found

    def gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.parameters() if parameter.grad is not None]


def hold_equal(one: Stack, other: Stack) -> None:
    found, wanted = one.gradients(), other.gradients()
    assert len(found) == len(wanted) == 9 * BLOCKS
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_only_the_input_of_the_last_block_is_on_the_device_after_the_forward_pass():
    full, offload = Stack("full"), Stack("offload")
    losses = [stack(20) for stack in (full, offload)]
    assert [one() is not None for one in full.inputs] == [True] * BLOCKS
    assert [one() is not None for one in offload.inputs] == [False, False, True]
    for loss in losses:
        loss.backward()
    hold_equal(offload, full)


def test_buffers_are_reused_by_every_micro_batch_and_replaced_only_for_longer_sequences():
    full, offload = Stack("full"), Stack("offload")
    for length, bytes_of_largest in ((12, 12), (20, 20), (7, 20), (20, 20)):
        for stack in (full, offload):
            stack(length, seed=length).backward()
        buffers = offload.buffers_of_host
        assert (buffers.count, len(buffers.free)) == (BLOCKS, BLOCKS)
        assert {buffer.numel() for buffer in buffers.free} == {2 * bytes_of_largest * HIDDEN * 4}
        addresses = {buffer.data_ptr() for buffer in buffers.free}
        if length == 7:
            kept = addresses
    assert addresses == kept
    hold_equal(offload, full)


def test_several_micro_batches_in_flight_have_buffers_of_their_own():
    """As in a pipeline, which runs the backward passes in the order of the forward passes."""
    full, offload = Stack("full"), Stack("offload")
    for stack in (full, offload):
        for loss in [stack(20, seed) for seed in range(3)]:
            loss.backward()
    assert (offload.buffers_of_host.count, len(offload.buffers_of_host.free)) == (3 * BLOCKS, 3 * BLOCKS)
    hold_equal(offload, full)


def test_a_second_backward_pass_reads_the_buffers_again():
    full, offload = Stack("full"), Stack("offload")
    for stack in (full, offload):
        loss = stack(20)
        loss.backward(retain_graph=True)
        loss.backward()
    hold_equal(offload, full)


def test_without_gradients_nothing_is_offloaded_and_a_dropped_forward_pass_gives_its_buffers_back():
    stack = Stack("offload")
    with torch.no_grad():
        stack(20)
    assert stack.blocks[0].offloaded_inputs.buffers is None
    loss = stack(20)
    assert (stack.buffers_of_host.count, len(stack.buffers_of_host.free)) == (BLOCKS, 0)
    del loss
    assert len(stack.buffers_of_host.free) == BLOCKS


@pytest.mark.slow
def test_compiled_blocks_are_offloaded_outside_of_the_graph():
    full, offload = Stack("full"), Stack("offload", "aot_eager")
    for _ in range(2):
        losses = [stack(20) for stack in (full, offload)]
        assert [one() is not None for one in offload.inputs] == [False, False, True]
        assert len(offload.buffers_of_host.free) == 0
        for loss in losses:
            loss.backward()
        del losses, loss
        assert (offload.buffers_of_host.count, len(offload.buffers_of_host.free)) == (BLOCKS, BLOCKS)
    for one, other in zip(offload.gradients(), full.gradients(), strict=True):
        torch.testing.assert_close(one, other)
