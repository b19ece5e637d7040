"""The planner's page: the controls, and the forecast of `shoal plan` for what they say."""

from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlencode

from shoal import api
from shoal.config.locate import write_yaml
from shoal.mistakes import UserMistake
from shoal.observe import figures
from shoal.observe.html import Html, bar, legend, section, table, tag
from shoal.observe.report_history import copyable
from shoal.ui.controls import CONTROLS, Answers, config_of, read_answers

COMMENT = "# shoal plan FILE forecasts it; add data.source and data.path, and shoal train FILE trains it.\n"


def planned(given: Mapping[str, str]) -> list[Html]:
    """The sections of the forecast; a mistake in the controls is one of them."""
    try:
        answers = read_answers(given)
        yaml = COMMENT + write_yaml(config_of(answers))
        overrides = [f"{key}={value}" for key, value in answers.items() if value]
        plan = api.plan(api.load_config(None, overrides, planned=True)).as_dict()
    except UserMistake as mistake:
        words = str(mistake).replace("override ", "")
        return [section("verdict", "This cannot be planned", tag("p", words, class_="problem", role="alert"))]
    return [
        _verdict(plan),
        _tiles(plan),
        _memory(plan["memory"]),
        _time(plan["speed"]),
        _changes(plan, answers),
        _strategies(plan, answers),
        section("yaml", "As a config file", copyable(yaml)),
    ]


def _verdict(plan: dict[str, Any]) -> Html:
    chosen, hardware = plan["chosen"], plan["hardware"]
    nodes = f"{hardware['nodes']} nodes of " if hardware["nodes"] > 1 else ""
    title = "It fits" if plan["fits"] else "It does not fit"
    where = f"{chosen['name']} on {nodes}{hardware['devices']} × {hardware['gpu']}"
    steps = figures.counted(chosen["grad_accum_steps"], "gradient accumulation step")
    return tag(
        "section",
        tag("h2", title, class_="good" if plan["fits"] else "bad"),
        tag("p", f"{where}: {chosen['reason']}."),
        tag(
            "p",
            f"Micro-batch {chosen['micro_batch']}, {steps}, recompute {chosen['recompute']}, {chosen['precision']}.",
            class_="faint",
        ),
        [tag("p", note, class_="faint") for note in plan["notes"]],
        id="verdict",
        class_="card verdict",
        data_live=True,
        aria_live="polite",
    )


def _tiles(plan: dict[str, Any]) -> Html:
    memory, speed, limits = plan["memory"], plan["speed"], plan["limits"]
    longest, cost = limits["longest_sequence"], speed["cost"]
    hours = f"{figures.count(speed['gpu_hours'])} GPU hours{f', costs {figures.count(cost)}' if cost else ''}"
    shown = [
        ("Memory", figures.gib(memory["reserved_gib"]), f"of {figures.gib(memory['device_gib'])}", "memory"),
        ("Tokens/s per GPU", figures.count(speed["tokens_per_second_per_gpu"]),
         f"{figures.compact(speed['tokens_per_second'])} in total", "speed"),
        ("MFU", figures.percent(speed["mfu"]), None, "mfu"),
        ("Time per step", figures.seconds(speed["step_seconds"]), None, "step"),
        ("Time to finish", figures.seconds(speed["seconds_to_finish"]), hours, "finish"),
        ("Micro-batch up to", figures.count(limits["largest_micro_batch"]),
         f"sequence up to {figures.count(longest)}" if longest else None, "limits"),
    ]  # fmt: skip
    return tag(
        "section",
        [
            tag(
                "div",
                tag("h3", name),
                tag("p", value),
                tag("small", note) if note else None,
                class_="tile",
                data_figure=figure,
            )
            for name, value, note, figure in shown
            if value != figures.NONE
        ],
        id="figures",
        class_="tiles",
        data_live=True,
        aria_label="Figures",
    )


def _memory(memory: dict[str, Any]) -> Html:
    """The bar of the device's memory: the terms at the peak, what the allocator adds, and the CUDA context."""
    parts = [(name, _sum(term)) for name, term in memory["terms"].items()]
    parts.append(("allocator overhead", max(0.0, memory["reserved_gib"] - memory["allocated_gib"])))
    parts.append(("CUDA context", memory["context_gib"]))
    device = memory["device_gib"]
    used = sum(amount for _, amount in parts)
    rest = f"Free: {figures.gib(device - used)}."
    if used > device:
        rest = f"Too much by {figures.gib(used - device)}: the line is the GPU's memory."
    return section(
        "memory",
        "Memory per GPU",
        bar(parts, total=max(device, used), limit=device, label=f"{figures.gib(used)} of {figures.gib(device)}"),
        legend([(name, figures.gib(amount)) for name, amount in parts]),
        tag("p", f"{rest} The peak is at: {memory['peak']}.", class_="faint below"),
    )


def _time(speed: dict[str, Any]) -> Html:
    parts = sorted(((name, _sum(term)) for name, term in speed["terms"].items()), key=lambda part: -part[1])
    whole = sum(amount for _, amount in parts)
    return (
        section(
            "time",
            "Time of a step",
            bar(parts, total=whole, label="Time of a step by term"),
            legend(
                [(name, f"{figures.seconds(amount)}, {figures.percent(amount / whole, 0)}") for name, amount in parts]
            ),
        )
        if whole
        else Html("")
    )


def _changes(plan: dict[str, Any], answers: Answers) -> Html:
    """What would make it fit."""
    if plan["fits"] or not plan["changes"]:
        return Html("")
    rows = [
        (
            _setting(change["set"], answers),
            figures.gib(change["reserved_gib"]),
            "yes" if change["fits"] else "no",
            f"{change['slower']:+.0%} time per token",
        )
        for change in plan["changes"]
    ]
    return section(
        "changes", "What saves memory", table(("change", "reserved", "fits", "costs"), rows, label="Changes")
    )


def _strategies(plan: dict[str, Any], answers: Answers) -> Html:
    rows = [
        (
            [
                _with_strategy(one, answers),
                tag("span", "chosen", class_="badge") if one["name"] == plan["chosen"]["name"] else None,
            ],
            "yes" if one["fits"] else "no",
            figures.gib(one["reserved_gib"]),
            figures.count(one["tokens_per_second_per_gpu"]),
            figures.percent(one["mfu"]),
            str(one["micro_batch"]),
            one["recompute"],
        )
        for one in plan["alternatives"]
    ]
    if len(rows) < 2:
        return Html("")
    head = ("strategy", "fits", "reserved", "tokens/s per GPU", "MFU", "micro-batch", "recompute")
    return section("strategies", "Other strategies on the same GPUs", table(head, rows, label="Strategies"))


def _with_strategy(one: dict[str, Any], answers: Answers) -> Html | str:
    """A link that sets the controls to this strategy, unless no control can."""
    mesh, sharding = one["mesh"], one["sharding"]
    if sharding not in ("full_shard", None):
        return str(one["name"])
    changed = {
        "parallel.strategy": one["strategy"],
        **{f"parallel.{axis}": str(mesh[axis]) for axis in ("tp", "pp", "cp")},
    }
    return _link(one["name"], {**answers, **changed})


def _setting(settings: Iterable[str], answers: Answers) -> Html:
    text = " ".join(settings)
    pairs = dict(setting.split("=", 1) for setting in settings)
    known = {control.key: control for control in CONTROLS}
    try:
        read = {key: known[key].read(value) for key, value in pairs.items()}
    except (KeyError, UserMistake):
        return tag("code", text)
    return _link(text, {**answers, **read})


def _link(text: str, answers: Answers) -> Html:
    defaults = {control.key: control.default for control in CONTROLS}
    return tag(
        "a", text, href="/plan?" + urlencode({key: value for key, value in answers.items() if value != defaults[key]})
    )


def form(given: Mapping[str, str]) -> Html:
    """The controls, with the values that the address gives."""
    values = {one.key: given.get(one.key, one.default) for one in CONTROLS}
    return tag(
        "form",
        [one.html(values[one.key]) for one in CONTROLS if not one.more],
        tag(
            "details",
            tag("summary", "More"),
            tag("div", [one.html(values[one.key]) for one in CONTROLS if one.more], class_="controls"),
            open=any(one.more and values[one.key] != one.default for one in CONTROLS),
        ),
        tag("noscript", tag("button", "Plan", type="submit")),
        id="planner",
        method="get",
        action="/plan",
        class_="card controls",
        aria_label="What to plan",
    )


def _sum(term: Any) -> float:
    return sum(_sum(part) for part in term.values()) if isinstance(term, dict) else float(term)
