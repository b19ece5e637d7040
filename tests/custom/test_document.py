"""The code of docs/python.md runs, from top to bottom."""

import os
import re
from pathlib import Path

import pytest

from tests.harness import lines, run_ranks

DOCUMENT = Path(__file__).parents[2] / "docs" / "python.md"


@pytest.mark.slow
def test_the_code_in_the_document_runs(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("A shoal turns as one, and every swimmer follows. " * 40)

    blocks = re.findall(r"```python(?: title=\"(\S+)\")?\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)

    def run(scripts: tuple[str, ...]) -> None:
        os.chdir(tmp_path)
        names: dict[str, object] = {"__name__": "__main__"}
        for script, block in blocks:
            if script in scripts:
                exec(compile(block, "docs/python.md", "exec"), names)

    # What has no title continues the first script.
    run_ranks(1, lambda: run(("script.py", "")))
    run_ranks(1, lambda: run(("turns.py",)))
    assert {script for script, _ in blocks} == {"script.py", "turns.py", ""}
    runs = tmp_path / "runs"
    assert [line["step"] for line in lines(runs / "objective")] == [2]
    assert lines(runs / "turns")[-1]["step"] == 6
    assert (tmp_path / "exported" / "config.json").is_file()
    assert (runs / "example" / "model.safetensors").is_file()
