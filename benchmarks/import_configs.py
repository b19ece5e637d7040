"""`shoal import` over every config and script of public repositories: what is translated, and which keys are unknown.

    python -m benchmarks.import_configs benchmarks/imported/repositories.json owner/name@COMMIT=FOLDER …

FOLDER is a checkout of that commit. Nothing in it is run, and nothing is written beside its files. A file that is a
config of none of the systems is refused with a sentence; a traceback is a crash. Hidden files, as of CI, are left out.
"""

import json
import os
import sys
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from shoal.convert.configs.draft import NOT_CARRIED
from shoal.convert.configs.recognise import SCRIPTS, SUFFIXES
from shoal.convert.configs.translation import translate_configs
from shoal.files import write_atomically
from shoal.mistakes import UserMistake

UNKNOWN = "that shoal knows"  # in the line of a key that has no rule
SHOWN = 12  # most frequent unknown keys


def import_all(folder: Path) -> dict[str, Any]:
    """The counts of a folder; paths in configs are relative to it."""
    os.chdir(folder)
    counts: Counter[str] = Counter()
    systems: Counter[str] = Counter()
    unknown: Counter[str] = Counter()
    crashed: list[str] = []
    for file in sorted(one for one in Path().rglob("*") if _counts(one)):
        counts["files"] += 1
        try:
            found = translate_configs([file])
        except UserMistake:
            counts["refused"] += 1
        except Exception as error:
            crashed.append(f"{file}: {type(error).__name__}")
        else:
            counts["translated"] += 1  # which means that the config it became is valid
            counts["lack_nothing"] += not found.missing
            counts["every_key_understood"] += not _unknown(found)
            systems.update({one.partition(": ")[2] for one in found.systems})
            unknown.update(_unknown(found))
    return {
        **{name: counts[name] for name in ("files", "translated", "lack_nothing", "every_key_understood", "refused")},
        "crashed": crashed,
        "systems": dict(systems.most_common()),
        "unknown_keys": len(unknown),
        "most_frequent": dict(unknown.most_common(SHOWN)),
    }


def _counts(path: Path) -> bool:
    hidden = any(part.startswith(".") for part in path.parts)
    return path.suffix in (*SUFFIXES, *SCRIPTS) and not hidden and path.is_file()


def _unknown(found: Any) -> set[str]:
    return {line.key for line in found.of(NOT_CARRIED) if not line.default and UNKNOWN in line.says}


def table(written: dict[str, Any]) -> str:
    """The counts as Markdown, for docs/coming-from.md."""
    head = "| repository | commit | files | translated | all keys understood | refused | crashed |"
    rows = [
        f"| {one['repository']} | `{one['commit']}` | {one['files']} | {one['translated']} | "
        f"{one['every_key_understood']} | {one['refused']} | {len(one['crashed'])} |"
        for one in written["repositories"]
    ]
    return "\n".join([head, "| --- | --- | ---: | ---: | ---: | ---: | ---: |", *rows, ""])


def main() -> None:
    result, *checkouts = sys.argv[1:]
    output = Path(result).resolve()
    found = []
    for one in checkouts:
        name, _, folder = one.partition("=")
        repository, _, commit = name.partition("@")
        found.append({"repository": repository, "commit": commit, **import_all(Path(folder).resolve())})
        print(json.dumps(found[-1]), flush=True)
    written = {"date": datetime.now(UTC).date().isoformat(), "repositories": found}
    write_atomically(output, json.dumps(written, indent=1) + "\n")
    print(table(written))


if __name__ == "__main__":
    main()
