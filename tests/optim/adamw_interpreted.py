"""Compare the AdamW kernel in Triton's interpreter with the eager implementation, and print what was compared. A
separate program, because TRITON_INTERPRET is read when Triton is imported."""

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor, nn

from shoal.optim.adamw import AdamW
from shoal.optim.adamw_kernel import update

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
# shape, dtypes of weight, gradient and compute copy, whether moments are in 8 bits
CASES = [
    ((1,), FP32, FP32, None, False),
    ((5, 7), FP32, FP32, BF16, False),
    ((33, 65), FP32, BF16, FP16, False),
    ((3000,), FP32, FP16, FP16, False),
    ((40, 50), BF16, BF16, None, False),
    ((17, 300), FP32, FP32, FP16, True),
    ((9, 512), FP32, BF16, FP16, True),
    ((3, 5, 40), FP32, BF16, None, True),
    ((6, 257), BF16, BF16, None, True),
]


def train(case: tuple, kernel: bool) -> dict[str, Tensor]:
    shape, weight_type, gradient_type, copy_type, in_eight_bits = case
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(shape, generator=generator).to(weight_type))
    weight.grad_dtype = None  # type: ignore[attr-defined]
    copies = {} if copy_type is None else {weight: torch.zeros(shape, dtype=copy_type)}
    kept = FP32 if in_eight_bits else None
    optimizer = AdamW([weight], lr=1e-2, weight_decay=0.1, eight_bits=in_eight_bits, dtype=kept)
    optimizer.kernel = update if kernel else None
    for step in range(5):
        spread = torch.rand(shape, generator=generator) ** 4
        gradient = torch.randn(shape, generator=generator) * spread
        optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)
        weight.grad = gradient.to(gradient_type) * (torch.nan if step == 2 else 1)
        factor = None if step == 3 else torch.tensor(0.5)
        optimizer.step(torch.tensor(step != 2), factor, copies)
    found = {"weight": weight.detach(), **optimizer.state[weight]}
    return found if copy_type is None else {**found, "copy": copies[weight]}


for case in CASES:
    found, wanted = train(case, kernel=True), train(case, kernel=False)
    assert found.keys() == wanted.keys()
    assert found["step"] == 4, "a step that is not usable does not count"
    for name, tensor in wanted.items():
        # The interpreter truncates to bf16 where a device rounds to nearest, in each of four steps.
        off = 4 * 2.0**-7 if tensor.dtype == BF16 else 2.0**-10 if tensor.dtype == FP16 else 1e-6
        torch.testing.assert_close(found[name], tensor, rtol=off, atol=off if tensor.dtype == BF16 else 1e-6)
    print("the same:", *case)
