"""The result of a profile: RUN/profile/summary.json, and its text. Other programs read it, without torch."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.observe.profile.classify import COMMUNICATION, TERMS
from shoal.observe.profile.memory import memory_timeline
from shoal.observe.profile.ranges import STEP
from shoal.observe.profile.split import Split
from shoal.observe.profile.trace import Trace

FOLDER, SUMMARY = "profile", "summary.json"
TOP = 15  # kernels
HIDDEN = "hidden communication"
# What the rank's share of the summary is made of, in the order in which ranks share it.
SHARED = (*TERMS, HIDDEN)
NAMES = {COMMUNICATION: "communication, exposed"}


def summarize_rank(trace: Trace, found: Split) -> dict[str, Any]:
    """What one rank's trace says: seconds are per step."""
    steps = found.steps
    kernels = [one for one in found.work if not one.name.startswith(STEP.partition(".")[0] + ".")]
    return {
        "device": "gpu" if trace.on_device else "cpu",
        "steps": steps,
        "step_seconds": round(found.seconds / steps, 9),
        "terms": {term: round(seconds / steps, 9) for term, seconds in found.terms.items()},
        "hidden_communication_seconds": round(found.hidden / steps, 9),
        "kernels": [
            {
                "name": one.name,
                "term": one.kind,
                "seconds": round(one.seconds / steps, 9),
                "share": round(one.seconds / found.seconds, 4),
                "calls": round(one.calls / steps, 2),
            }
            for one in kernels[:TOP]
        ],
        "memory": memory_timeline(trace, found.window),
    }


def shared_values(summary: Mapping[str, Any]) -> list[float]:
    """What a rank shares of its summary."""
    return [*(summary["terms"][term] for term in TERMS), summary["hidden_communication_seconds"]]


def of_ranks(values: Sequence[Sequence[float]]) -> list[dict[str, Any]]:
    """The entry `ranks` of the summary, from what every rank has shared."""
    return [{"rank": rank, "terms": dict(zip(SHARED, one, strict=True))} for rank, one in enumerate(values)]


def read_profile(run: Path) -> dict[str, Any] | None:
    """The summary of a run's profile; None if there is none."""
    try:
        found = json.loads((run / FOLDER / SUMMARY).read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def profile_text(summary: Mapping[str, Any]) -> str:
    """The summary for people."""
    step = summary["step_seconds"]
    first, last = summary["profiled"]
    where = f"on rank 0 of {summary['world_size']}" if summary["world_size"] > 1 else "on one device"
    lines = [f"profile     steps {first} to {last} {where}: {step * 1e3:,.2f} ms per step", ""]
    forecast = summary.get("forecast") or {}
    expected = forecast.get("terms", {})
    lines.append(f"{'':28} {'measured':>12} {'':>6} {'forecast':>12} {'':>6}")
    for term, seconds in summary["terms"].items():
        ahead = expected.get(term)
        if seconds or ahead:
            lines.append(_row(NAMES.get(term, term), seconds, step, ahead, forecast.get("step_seconds")))
    lines.append(_row("step", step, step, forecast.get("step_seconds"), forecast.get("step_seconds")))
    if summary["hidden_communication_seconds"]:
        lines.append(_row("communication, hidden", summary["hidden_communication_seconds"], step, None, None))
    lines += [f"note: {note}" for note in summary["notes"]]
    lines += ["", f"{'kernel' if summary['device'] == 'gpu' else 'operator':52} {'ms':>9} {'':>6} {'calls':>7}  term"]
    for one in summary["kernels"][:8]:
        name = one["name"] if len(one["name"]) <= 52 else one["name"][:51] + "…"
        lines.append(f"{name:52} {one['seconds'] * 1e3:9,.3f} {one['share']:6.1%} {one['calls']:7g}  {one['term']}")
    if (memory := summary["memory"]) is not None:
        unit, scale = ("GiB", 1) if memory["peak_gib"] >= 0.1 else ("MiB", 1024)
        low, high = (memory[name] * scale for name in ("lowest_gib", "peak_gib"))
        lines += ["", f"memory      {low:.3f} to {high:.3f} {unit} ({memory['of']})"]
    lines += ["", f"bottleneck  {summary['bottleneck']['sentence']}"]
    return "\n".join([*lines, f"files       {summary['folder']}"])


def _row(name: str, seconds: float, step: float, ahead: float | None, whole: float | None) -> str:
    text = f"{name:28} {seconds * 1e3:9,.2f} ms {seconds / step:6.1%}"
    if ahead is None:
        return text
    share = f" {ahead / whole:6.1%}" if whole else ""
    return f"{text} {ahead * 1e3:9,.2f} ms{share}"
