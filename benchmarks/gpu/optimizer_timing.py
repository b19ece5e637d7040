"""The time that norm, clipping and update take on the host and on the device: cases of optimizer.py."""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle, pairwise
from types import ModuleType, SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from shoal.optim.adamw import AdamW
from shoal.optim.fused import FusedOptimizer
from shoal.optim.lion import Lion
from shoal.parallel.gradients import Gradients, clip_factor

FP32, BF16 = torch.float32, torch.bfloat16
DEVICE = torch.device("cuda")
OPTIONS = {"lr": 1e-6, "betas": (0.9, 0.95), "weight_decay": 0.1}


def llama(layers: int, hidden: int, keys: int, ffn: int, vocabulary: int) -> list[tuple[int, ...]]:
    matrices = [(hidden, hidden), (keys, hidden), (keys, hidden), (hidden, hidden), (ffn, hidden), (ffn, hidden)]
    return [(vocabulary, hidden), *(layers * [*matrices, (hidden, ffn), (hidden,), (hidden,)]), (hidden,)]


MODELS = {
    "smollm2-135m": llama(30, 576, 192, 1536, 49152),
    "llama3.2-1b": llama(16, 2048, 512, 8192, 128256),
}


def timed(step: Callable[[], object], bytes_moved: float | None = None) -> dict:
    """Medians of calls: on the host with nothing in the queue, and on the device with all of it in the queue."""
    for _ in range(4):
        step()
    host = []
    for _ in range(20):
        torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        host.append(time.perf_counter() - began)
    torch.cuda.synchronize()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(9)]
    torch.cuda._sleep(60_000_000)  # about 30 ms, in which the host enqueues everything
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    device = statistics.median(one.elapsed_time(other) for one, other in pairwise(marks))
    result = {"host_ms": round(1e3 * statistics.median(host), 3), "device_ms": round(device, 3)}
    if bytes_moved is not None:
        result["terabytes_per_second"] = round(bytes_moved / device / 1e9, 2)
    return result


class Weights:
    """Parameters of a model's shapes, with copies and with two sets of gradients."""

    def __init__(self, shapes: list[tuple[int, ...]], grad_dtype: torch.dtype, mesh: object = None) -> None:
        local = [torch.randn(shape, device=DEVICE) * 0.02 for shape in shapes]
        self.count = sum(one.numel() for one in local)
        sets = [[torch.randn_like(one, dtype=grad_dtype) * 1e-3 for one in local] for _ in range(2)]
        self.copies: dict[Tensor, Tensor] = {}
        if mesh is None:
            self.parameters = [nn.Parameter(one) for one in local]
            self.copies = {one: one.detach().to(BF16) for one in self.parameters}
        else:
            placed = partial(DTensor.from_local, device_mesh=mesh, placements=[Shard(0)], run_check=False)
            self.parameters = [nn.Parameter(placed(one)) for one in local]
            sets = [
                [
                    DTensor(one, weight._spec, requires_grad=False)
                    for one, weight in zip(some, self.parameters, strict=True)
                ]
                for some in sets
            ]
        if grad_dtype != FP32:
            for weight in self.parameters:
                weight.grad_dtype = None
        self.sets = cycle(sets)
        self.next_gradients()

    def next_gradients(self) -> None:
        for weight, gradient in zip(self.parameters, next(self.sets), strict=True):
            weight.grad = gradient

    def groups(self, **matrices: object) -> list[dict]:
        return [
            {"params": [one for one in self.parameters if one.dim() >= 2], **matrices},
            {"params": [one for one in self.parameters if one.dim() < 2]},
        ]

    def gradients(self) -> Gradients:
        dims = SimpleNamespace(tp=None, pp=None, device=DEVICE)
        placement = SimpleNamespace(parallel_dims=dims, splits={}, owned_by_another_stage=frozenset())
        named = {str(index): one for index, one in enumerate(self.parameters)}
        return Gradients(named, placement, averages=(), in_place=False)  # type: ignore[arg-type]


def make(kind: str, weights: Weights) -> FusedOptimizer:
    if kind == "lion":
        return Lion(weights.groups(), **OPTIONS)
    return AdamW(weights.groups(eight_bits=kind == "adamw8bit"), **OPTIONS, dtype=FP32)


STATE_BYTES = {"adamw": 16, "adamw8bit": 4 + 16 / 256, "lion": 8}


def time_update(shapes: list[tuple[int, ...]], kind: str, grad_dtype: torch.dtype) -> dict:
    weights = Weights(shapes, grad_dtype)
    optimizer = make(kind, weights)
    usable, factor = torch.tensor(True, device=DEVICE), torch.tensor(0.5, device=DEVICE)
    moved = (8 + 2 + grad_dtype.itemsize + STATE_BYTES[kind]) * weights.count
    result = timed(lambda: optimizer.step(usable, factor, weights.copies), moved)
    skipped = torch.tensor(False, device=DEVICE)
    result["device_ms_skipped"] = timed(lambda: optimizer.step(skipped, factor, weights.copies))["device_ms"]
    return {"parameters": weights.count, "tensors": len(shapes), **result}


def time_norm(shapes: list[tuple[int, ...]], grad_dtype: torch.dtype) -> dict:
    weights = Weights(shapes, grad_dtype)
    gradients = weights.gradients()
    held = [one.grad for one in weights.parameters]
    moved = grad_dtype.itemsize * weights.count
    wanted = sum(float(one.double().square().sum()) for one in held) ** 0.5
    found = float(gradients.norm())
    assert abs(found - wanted) <= 1e-7 * wanted, (found, wanted)
    before = timed(
        lambda: torch.stack(torch._foreach_norm(held, 2, torch.float64)).square().sum().sqrt().float(), moved
    )
    return {**timed(gradients.norm, moved), "foreach": before}


def time_whole(shapes: list[tuple[int, ...]], kind: str, sharded: bool, moves: bool) -> dict:
    """Norm, clipping, update and clearing as in a training step; with `moves` every gradient has another address."""
    weights = Weights(shapes, BF16 if not sharded else FP32, one_rank_mesh() if sharded else None)
    gradients, optimizer = weights.gradients(), make(kind, weights)
    usable = torch.tensor(True, device=DEVICE)
    host = []

    def step() -> None:
        if moves:
            weights.next_gradients()
        began = time.perf_counter()
        norm = gradients.norm()
        optimizer.step(norm.isfinite() & usable, clip_factor(norm, 1.0), weights.copies)
        host.append(time.perf_counter() - began)

    result = timed(step)
    began = time.perf_counter()
    gradients.clear()
    result["host_ms_clear"] = round(1e3 * (time.perf_counter() - began), 3)
    result["host_ms"] = round(1e3 * statistics.median(host[4:24]), 3)
    return result


def time_torch(shapes: list[tuple[int, ...]]) -> dict:
    """The same work with torch: scaled gradients, fused AdamW, cast."""
    weights = Weights(shapes, FP32)
    optimizer = torch.optim.AdamW(weights.groups(), **OPTIONS, fused=True)
    usable, factor = torch.tensor(True, device=DEVICE), torch.tensor(0.5, device=DEVICE)
    held, copies = [one.grad for one in weights.parameters], list(weights.copies.values())

    def step() -> None:
        torch._foreach_mul_(held, factor)
        optimizer.found_inf = (~usable).float()  # type: ignore[attr-defined]
        optimizer.step()
        torch._foreach_copy_(copies, [one.detach() for one in weights.parameters])

    result = timed(step, (4 + 4 + 28 + 6) * weights.count)
    return {**result, "fused AdamW alone": timed(optimizer.step, 28 * weights.count)}


def one_rank_mesh() -> object:
    if not dist.is_initialized():
        store = dist.FileStore(tempfile.mktemp(), 1)
        dist.init_process_group("nccl", rank=0, world_size=1, store=store)
    return init_device_mesh("cuda", (1,))


def capture(kind: str) -> dict:
    """Norm, clipping and update in a CUDA graph give the same weights as without one."""
    results = []
    for captured in (False, True):
        torch.manual_seed(0)
        weights = Weights(MODELS["smollm2-135m"][:40], BF16)
        gradients, optimizer = weights.gradients(), make(kind, weights)

        def step(weights=weights, gradients=gradients, optimizer=optimizer) -> None:
            norm = gradients.norm()
            optimizer.step(norm.isfinite(), clip_factor(norm, 1.0), weights.copies)

        for _ in range(3):
            step()
        run = step
        if captured:
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                step()
            run = graph.replay
        for _ in range(4):
            run()
        results.append([one.detach().clone() for one in weights.parameters])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    return {"same bits": True}


def tune(module: ModuleType, names: tuple[str, ...], settings: list[tuple[int, ...]], make_step: Callable) -> dict:
    """Milliseconds on the device with other sizes than the chosen ones."""
    chosen = tuple(getattr(module, name) for name in names)
    found = {}
    for values in [chosen, *settings]:
        for name, value in zip(names, values, strict=True):
            setattr(module, name, value)
        found[" × ".join(map(str, values))] = timed(make_step())["device_ms"]
    for name, value in zip(names, chosen, strict=True):
        setattr(module, name, value)
    return {"/".join(names): found}


def tune_update(kind: str) -> dict:
    from shoal.optim import adamw_kernel, lion_kernel

    weights = Weights(MODELS["llama3.2-1b"], BF16)
    usable, factor = torch.tensor(True, device=DEVICE), torch.tensor(0.5, device=DEVICE)

    def make_step() -> Callable[[], None]:
        optimizer = make(kind, weights)
        return lambda: optimizer.step(usable, factor, weights.copies)

    if kind == "lion":
        return tune(lion_kernel, ("CHUNK", "WARPS"), [(1024, 4), (2048, 8), (2048, 16), (4096, 8)], make_step)
    if kind == "adamw8bit":
        others = [(1, 1), (1, 2), (2, 1), (2, 4), (4, 4)]
        return tune(adamw_kernel, ("ROWS", "WARPS_IN_BLOCKS"), others, make_step)
    return tune(adamw_kernel, ("CHUNK", "WARPS"), [(512, 4), (1024, 4), (2048, 8), (2048, 16)], make_step)


def tune_norm() -> dict:
    from shoal.parallel import norm_kernel

    found = {}
    for dtype in (FP32, BF16):
        weights = Weights(MODELS["llama3.2-1b"], dtype)
        others = [(1024, 4), (2048, 4), (4096, 4), (8192, 8), (16384, 16)]
        found[str(dtype)] = tune(norm_kernel, ("CHUNK", "WARPS"), others, lambda w=weights: w.gradients().norm)
    return found


def timings() -> Iterator[tuple[str, Callable[[], dict]]]:
    for kind in ("adamw", "adamw8bit", "lion"):
        yield f"{kind} in a CUDA graph", partial(capture, kind)
    small = MODELS["smollm2-135m"]
    for sharded in (False, True):
        for moves in (False, True):
            label = f"{'DTensors' if sharded else 'tensors'}, gradients {'move' if moves else 'stay'}"
            for kind in ("adamw", "adamw8bit", "lion"):
                yield f"norm, clipping, {kind}: smollm2-135m, {label}", partial(time_whole, small, kind, sharded, moves)
    for model, shapes in MODELS.items():
        for dtype in (FP32, BF16):
            yield f"norm: {model}, {dtype}", partial(time_norm, shapes, dtype)
            for kind in ("adamw", "adamw8bit", "lion"):
                yield f"update: {kind}, {model}, gradients {dtype}", partial(time_update, shapes, kind, dtype)
        yield f"update: torch's fused AdamW, {model}", partial(time_torch, shapes)
    for kind in ("adamw", "adamw8bit", "lion"):
        yield f"tune: {kind}", partial(tune_update, kind)
    yield "tune: norm", tune_norm
