"""The sections of a run's report. What comes from files is escaped by `tag`."""

from typing import Any

from shoal.observe import figures
from shoal.observe.html import Html, bar, join, legend, section, table, tag
from shoal.observe.report_history import checkpoints, repeat, samples, timeline
from shoal.observe.report_setup import devices, model_name, setup
from shoal.observe.results import Results, results_of
from shoal.observe.run_reader import RunRecord, look_up, number

MOST_KERNELS = 10


def run_sections(run: RunRecord) -> list[Html]:
    """All sections in their order; an empty string for one that has nothing to show. `charts` marks their place."""
    results = results_of(run)
    return [
        headline(run, results),
        tiles(run, results),
        problems(run),
        CHARTS,
        setup(run),
        forecast(run),
        time_split(run, results),
        profile(run),
        timeline(run),
        checkpoints(run),
        samples(run),
        repeat(run),
    ]


# Filled by pages/charts.js.
CHARTS = tag(
    "section",
    tag("h2", "Curves", class_="hidden"),
    tag("div", id="toolbar", class_="toolbar"),
    tag("div", id="charts", class_="charts"),
    tag("noscript", tag("p", "The curves are drawn by a script of this page, which is switched off.")),
    id="curves",
    aria_label="Curves",
)


def badge(state: str) -> Html:
    return tag("span", state, class_=f"badge state-{state}" if state.isalpha() else "badge")


def headline(run: RunRecord, results: Results) -> Html:
    """The run's name, how it is, and how far."""
    what = [
        model_name(run),
        f"{figures.compact(count)} parameters" if (count := number(run.plan.get("parameters"))) else None,
        devices(run),
    ]
    steps = f"step {figures.count(run.step or 0)} of {figures.count(run.steps)}" if run.steps else None
    left = f"about {figures.seconds(results.seconds_left)} left" if results.seconds_left else None
    return tag(
        "header",
        tag("div", tag("h1", run.name), badge(run.state), class_="title"),
        tag("p", join([one for one in what if one], " · "), class_="subtitle"),
        tag("p", run.detail, class_="problem") if run.detail else None,
        steps_bar(run),
        tag(
            "p", join([one for one in (steps, left, f"as of {figures.moment(run.read)}") if one], " · "), class_="faint"
        ),
        id="headline",
        data_live=True,
    )


def steps_bar(run: RunRecord) -> Html | None:
    """How many of its steps the run has done."""
    if not run.steps:
        return None
    return tag("progress", max=run.steps, value=min(run.step or 0, run.steps), aria_label="steps")


def tiles(run: RunRecord, results: Results) -> Html:
    """The figures that one looks for first."""
    best = None
    if results.best_eval_loss is not None and results.best_step is not None:
        best = f"best {figures.decimal(results.best_eval_loss)} at step {figures.count(results.best_step)}"
    shown: list[tuple[str, str, str | None]] = [
        (
            "Loss",
            loss_text(run, results),
            f"{figures.count(results.skipped)} steps skipped" if results.skipped else None,
        ),
        ("Evaluation loss", figures.decimal(results.eval_loss), best),
        ("Tokens/s", figures.count(results.tokens_per_second), f"{figures.compact(results.tokens)} tokens so far"),
        ("Samples/s", figures.count(results.samples_per_second), f"{figures.compact(results.samples)} samples so far"),
        ("MFU", figures.percent(results.mfu), None),
        ("Peak memory", figures.gib(results.memory_gib), _of_total(run)),
        (
            "Time",
            figures.seconds(results.seconds),
            figures.counted(results.restarts, "restart") if results.restarts else None,
        ),
    ]
    return tag(
        "section",
        [
            tag("div", tag("h3", name), tag("p", value), tag("small", note) if note else None, class_="tile")
            for name, value, note in shown
            if value != figures.NONE
        ],
        id="figures",
        class_="tiles",
        data_live=True,
        aria_label="Figures",
    )


def loss_text(run: RunRecord, results: Results) -> str:
    """The loss of the last line, which is null where it is not finite."""
    return "non-finite" if results.loss is None and run.training else figures.decimal(results.loss)


def _of_total(run: RunRecord) -> str | None:
    total = number(run.training[-1].get("memory_total_gib")) if run.training else None
    return None if total is None else f"of {figures.gib(total)}"


def problems(run: RunRecord) -> Html:
    """Files that could not be read."""
    return section(
        "problems", "Could not be read", tag("ul", [tag("li", one) for one in run.problems]) if run.problems else None
    )


def forecast(run: RunRecord) -> Html:
    """Memory and speed as `shoal plan` forecasts them, beside what the first steps measured."""
    expected, measured = run.planned("forecast"), run.planned("measured")
    if not isinstance(expected, dict):
        return Html("")
    shown = (
        ("Memory allocated", ("memory", "allocated_gib"), figures.gib),
        ("Memory reserved", ("memory", "reserved_gib"), figures.gib),
        ("Tokens/s per device", ("speed", "tokens_per_second_per_gpu"), figures.count),
        ("Time per step", ("speed", "step_seconds"), figures.seconds),
        ("MFU", ("speed", "mfu"), figures.percent),
    )
    rows = []
    for name, keys, form in shown:
        before, after = number(look_up(expected, *keys)), number(look_up(measured, *keys))
        off = f"{after / before - 1:+.1%}" if before and after is not None else figures.NONE
        rows.append((name, form(before), form(after), off))
    steps = look_up(measured, "steps")
    note = "Nothing is measured before a few steps have warmed up."
    if isinstance(steps, list) and len(steps) == 2:
        note = f"Measured in steps {steps[0]} to {steps[1]}."
    if run.planned("machine", "device") == "cpu":
        note += " A CPU's speed is not forecast well, and its memory is that of the process."
    return section(
        "forecast",
        "Forecast and measurement",
        table(("per device", "forecast", "measured", "difference"), rows, label="Forecast and measurement"),
        tag("p", note, class_="faint"),
        memory_bar(look_up(expected, "memory", "terms"), None),
    )


def memory_bar(terms: Any, device_gib: float | None) -> Html:
    """The terms of the memory forecast as a bar, of the device's memory if that is known."""
    parts = (
        [(str(name), total) for name, value in terms.items() if (total := _sum(value)) > 0]
        if isinstance(terms, dict)
        else []
    )
    whole = sum(amount for _, amount in parts)
    if not whole:
        return Html("")
    small = whole < 0.1
    shown = [(name, f"{amount * 1024:.1f} MiB" if small else figures.gib(amount)) for name, amount in parts]
    return join(
        [
            tag("h3", "Memory forecast at its peak"),
            bar(parts, total=max(whole, device_gib or 0.0), label="Memory forecast by term"),
            legend(shown),
        ]
    )


def _sum(term: Any) -> float:
    if isinstance(term, dict):
        return sum(_sum(part) for part in term.values())
    return number(term) or 0.0


def time_split(run: RunRecord, results: Results) -> Html:
    """Where the time of the mean step went."""
    whole = sum(results.waits.values())
    if not whole:
        return Html("")
    parts = list(results.waits.items())
    shown = [(name, f"{figures.seconds(amount)}, {figures.percent(amount / whole)}") for name, amount in parts]
    return section("time", "Time per step", bar(parts, total=whole, label="Time of a step"), legend(shown))


def profile(run: RunRecord) -> Html:
    """What `shoal train --profile` found: the bottleneck, where the step went beside the forecast, the top kernels."""
    found = run.profile
    terms, expected = look_up(found, "terms"), look_up(found, "forecast", "terms")
    parts = _positive(terms)
    whole = sum(value for _, value in parts)
    if not whole:
        return Html("")
    sentence = look_up(found, "bottleneck", "sentence")
    rows = [
        (
            name.replace("_", " "),
            figures.seconds(value),
            figures.percent(value / whole),
            figures.seconds(number(look_up(expected, name))),
        )
        for name, value in parts
    ]
    kernels = look_up(found, "kernels")
    top = [
        (
            tag("code", str(look_up(one, "name"))),
            figures.seconds(number(look_up(one, "seconds"))),
            figures.percent(number(look_up(one, "share"))),
            figures.count(number(look_up(one, "calls"))),
        )
        for one in (kernels[:MOST_KERNELS] if isinstance(kernels, list) else [])
    ]
    return section(
        "profile",
        "Profile",
        tag("p", str(sentence)) if sentence else None,
        bar(parts, total=whole, label="Profiled time of a step"),
        table(("term", "measured", "share", "forecast"), rows, label="Profiled terms"),
        tag(
            "details", tag("summary", "Top kernels"), table(("kernel", "per step", "share", "calls"), top), id="kernels"
        )
        if top
        else None,
    )


def _positive(terms: Any) -> list[tuple[str, float]]:
    if not isinstance(terms, dict):
        return []
    return [(str(name), value) for name, one in terms.items() if (value := number(one)) is not None and value > 0]
