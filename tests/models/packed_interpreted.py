"""Compare the kernels of packed projections in Triton's interpreter with the CPU's path, and print what was compared. A
separate program, because TRITON_INTERPRET is read when Triton is imported."""

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch

from shoal.models import packed, packed_kernel

torch.manual_seed(0)
for dtype in (torch.float32, torch.float16):
    close = {"rtol": 2e-3, "atol": 2e-3} if dtype == torch.float16 else {"rtol": 1e-5, "atol": 1e-5}
    # Rows and columns that do not fill a program, and that do.
    for rows, width in ((5, 96), (70, 64)):
        gate_up, gradient = torch.randn(rows, 2 * width).to(dtype), torch.randn(rows, width).to(dtype)
        torch.testing.assert_close(packed_kernel.gate_kernel(gate_up), packed._gate(gate_up), **close)
        found, expected = (
            module(gate_up, gradient) for module in (packed_kernel.gate_backward_kernel, packed._gate_backward)
        )
        torch.testing.assert_close(found, expected, **close)
        print("the same: gate", rows, width, dtype)
    # One row of angles for all sequences, and one for each.
    for angles in (1, 3):
        batch, length, width, heads, keys = 3, 5, 32, 3, 1
        cos, sin = torch.randn(angles, length, width // 2).cos(), torch.randn(angles, length, width // 2).sin()
        cos, sin = torch.cat([cos, cos], dim=-1), torch.cat([sin, sin], dim=-1)
        columns = [torch.randn(batch * length, count * width).to(dtype) for count in (heads, keys, keys)]
        expected = packed._rotate(torch.cat(columns, dim=-1), cos, sin, heads)
        found = packed_kernel.rotate_kernel(torch.cat(columns, dim=-1), cos, sin, heads)
        torch.testing.assert_close(found, expected, **close)
        expected = packed._rotate_back(*columns, cos, sin)
        torch.testing.assert_close(packed_kernel.rotate_back_kernel(*columns, cos, sin), expected, **close)
        print("the same: rotary", angles, dtype)
