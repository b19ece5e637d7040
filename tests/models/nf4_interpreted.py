"""Compare the NF4 kernel in Triton's interpreter with the CPU's path, and print what was compared. A separate program,
because TRITON_INTERPRET is read when Triton is imported."""

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch

from shoal.models import nf4
from shoal.models.nf4_kernel import dequantize_kernel

CPU = torch.device("cpu")
# With fewer blocks than a program takes, with more, and with more scales than a block of nested scales takes.
for shape in ((3, 64), (30, 704)):
    for kind in ("nf4", "nf4-dq"):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
            parts = nf4.quantize(weight, kind)
            nested = parts.get("nested_absmax"), parts.get("nested_offset")
            tables = nf4._values(CPU), nf4.dynamic_values(CPU)
            found = dequantize_kernel(parts["weight"], parts["absmax"], *nested, dtype, *tables, nf4.NESTED_BLOCK)
            expected = nf4.dequantize(parts, dtype, kind)
            # The interpreter truncates to bf16 where a device rounds to nearest.
            off = 2.0**-7 if dtype == torch.bfloat16 else 0.0
            torch.testing.assert_close(found, expected, rtol=off, atol=0.0)
            print("the same:", shape, kind, dtype)
