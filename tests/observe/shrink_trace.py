"""Reduces a trace of a GPU to what the split needs: `python tests/observe/shrink_trace.py TRACE.json.gz SMALL.json.gz`.

So that a real trace can be committed. Operators of the CPU, shapes and most allocations are left out.
"""

import gzip
import json
import sys
from pathlib import Path
from typing import Any

from shoal.observe.profile.trace import LAUNCHES, ON_DEVICE

EVERY = 20  # of the allocations


def shrink(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    used = {event["args"].get("correlation") for event in events if event.get("cat") in ON_DEVICE}
    found, allocations = [], 0
    for event in events:
        category, arguments = event.get("cat"), event.get("args", {})
        kept = {key: event[key] for key in ("ph", "cat", "name", "ts", "dur", "tid") if key in event}
        if category in ON_DEVICE or (category in LAUNCHES and arguments.get("correlation") in used):
            found.append(kept | {"args": {"correlation": arguments.get("correlation")}})
        elif category == "user_annotation" and event["name"].startswith("shoal."):
            found.append(kept)
        elif event.get("name") == "[memory]" and arguments.get("Device Id", -1) >= 0:
            allocations += 1
            if allocations % EVERY == 0:
                found.append(kept | {"args": {key: arguments[key] for key in ("Total Allocated", "Device Id")}})
    return found


def main(source: Path, target: Path) -> None:
    with gzip.open(source, "rt") as file:
        events = json.load(file)["traceEvents"]
    with gzip.open(target, "wt") as file:
        json.dump({"traceEvents": shrink(events)}, file, separators=(",", ":"))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
