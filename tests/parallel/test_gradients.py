"""The norm of gradients in host memory, small and large, in fp64."""

from types import SimpleNamespace
from typing import Any

import torch

from shoal.parallel.gradients import HOST_CHUNK, LARGE, Gradients


def test_the_norm_of_offloaded_gradients_counts_small_and_large_ones_in_fp64() -> None:
    torch.manual_seed(0)
    sizes = [(7,), (LARGE - 1,), (HOST_CHUNK // 512 + 3, 512), (2 * HOST_CHUNK,)]
    gradients = [torch.randn(size) * 10.0**index for index, size in enumerate(sizes)]
    gradients[2] = gradients[2].bfloat16()
    gradients[3] = gradients[3].view(2, -1).t()  # not contiguous
    parameters = {}
    for index, gradient in enumerate(gradients):
        parameters[str(index)] = torch.nn.Parameter(torch.empty_like(gradient))
        parameters[str(index)].grad = gradient
    dims = SimpleNamespace(pp=None, tp=None, device=torch.device("cuda"))
    placement: Any = SimpleNamespace(parallel_dims=dims, owned_by_another_stage=(), splits={})
    found = Gradients(parameters, placement, averages=(), in_place=False).norm()
    expected = sum(float(one.double().square().sum()) for one in gradients) ** 0.5
    assert found.dtype == torch.float32
    assert found.item() == torch.tensor(expected).float().item()
