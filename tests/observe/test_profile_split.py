"""How a trace is split into terms: on made-up traces, whose answer is known."""

from itertools import pairwise
from typing import Any

import pytest

from shoal.observe.profile.classify import TERMS
from shoal.observe.profile.memory import POINTS, memory_timeline
from shoal.observe.profile.split import NothingRecorded, split
from shoal.observe.profile.trace import parse_trace

HOST, AUTOGRAD, GLOO = 1, 2, 3
GEMM, POINTWISE, NCCL = "nvjet_tst_128x256", "triton_poi_fused_add_0", "ncclDevKernel_AllGather_RING_LL"


def range_(name: str, begin: float, end: float) -> dict[str, Any]:
    return operator(name, begin, end) | {"cat": "user_annotation"}


def operator(name: str, begin: float, end: float, thread: int = HOST) -> dict[str, Any]:
    return {"ph": "X", "cat": "cpu_op", "name": name, "ts": begin, "dur": end - begin, "tid": thread}


def steps(*bounds: float) -> list[dict[str, Any]]:
    """One recorded step between each two of `bounds`."""
    return [range_(f"shoal.step {index}", *pair) for index, pair in enumerate(pairwise(bounds))]


class Device:
    """Kernels with their launches."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def run(
        self, name: str, begin: float, end: float, *, launched: float, stream: int = 7, category: str = "kernel"
    ) -> None:
        correlation = {"correlation": len(self.events)}
        self.events += [
            {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": launched, "dur": 1, "tid": AUTOGRAD}
            | {"args": correlation},
            {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": end - begin, "tid": stream}
            | {"args": correlation},
        ]


def terms(events: list[dict[str, Any]]) -> dict[str, float]:
    """Microseconds of the terms that are not zero; they add up to the window."""
    found = split(parse_trace(events))
    assert set(found.terms) == set(TERMS)
    assert sum(found.terms.values()) == pytest.approx(found.seconds)
    return {term: round(seconds * 1e6, 3) for term, seconds in found.terms.items() if seconds > 1e-12}


def test_communication_is_exposed_where_no_kernel_runs_and_hidden_elsewhere() -> None:
    device = Device()
    device.run(GEMM, 10, 20, launched=5)
    device.run(GEMM, 110, 150, launched=105)
    device.run(NCCL, 140, 180, launched=106, stream=20)  # 10 hidden, 30 exposed
    device.run(POINTWISE, 190, 200, launched=107)
    device.run(GEMM, 210, 220, launched=205)
    events = [*steps(0, 100, 200, 300), *device.events]
    assert terms(events) == {"matmul": 40, "elementwise": 10, "communication": 30, "idle": 20}
    assert split(parse_trace(events)).hidden == pytest.approx(10e-6)


def test_a_step_of_a_gpu_begins_with_its_first_kernel_wherever_the_host_is() -> None:
    device = Device()
    for step in range(4):  # the host is a whole step ahead
        device.run(GEMM, 150 + 100 * step, 240 + 100 * step, launched=50 + 100 * step)
    found = split(parse_trace([*steps(0, 100, 200, 300, 400), *device.events]))
    assert (found.steps, found.seconds) == (2, pytest.approx(200e-6))
    assert found.terms["matmul"] == pytest.approx(180e-6)


def test_kernels_of_two_streams_at_once_are_not_counted_twice() -> None:
    device = Device()
    device.run(GEMM, 10, 20, launched=5)
    device.run(GEMM, 110, 150, launched=105)
    device.run(POINTWISE, 130, 170, launched=106, stream=8)
    device.run("Memcpy HtoD (Pinned -> Device)", 160, 190, launched=107, stream=9, category="gpu_memcpy")
    device.run(GEMM, 210, 220, launched=205)
    assert terms([*steps(0, 100, 200, 300), *device.events]) == {
        "matmul": 40,
        "elementwise": 20,
        "copy": 20,
        "idle": 20,
    }


def test_what_the_optimizer_launches_is_the_optimizer_and_an_idle_wait_for_data_is_data() -> None:
    device = Device()
    device.run(GEMM, 10, 20, launched=5)
    device.run(GEMM, 110, 140, launched=105)
    device.run(POINTWISE, 140, 150, launched=125)
    device.run(GEMM, 210, 220, launched=205)
    ranges = [range_("shoal.optimizer", 120, 130), range_("shoal.data", 145, 170)]
    found = terms([*steps(0, 100, 200, 300), *ranges, *device.events])
    assert found == {"matmul": 30, "optimizer": 10, "data": 20, "idle": 40}


def test_operators_of_a_cpu_count_without_those_that_they_call() -> None:
    events = [
        *steps(0, 100, 200, 300),
        operator("aten::linear", 100, 140),
        operator("aten::t", 105, 110),
        operator("aten::addmm", 110, 138),
        operator("aten::_scaled_dot_product_flash_attention_for_cpu", 140, 160),
        operator("aten::bmm", 145, 150),  # in attention
        range_("shoal.optimizer", 160, 180),
        operator("aten::mul_", 165, 175),
        operator("aten::mul", 185, 195),
        operator("aten::mul", 120, 135, thread=AUTOGRAD),  # another thread: a loader's
    ]
    expected = {"matmul": 35, "elementwise": 15, "attention": 20, "optimizer": 20, "idle": 10}
    assert terms(events) == expected
    calls = {one.name: one.calls for one in split(parse_trace(events)).work}
    assert calls["aten::linear"] == 1, "interrupted by what it calls, and yet one call"


def test_a_collective_of_gloo_is_exposed_where_the_loop_waits_for_it() -> None:
    events = [
        *steps(0, 100, 200, 300),
        operator("aten::mm", 100, 150),
        operator("c10d::allreduce_", 150, 152),
        operator("gloo:all_reduce", 140, 190, thread=GLOO) | {"cat": "user_annotation"},
    ]
    assert terms(events) == {"matmul": 50, "communication": 40, "idle": 10}
    assert split(parse_trace(events)).hidden == pytest.approx(10e-6)


def test_a_trace_without_a_whole_step_is_refused() -> None:
    with pytest.raises(NothingRecorded):
        split(parse_trace(steps(0, 100, 200)))


def test_the_memory_timeline_keeps_the_peak() -> None:
    def allocation(at: float, total: int) -> dict[str, Any]:
        return {"ph": "i", "name": "[memory]", "ts": at, "args": {"Total Allocated": total, "Device Id": -1}}

    events = [allocation(at, total) for at, total in ((50, 2**30), (130, 3 * 2**30), (130.01, 2**29), (250, 2**40))]
    found = memory_timeline(parse_trace(events), (100e-6, 200e-6))
    assert found is not None
    assert len(found["gib"]) == POINTS
    assert (found["peak_gib"], found["lowest_gib"]) == (3, 0.5), "also what lasts less than a point"
    assert found["peak_at_seconds"] == pytest.approx(30e-6, abs=0.6e-6)
    assert (found["gib"][0], found["gib"][-1]) == (1, 0.5)
