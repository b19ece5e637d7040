"""Shared by the tests of translated configs: write files, translate them, and look at our keys."""

import json
from pathlib import Path
from typing import Any

import yaml

from shoal import api
from shoal.config.load import load_config
from shoal.convert.configs.draft import nested_leaves
from shoal.convert.configs.translation import Translation


def translated(folder: Path, *contents: Any, command: str = "") -> Translation:
    """Translate each content as a file of `folder`: JSON for a dict, a script or YAML for text."""
    files = []
    for index, content in enumerate(contents):
        suffix = ".json" if isinstance(content, dict) else ".sh" if content.lstrip().startswith("#!") else ".yaml"
        file = folder / f"given{index}{suffix}"
        file.write_text(json.dumps(content) if isinstance(content, dict) else content)
        files.append(file)
    found = api.import_config(files, command, folder / "run.yaml", overwrite=True)
    # The written file is valid, and holds what was returned.
    assert yaml.safe_load((folder / "run.yaml").read_text()) is not None
    load_config(folder / "run.yaml", needs_model=False)
    return found


def ours(found: Translation) -> dict[str, Any]:
    """Our keys, dotted, with their values."""
    return dict(nested_leaves(found.config))


def holds(found: Translation, **expected: Any) -> None:
    """Our config has these values; __ is the dot."""
    wanted = {key.replace("__", ".").rstrip("_"): value for key, value in expected.items()}
    values = ours(found)
    assert {key: values.get(key, "(not there)") for key in wanted} == wanted


def keys_of(found: Translation, outcome: str) -> set[str]:
    return {line.key for line in found.lines if line.outcome == outcome and not line.default}
