"""What happened in a run, what it left, and how to repeat it."""

import shlex
from collections.abc import Iterable, Sequence

from shoal.observe import figures
from shoal.observe.html import Html, join, section, table, tag
from shoal.observe.run_reader import RunRecord, Values, number

MOST_EVENTS = 200
MOST_SAMPLES = 60
SHOWN_EVENTS = ("start", "warning", "fault", "restart", "stop", "end")
UNSUCCESSFUL = ("fault", "warning", "restart")


def timeline(run: RunRecord) -> Html:
    """Starts, restarts, faults and warnings with their times, and saves that failed."""
    wanted = [
        one for one in run.events if one["event"] in SHOWN_EVENTS or (one["event"] == "save" and one.get("ok") is False)
    ]
    if not wanted:
        return Html("")
    rows = []
    for event in wanted[-MOST_EVENTS:]:
        kind = str(event["event"])
        rows.append(
            (
                figures.moment(number(event.get("time"))),
                tag("span", kind, class_="kind bad" if kind in UNSUCCESSFUL or event.get("error") else "kind"),
                figures.count(number(event.get("step"))),
                _what_happened(event),
            )
        )
    left_out = len(wanted) - len(rows)
    return section(
        "events",
        "Starts, restarts and faults",
        tag("p", f"The last {MOST_EVENTS} of {len(wanted)} events.", class_="faint") if left_out else None,
        table(("time", "event", "step", "what happened"), rows, numbers=False, label="Events"),
    )


def _what_happened(event: Values) -> str:
    if event["event"] == "start":
        parts = [
            figures.counted(event["world_size"], "rank") if number(event.get("world_size")) else None,
            f"on {event['host']}" if event.get("host") else None,
            f"from step {event['from_step']}" if number(event.get("from_step")) else None,
        ]
        return " ".join(part for part in parts if part)
    if event["event"] == "end":
        after = number(event.get("seconds"))
        return str(event.get("error") or "") or (f"after {figures.seconds(after)}" if after else "")
    return str(event.get("text") or event.get("reason") or event.get("error") or "")


def checkpoints(run: RunRecord) -> Html:
    """The complete checkpoints."""
    if not run.checkpoints:
        return Html("")
    names = list(dict.fromkeys(name for one in run.checkpoints for name in one.metrics))
    waited = {number(one.get("step")): number(one.get("seconds")) for one in run.events if one["event"] == "save"}
    rows = [
        (
            [figures.count(one.step), tag("span", "latest", class_="badge") if one.latest else None],
            figures.moment(one.saved),
            figures.size(one.size),
            figures.seconds(waited.get(one.step)),
            *(figures.decimal(one.metrics.get(name)) for name in names),
        )
        for one in run.checkpoints
    ]
    head = ("step", "saved", "size", "took", *(name.replace("_", " ") for name in names))
    return section("checkpoints", "Checkpoints", table(head, rows, label="Checkpoints"))


def samples(run: RunRecord) -> Html:
    """Texts that the model wrote at evaluations: for each prompt the newest first."""
    found: dict[str, list[Values]] = {}
    for event in run.events:
        if event["event"] == "sample" and isinstance(event.get("text"), str):
            found.setdefault(str(event.get("prompt", "")), []).append(event)
    each = max(1, MOST_SAMPLES // max(1, len(found)))
    return section(
        "samples",
        "Generated samples",
        [_sample(index, *one) for index, one in enumerate((prompt, texts[-each:]) for prompt, texts in found.items())],
    )


def _sample(index: int, prompt: str, texts: Sequence[Values]) -> Html:
    newest, *older = reversed(texts)

    def written(event: Values) -> Html:
        step = figures.count(number(event.get("step")))
        return tag("p", tag("small", f"step {step}"), tag("q", tag("b", prompt), str(event["text"])), class_="sample")

    return join(
        [
            written(newest),
            tag(
                "details",
                tag("summary", f"{len(older)} earlier"),
                [written(one) for one in older],
                id=f"samples-{index}",
            )
            if older
            else None,
        ]
    )


def repeat(run: RunRecord) -> Html:
    """The commands that repeat the run, and its config."""
    started = next(
        (
            one
            for one in run.events
            if one["event"] == "start" and one.get("command") and isinstance(one["command"], list)
        ),
        None,
    )
    again = shlex.join(["shoal", "train", str(run.path / "config.yaml"), f"name={run.name}-again"])
    return section(
        "repeat",
        "Repeat it",
        [tag("p", "It was started with"), copyable(_command(started["command"]))] if started else None,
        None  # the script starts it
        if run.custom
        else [tag("p", "The run's own config has every default and override of that time:"), copyable(again)],
        tag("details", tag("summary", "config.yaml"), copyable(run.config_text), id="config")
        if run.config_text
        else None,
    )


def _command(words: Iterable[object]) -> str:
    return shlex.join(str(word) for word in words)


def copyable(text: str) -> Html:
    """Text with a button that copies it."""
    return tag(
        "div",
        tag("pre", tag("code", text), tabindex="0"),
        tag("button", "Copy", type="button", class_="copy"),
        class_="copyable",
    )
