"""Pages with few figures."""

from benchmarks.figures.results import Line, count, legal, percent, result, within


def numbers() -> list[Line]:
    return [*emulation(), *eight_bit_adamw()]


def emulation() -> list[Line]:
    """Matmuls of low precision on a CPU without instructions for them, in multiples of 32-true."""
    found = result("benchmarks/emulation/two_shared_cores.json")
    runs = [rows for name, rows in found.items() if name != "machine"]

    def times(*names: str) -> list[float]:
        return [rows[name]["times_32_true"] for rows in runs for name in names]

    emulated = times("bf16-mixed", "bf16-true", "16-mixed", "bf16-mixed, as measured, capped")
    return [
        (
            "with torch's own loops a step takes up to {} times as long",
            [f"{max(times('bf16-mixed, native, capped')):.1f}"],
        ),
        (
            "Emulation takes {} to {} times as long as `32-true` and saves no time (fp8: up to {} times",
            [f"{min(emulated):.2f}", f"{max(emulated):.2f}", f"{max(times('fp8')):.2f}"],
        ),
    ]


def eight_bit_adamw() -> list[Line]:
    found = result("benchmarks/adamw8bit/drift.json")
    lines: list[Line] = []
    largest: dict[str, float] = {}
    for betas in ("(0.9, 0.95)", "(0.9, 0.999)"):
        for name, one in found[f"betas {betas}"].items():
            loss = f"{one['validation_loss']:.3f}"
            if name == "AdamW":
                lines.append((f"| {betas} | {name} | | | {{}} |", [loss]))
            else:
                largest[name] = max(one["largest_update_per_lr"], largest.get(name, 0.0))
                errors = [percent(one["update_error"]), percent(one["weight_error"])]
                lines.append((f"| {betas} | {name} | {{}}% | {{}}% | {{}} |", [*errors, loss]))
    others = max(one for name, one in largest.items() if name != "torchao")
    words = "torchao's largest update was {} times the learning rate, that of the others at most {} times"
    return [*lines, (words, [f"{largest['torchao']:.0f}", f"{others:.1f}"])]


def first_run() -> list[Line]:
    return [
        (
            "{}% of the moves of an untrained model are legal, {}% of a bigram table of the same "
            "games, and {}% of this",
            legal("untrained", "bigram table", "trained"),
        )
    ]


def python() -> list[Line]:
    found = result("benchmarks/loop/custom_two_shared_cores.json")
    more = found["rest_of_custom_milliseconds"] - found["rest_of_plain_milliseconds"]
    return [
        (
            "it took {} ms more per step: {}% of a step of {} ms",
            [f"{more:.2f}", percent(found["overhead"]), f"{found['step_milliseconds']:.0f}"],
        )
    ]


def packing() -> list[Line]:
    found = sorted(result("benchmarks/gpu/speed_h200/speed.json")["packed_relative_to_padded"].values())
    return [("on one GPU {} to {} times the loss tokens", [f"{one:.1f}" for one in found])]


def parallel() -> list[Line]:
    """Memory of a start with DeepSpeed's ZeRO-3, of the rank that needs most."""

    def peak(name: str, ranks: int) -> str:
        found = result(f"benchmarks/deepspeed/start_{name}_{ranks}_ranks.json")
        return f"{max(found['peak_bytes_per_parameter']):.1f}"

    return [
        ("{} bytes per parameter and rank on 2 ranks", [peak("rows", 2)]),
        ("and {} where every rank has the whole model first", [peak("whole", 2)]),
        ("; {} and {} on 4. With ZeRO 0 to 2", [peak("rows", 4), peak("whole", 4)]),
    ]


def bench() -> list[Line]:
    """Collectives over NCCL: how far the bus bandwidths of the largest size are apart."""
    rows = result("benchmarks/collectives/nccl_two_processes_one_h200/collectives.json")["rows"]
    size = max(row["bytes"] for row in rows)
    largest = {row["operation"]: row for row in rows if row["bytes"] == size}
    bandwidths = [row["bus_bandwidth"] for row in largest.values()]
    halves = [largest[name]["seconds"] / largest["all-reduce"]["seconds"] for name in ("all-gather", "reduce-scatter")]
    return [
        (
            "all-gather and reduce-scatter of {} MiB take {} and {} of the time of the all-reduce, and the three bus "
            "bandwidths are within {}% of each other",
            [str(size >> 20), *(f"{one:.2f}" for one in halves), within(max(bandwidths) / min(bandwidths) - 1)],
        )
    ]


def plan_page() -> list[Line]:
    """Goodput. plan_document.py writes the other figures of that page."""
    runs = {one["devices"]: one["rows"] for one in result("benchmarks/goodput/simulated.json")["runs"]}
    few, most = runs[min(runs)], runs[max(runs)]

    def off(rows: list[dict[str, float]]) -> str:
        return within(max(abs(row["off"]) for row in rows))

    return [
        (
            "with {} interruptions on {} devices within {}%, with {} on {} devices, which scatter by {}%, within {}%",
            [
                *(count(one) for one in (most[0]["interruptions"], max(runs))),
                off(most),
                *(count(one) for one in (few[0]["interruptions"], min(runs))),
                percent(few[0]["expected_scatter"], 0),
                off(few),
            ],
        ),
    ]


def plan_accuracy() -> list[Line]:
    """The time of a trace. plan_document.py and plan_errors.py write the other figures of that page."""
    traced = {name: one["seconds"] for name, one in result("benchmarks/plan/traced.json").items()}
    eight = [seconds for name, seconds in traced.items() if name.startswith("8B")]
    return [
        (
            "8 billion parameters take {} to {} s, 405 billion {} s",
            [f"{one:.0f}" for one in (min(eight), max(eight), traced["405B, fsdp × tp 8, full"])],
        ),
    ]
