"""The split of a real trace of a GPU, reduced by `shrink_trace.py`."""

from pathlib import Path

import pytest

from shoal.observe.profile.classify import TERMS
from shoal.observe.profile.split import split
from shoal.observe.profile.summary import summarize_rank
from shoal.observe.profile.trace import read_trace

TRACE = Path(__file__).parent / "h200.trace.json.gz"


def test_a_real_trace_of_a_gpu_is_split_by_kernels() -> None:
    trace = read_trace(TRACE)
    found = summarize_rank(trace, split(trace))
    assert (found["device"], found["steps"]) == ("gpu", 2)
    assert set(found["terms"]) == set(TERMS)
    assert sum(found["terms"].values()) == pytest.approx(found["step_seconds"])
    largest = sorted(found["terms"], key=lambda term: -found["terms"][term])
    assert largest[:2] == ["idle", "matmul"]  # the host launches kernel by kernel, and the profiler makes it slower
    assert min(found["terms"][term] for term in ("attention", "elementwise", "optimizer")) > 0
    assert found["terms"]["communication"] == 0
