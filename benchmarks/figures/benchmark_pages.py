"""The README files of benchmarks/gpu and benchmarks/data."""

import statistics
from itertools import pairwise
from typing import Any

from benchmarks.figures.recipes import RANKS
from benchmarks.figures.results import SPEED, Line, case, json_lines, percent, result
from benchmarks.gpu.sweeps.forecast import Compared, compare, outside
from benchmarks.pictures.forecast import gib as in_gib
from benchmarks.pictures.forecast import plan_file

PACKED = "2026-11-17T23"  # when projections that read the same tensor had become one matmul
KINDS, CORRECTED = "2026-11-18T05", "2026-11-18T06"  # runs of other kinds, and those after the forecast was corrected


def gpu() -> list[Line]:
    return [*compared_with_the_hand_written_loop(), *optimizer_and_head(), *ranks(), *exposed(), *sweep()]


def compared_with_the_hand_written_loop() -> list[Line]:
    def times(folder: str) -> list[str]:
        hand = case(folder, "1b-hand-4")["tokens_per_second"]
        return [f"{case(folder, name)['tokens_per_second'] / hand:.3f}" for name in ("1b-ours-4", "1b-ours-fp8-8")]

    words = "shoal has {} and, in fp8 at micro-batch 8, {} times the tokens per second of the hand-written loop at"
    return [
        (f"{words} micro-batch 4. Before: {{}} and {{}}, on another", times("rework_h200/speed") + times(SPEED)),
        (
            f"{words} micro-batch 4 (`rework_h200`: {{}} and {{}})",
            times("fp8_head_h200/speed") + times("rework_h200/speed"),
        ),
    ]


def optimizer_and_head() -> list[Line]:
    cases = {one["case"]: one for one in json_lines("benchmarks/gpu/small_h200/optimizer.jsonl") if "case" in one}
    low = cases["AdamW like torch's fused one: bf16"]
    head = {(one["shape"], one["loss_tokens"]): one for one in result("benchmarks/gpu/head_h200/head.json")["losses"]}
    whole, third = head["gpt2", 1.0], head["gpt2", 0.3]
    losses = (whole["unpadded"], whole["padded"], third["padded, skipping"], whole["compiled plain loss"])
    return [
        (
            "and in bf16 {}% of the weights and {}% of the first moments differ by a rounding or more",
            [percent(low[f"{name}, share that differs"]) for name in ("weights", "exp_avg")],
        ),
        (
            "{} → {} ms; with a third of the tokens in the loss {} ms (a compiled plain loss: {})",
            [f"{one['milliseconds']:.1f}" for one in losses],
        ),
    ]


def ranks() -> list[Line]:
    found = result("benchmarks/gpu/ranks_h200/ranks.json")

    def today(name: str) -> float:
        planned = in_gib(plan_file(f"recipes/{name}.yaml").choice.memory.worst.allocated)
        return float(found[name]["rank"]["allocated_gib"] / planned)

    return [
        (
            "Measured / planned at the time: {}, {}, {}, {}, {}; the last two led to the forecast of the forward pass, "
            "with which they are {} and {}",
            [f"{found[name]['ratio']:.3f}" for name in RANKS] + [f"{today(name):.3f}" for name in RANKS[-2:]],
        )
    ]


def exposed() -> list[Line]:
    found = {one["case"]: one for one in json_lines("benchmarks/gpu/exposed_h200/exposed.jsonl") if "case" in one}
    late, ratios = found["fsdp exposed"], [one["step_ratio"] for name, one in found.items() if "fsdp" in name]
    nccl = [one for name, one in found.items() if "nccl" in name]
    return [
        (
            "of FSDP that waits, it says {} ms, the trace {}; a step that is measured takes {} to {} times as long as",
            [f"{1e3 * late[name]:.1f}" for name in ("seconds", "trace")]
            + [f"{one:.3f}" for one in (min(ratios), max(ratios))],
        ),
        (
            "NCCL over one rank: {} to {} ms without the profiler, in traces {} to {}",
            [
                f"{1e3 * choose(one[name] for one in nccl):.2f}"
                for name in ("seconds_without_profiler", "trace")
                for choose in (min, max)
            ],
        ),
    ]


def sweep() -> list[Line]:
    rows = result("benchmarks/gpu/sweep_h200/sweep.json")["rows"]
    recorded = [one for one in compare(rows, recorded=True) if one.held_out]

    def within(some: list[Compared]) -> list[str]:
        return [str(len(some) - len(outside(some))), str(len(some))]

    again = [row for row in rows if PACKED < row["measured_at"] < KINDS and "parallel.offload" not in row["config"]]
    kinds = [row for row in rows if KINDS < row["measured_at"] < CORRECTED]
    later = [row for row in rows if row["measured_at"] > CORRECTED]
    offloaded = next(row for row in rows if row["row"] == "llama3.2-1b 4x4096 bf16-mixed offload-cpu")
    now = offloaded["measured"]["tokens_per_second"]
    before = result("benchmarks/gpu/sweep_h200/offload_cpu.json")["before"]
    then = before["measured"]["tokens_per_second"]
    return [
        ("Memory and speed of {} runs compared with the forecast", [str(len(rows))]),
        (
            "In all, {} of {} rows were measured after the rules of their forecast were set, and {} of their {} "
            "figures were within the bounds",
            [str(len({one.row for one in recorded})), str(len(rows)), *within(recorded)],
        ),
        (
            "Of all rows {} were measured again when projections were packed ({} of those held out",
            [str(len(again)), str(sum(row["held_out"] for row in again))],
        ),
        ("was forecast {} times too fast", [f"{before['forecast']['tokens_per_second'] / then:.1f}"]),
        ("it is {} times as fast ({} → {} tokens/s)", [f"{now / then:.1f}", f"{then:,.0f}", f"{now:,.0f}"]),
        (
            "Of {} runs of such kinds {} of {} figures were within the bounds; of {} that were measured after the "
            "corrections, {} of {}",
            [
                str(len(kinds)),
                *within(compare(kinds, recorded=True)),
                str(len(later)),
                *within(compare(later, recorded=True)),
            ],
        ),
        ("With today's rules {} of {} figures are", within(compare(rows))),
    ]


def _ranges(found: dict[str, list[float]]) -> list[str]:
    """Speed and processor time of `prepare` relative to the bare runs before and after it: median, least and most."""
    figures = []
    for kind, upside_down in (("seconds", False), ("processor_seconds", True)):
        bare, ours = found[f"bare_{kind}"], found[f"prepare_{kind}"]
        around = [(one + other) / 2 for one, other in pairwise(bare)]
        ratios = [one / other for one, other in zip(around, ours, strict=True)]
        if upside_down:
            ratios = [1 / one for one in ratios]
        figures += [statistics.median(ratios), min(ratios), max(ratios)]
    return [f"{one:.2f}" for one in figures]


def data() -> list[Line]:
    """Speed of `prepare` against the bare tokenizers library."""
    now, earlier, eight = (
        result(f"benchmarks/data/tokenize_{name}.json") for name in ("2_cores", "2_cores_earlier", "8_cores")
    )
    kinds = {"instructions": "alpaca", "plain text": "text", "chats": "chat"}

    def ratio(found: dict[str, Any], kind: str) -> list[str]:
        return [f"{found[kind][name]:.2f}" for name in ("speed_of_bare", "processor_time_of_bare")]

    return [
        *(
            (f"| {words} | {{}} | {{}} to {{}} | {{}} | {{}} to {{}} |", _ranges(now[kind]))
            for words, kind in kinds.items()
        ),
        *(
            (f"| {words} | {{}} | {{}} | {{}} | {{}} |", ratio(earlier, kind) + ratio(eight, kind))
            for words, kind in {**kinds, "chats, with their template": "chat"}.items()
            if words != "chats"
        ),
        (
            "a million records of {} MiB takes {} MiB of memory",
            [str(now["memory, bytes"][name]) for name in ("file_mib", "peak_anonymous_mib")],
        ),
        (
            "records of {} MiB as bytes ({} million tokens) need {} MiB",
            [
                str(earlier["memory, bytes"]["file_mib"]),
                f"{earlier['memory, bytes']['tokens'] / 1e6:.0f}",
                str(earlier["memory, bytes"]["peak_anonymous_mib"]),
            ],
        ),
    ]
