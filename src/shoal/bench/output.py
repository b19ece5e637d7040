"""The one format of all benches, and the files that they write: see docs/bench.md."""

import datetime
import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.files import write_atomically
from shoal.mistakes import UserMistake


def envelope(
    bench: str,
    *,
    machine: Mapping[str, Any],
    config: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    caveats: Sequence[str] = (),
    **more: Any,
) -> dict[str, Any]:
    """What `--json` prints: the same keys for every bench, and then `more` of its own."""
    return {
        "bench": bench,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": dict(machine),
        "config": dict(config),
        "rows": [dict(row) for row in rows],
        "caveats": list(caveats),
        **more,
    }


def make_folder(folder: Path) -> None:
    """Create the folder of `--output`: before measuring, so that a mistake is found then."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserMistake(f"--output {folder}: the folder cannot be created: {error.strerror}.") from None


def write_report(found: Mapping[str, Any], folder: Path, plot: Callable[[], bytes]) -> list[str]:
    """Write NAME.json and NAME.png, by the name of the bench; returns notes about them."""
    name = found["bench"]
    write_atomically(folder / f"{name}.json", json.dumps(found, indent=2) + "\n")
    if importlib.util.find_spec("matplotlib") is None:
        return [f"{name}.png was not written: plots need matplotlib; pip install 'shoal[plot]'."]
    write_atomically(folder / f"{name}.png", plot())
    return []
