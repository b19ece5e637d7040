"""Pages with few figures."""

from benchmarks.figures.results import Line, legal, percent, result


def numbers() -> list[Line]:
    found = result("benchmarks/adamw8bit/drift.json")
    lines: list[Line] = []
    for betas in ("(0.9, 0.95)", "(0.9, 0.999)"):
        for name, one in found[f"betas {betas}"].items():
            loss = f"{one['validation_loss']:.3f}"
            if name == "AdamW":
                lines.append((f"| {betas} | {name} | | | {{}} |", [loss]))
            else:
                errors = [percent(one["update_error"]), percent(one["weight_error"])]
                lines.append((f"| {betas} | {name} | {{}}% | {{}}% | {{}} |", [*errors, loss]))
    return lines


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
