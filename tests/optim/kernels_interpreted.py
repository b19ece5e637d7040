"""Compare the kernels of AdamW, Lion and the gradient norm in Triton's interpreter with the eager implementations, and
print what was compared. A separate program, because TRITON_INTERPRET is read when Triton is imported."""

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor, nn

from shoal.models.tensor_slices import SliceMapping, TensorSlice, whole
from shoal.optim.adamw import AdamW
from shoal.optim.adamw_kernel import AdamWKernel
from shoal.optim.fused import FusedOptimizer
from shoal.optim.lion import Lion
from shoal.optim.lion_kernel import LionKernel
from shoal.optim.rounding import StochasticRounding
from shoal.parallel.norm_kernel import SumOfSquares

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
# shape, dtypes of weight, gradient and compute copy. Tensors of a list are updated together.
PLAIN = [
    ((1,), FP32, FP32, None),
    ((5, 7), FP32, FP32, BF16),
    ((33, 65), FP32, BF16, FP16),
    ((0, 65), FP32, BF16, FP16),  # an empty shard
    ((3000,), FP32, FP16, FP16),
    ((48, 64), FP32, FP16, FP16),
    ((40, 50), BF16, BF16, None),
    ((16, 16), FP32, FP32, BF16),
    ((64, 16), FP32, FP32, BF16),
]
BLOCKED = [
    ((17, 300), FP32, FP32, FP16),
    ((9, 512), FP32, BF16, FP16),
    ((0, 512), FP32, BF16, FP16),
    ((3, 5, 40), FP32, BF16, None),
    ((6, 257), BF16, BF16, None),
    ((2, 3, 512), FP32, BF16, FP16),
]
# Rounded stochastically: the shape of the parameter, the slice of it that is here
ROUNDED = [
    ((3000,), TensorSlice((0,), (3000,))),
    ((100_000, 50_000), TensorSlice((99_960, 0), (2, 50_000))),  # indices of more than 32 bits
    ((4, 30, 50), TensorSlice((1, 5, 7), (2, 6, 40))),
    ((40, 300), TensorSlice((10, 0), (9, 300))),
    ((40, 300), TensorSlice((10, 20), (9, 257))),
]


def make(kind: str, weights: list[nn.Parameter], **options: object) -> FusedOptimizer:
    if kind == "lion":
        return Lion(weights, lr=1e-2, weight_decay=0.1)
    return AdamW(weights, lr=1e-2, weight_decay=0.1, eight_bits=kind == "adamw8bit", **options)


def use_kernel(optimizer: FusedOptimizer) -> None:
    optimizer.kernel = LionKernel if isinstance(optimizer, Lion) else AdamWKernel


def gradient_for(weight: Tensor, dtype: torch.dtype, generator: torch.Generator, step: int) -> Tensor:
    """One that is not contiguous, aligned or finite in some steps."""
    gradient = torch.randn(weight.shape, generator=generator) * torch.rand(weight.shape, generator=generator) ** 4
    gradient = gradient.to(dtype)
    if step == 1:
        gradient = torch.cat([torch.zeros(1, dtype=dtype), gradient.flatten()])[1:].view(weight.shape)
    if step == 2:
        gradient = gradient * torch.nan
    if step == 3:
        gradient = gradient.movedim(0, -1).contiguous().movedim(-1, 0)
    return gradient


def train(kind: str, cases: list, kernel: bool) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    weights, copies = [], {}
    for shape, weight_type, _, copy_type in cases:
        weight = nn.Parameter(torch.randn(shape, generator=generator).to(weight_type))
        weight.grad_dtype = None  # type: ignore[attr-defined]
        weights.append(weight)
        if copy_type is not None:
            copies[weight] = torch.zeros(shape, dtype=copy_type)
    optimizer = make(kind, weights)
    if kernel:
        use_kernel(optimizer)
    for step in range(6):
        optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)
        for weight, (_, _, gradient_type, _) in zip(weights, cases, strict=True):
            gradient = gradient_for(weight, gradient_type, generator, step)
            # The last tensor has no gradient in some steps, so that its steps are counted apart.
            weight.grad = None if step in (0, 4) and weight is weights[-1] else gradient
        factor = None if step == 3 else torch.tensor(0.5)
        optimizer.step(torch.tensor(step != 2), factor, copies)
    return [
        {"weight": one.detach(), **optimizer.state[one], **({"copy": copies[one]} if one in copies else {})}
        for one in weights
    ]


for kind, cases in (("adamw", PLAIN), ("adamw8bit", BLOCKED), ("lion", PLAIN)):
    together, eager = train(kind, cases, kernel=True), train(kind, cases, kernel=False)
    for case, found, wanted in zip(cases, together, eager, strict=True):
        assert found.keys() == wanted.keys()
        if kind != "lion":
            assert found["step"] == (3 if case is cases[-1] else 5), "a step that is not usable does not count"
        for name, tensor in wanted.items():
            # The interpreter truncates to bf16 where a device rounds to nearest, in each of five steps.
            off = 5 * 2.0**-7 if tensor.dtype == BF16 else 2.0**-10 if tensor.dtype == FP16 else 1e-6
            torch.testing.assert_close(found[name], tensor, rtol=off, atol=off if tensor.dtype == BF16 else 1e-6)
        print("the same:", kind, *case)


def round_stochastically(kind: str, kernel: bool) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    weights, rounding = [], {}
    for shape, part in ROUNDED if kind == "adamw" else ROUNDED[3:]:
        weights.append(nn.Parameter(torch.randn(part.shape, generator=generator).to(BF16)))
        held = [SliceMapping(part, whole(part.shape))]
        rounding[weights[-1]] = StochasticRounding(12345, shape, part.shape, held, torch.device("cpu"))
    optimizer = make(kind, weights, dtype=FP32, rounding=rounding)
    if kernel:
        use_kernel(optimizer)
    for _ in range(3):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator).to(BF16)
        optimizer.step(torch.tensor(True))
    return [weight.detach() for weight in weights]


for kind in ("adamw", "adamw8bit"):
    for found, wanted in zip(*(round_stochastically(kind, kernel) for kernel in (True, False)), strict=True):
        # Not always: what is rounded differs in the last bit of fp32.
        assert float((found == wanted).float().mean()) > 0.995
        print("the same: rounded stochastically,", kind, tuple(found.shape))


squares = SumOfSquares()
for step in range(5):
    generator = torch.Generator().manual_seed(step)
    tensors = [gradient_for(torch.zeros(shape), dtype, generator, step) for shape, _, dtype, _ in PLAIN]
    tensors.append(gradient_for(torch.zeros(16, 1024), FP32, generator, step))
    wanted = sum(float(one.double().square().sum()) for one in tensors)
    torch.testing.assert_close(float(squares(tensors)), wanted, rtol=1e-14, atol=0, equal_nan=True)
print("the same: sum of squares")
