"""How the time of the recorded steps splits into terms: from the kernels of a GPU, or from the CPU's operators."""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from shoal.observe.profile import ranges
from shoal.observe.profile.classify import (
    ATTENTION,
    COMMUNICATION,
    COMPUTE,
    COPY,
    DATA,
    ELEMENTWISE,
    IDLE,
    OPTIMIZER,
    OTHER,
    TERMS,
    kernel_kind,
    operator_kind,
)
from shoal.observe.profile.intervals import Interval, clip, subtract, total, union
from shoal.observe.profile.trace import Event, Trace

# Ranges whose work belongs to one term, whatever the kernels are called.
WHOLE = {ranges.OPTIMIZER: OPTIMIZER, ranges.DATA: DATA, ranges.EVALUATION: OTHER, ranges.SAVE: OTHER}
# An operator inside of one of these terms belongs to it too: attention on a CPU calls matmuls.
INHERITED = (OPTIMIZER, DATA, OTHER, ATTENTION, COMMUNICATION)


@dataclass(frozen=True)
class Piece:
    """A time in which one kernel or operator ran, without the operators that it called."""

    begin: float
    end: float
    kind: str
    name: str
    opens: bool = True  # False: the same call as an earlier piece


@dataclass(frozen=True)
class Work:
    """One kernel or operator, over all of its calls in the window."""

    name: str
    kind: str
    seconds: float
    calls: int


@dataclass(frozen=True)
class Split:
    """The time of `steps` steps. `terms` add up to `seconds`; hidden communication ran while the device computed."""

    steps: int
    seconds: float
    terms: dict[str, float]
    hidden: float
    work: list[Work] = field(default_factory=list)  # longest first
    window: Interval = (0.0, 0.0)


class NothingRecorded(ValueError):
    """The trace has no whole step."""


def split(trace: Trace) -> Split:
    """The terms of the recorded steps without the first and the last: those overlap with what was not recorded.

    A step of a GPU begins with its first kernel, wherever the host is; the last recorded one says when the one before
    it ended.
    """
    steps = trace.steps()
    if len(steps) < 3:
        raise NothingRecorded("fewer than three steps were recorded")
    measured = steps[1:-1]
    if trace.on_device:
        bounds = _bounds(trace, steps)
        window, pieces = (bounds[1], bounds[-1]), list(_kernels(trace))
    else:
        window = (measured[0].begin, measured[-1].end)
        pieces = list(_operators([one for one in trace.operators if one.thread == measured[0].thread]))
        pieces += [
            Piece(one.begin, one.end, COMMUNICATION, one.name)
            for one in trace.operators
            if one.thread != measured[0].thread and operator_kind(one.name) == COMMUNICATION
        ]
    return _account(pieces, trace, window, len(measured))


def _account(pieces: Sequence[Piece], trace: Trace, window: Interval, steps: int) -> Split:
    inside = [
        replace(one, begin=max(one.begin, window[0]), end=min(one.end, window[1]))
        for one in pieces
        if one.end > window[0] and one.begin < window[1]
    ]
    by_kind: defaultdict[str, list[Interval]] = defaultdict(list)
    for one in inside:
        by_kind[one.kind].append((one.begin, one.end))
    terms = dict.fromkeys(TERMS, 0.0)
    # Kernels of several streams may run at once: the one that began first counts.
    taken = window[0]
    for one in sorted((one for one in inside if one.kind in (*COMPUTE, OTHER)), key=lambda one: one.begin):
        terms[one.kind] += max(0.0, one.end - max(one.begin, taken))
        taken = max(taken, one.end)
    busy = union(interval for kind in (*COMPUTE, OTHER) for interval in by_kind[kind])
    communication = union(by_kind[COMMUNICATION])
    exposed = subtract(communication, busy)
    terms[COMMUNICATION] = total(exposed)
    # What follows counts only where none of the former runs.
    evaluated = [one for name in (ranges.EVALUATION, ranges.SAVE) for one in trace.ranges(name)]
    for kind, intervals in (
        (COPY, by_kind[COPY]),
        (DATA, [*by_kind[DATA], *trace.ranges(ranges.DATA)]),
        (OTHER, evaluated),
    ):
        busy = union([*busy, *exposed])
        exposed = subtract(union(clip(intervals, window)), busy)
        terms[kind] += total(exposed)
    seconds = window[1] - window[0]
    terms[IDLE] = max(0.0, seconds - sum(terms.values()))
    hidden = total(communication) - terms[COMMUNICATION]
    return Split(steps, seconds, terms, hidden, _work(inside), window)


def _work(pieces: Sequence[Piece]) -> list[Work]:
    seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
    calls: Counter[tuple[str, str]] = Counter()
    for one in pieces:
        seconds[one.name, one.kind] += one.end - one.begin
        calls[one.name, one.kind] += one.opens
    found = (Work(name, kind, time, calls[name, kind]) for (name, kind), time in seconds.items())
    return sorted(found, key=lambda one: -one.seconds)


def _bounds(trace: Trace, steps: Sequence[Event]) -> list[float]:
    """When the first kernel of each step began."""
    begins = [step.begin for step in steps]
    found: list[float | None] = [None] * len(steps)
    for kernel in trace.kernels:  # in order of their beginning
        index = -1 if kernel.launched is None else bisect_right(begins, kernel.launched) - 1
        if index >= 0 and found[index] is None and kernel_kind(kernel.name) != COPY:
            found[index] = kernel.begin
    if any(bound is None for bound in found):
        raise NothingRecorded("a step launched no kernel")
    return sorted(bound for bound in found if bound is not None)


def _kernels(trace: Trace) -> Iterator[Piece]:
    """What ran on the GPU. A kernel belongs to the range in which the host launched it."""
    whole = [(union(trace.ranges(name)), kind) for name, kind in WHOLE.items()]
    for kernel in trace.kernels:
        kind = kernel_kind(kernel.name)
        if kind not in (COMMUNICATION, COPY) and kernel.launched is not None:
            kind = next((of for intervals, of in whole if _contains(intervals, kernel.launched)), kind)
        yield Piece(kernel.begin, kernel.end, ELEMENTWISE if kind == DATA else kind, kernel.name)


def _contains(intervals: Sequence[Interval], at: float) -> bool:
    index = bisect_right(intervals, (at, float("inf"))) - 1
    return index >= 0 and at < intervals[index][1]


def _operators(events: Sequence[Event]) -> Iterator[Piece]:
    """The operators of one thread, each without those that it called. What only wraps others is left out."""
    stack: list[tuple[Event, str | None]] = []
    opened: set[int] = set()
    at = float("-inf")

    def until(time: float) -> Iterator[Piece]:
        nonlocal at
        if stack and time > at and (kind := stack[-1][1]) is not None:
            event = stack[-1][0]
            yield Piece(at, time, kind, event.name, id(event) not in opened)
            opened.add(id(event))
        at = max(at, time)

    for event in events:
        while stack and stack[-1][0].end <= event.begin:
            yield from until(stack[-1][0].end)
            stack.pop()
        yield from until(event.begin)
        outer = stack[-1][1] if stack else None
        kind = outer if outer in INHERITED else WHOLE.get(event.name) or operator_kind(event.name)
        stack.append((event, kind))
    while stack:
        yield from until(stack[-1][0].end)
        stack.pop()
