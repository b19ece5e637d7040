"""While torch is imported, the garbage collector is paused."""

import json
import subprocess
import sys

import pytest

PROGRAM = """
import contextlib, gc, json, sys
from shoal.imports import importing

before = gc.get_freeze_count()
with contextlib.suppress(ImportError), importing(sys.argv[1]):
    during = gc.isenabled()
    raise ImportError
print(json.dumps([during, gc.isenabled(), gc.get_freeze_count() > before]))
"""


@pytest.mark.parametrize(
    ("module", "collects", "exempts"), [("not_imported", False, True), ("json", True, False)], ids=["first", "again"]
)
def test_a_first_import_collects_no_garbage_and_its_objects_are_exempt_later(
    module: str, collects: bool, exempts: bool
) -> None:
    """Also if it fails. A second import of the module changes nothing."""
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, module], capture_output=True, text=True, check=True, timeout=60
    )
    assert json.loads(ended.stdout) == [collects, True, exempts]
