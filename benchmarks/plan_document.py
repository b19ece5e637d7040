"""Updates docs/plan.md and docs/plan-accuracy.md: `python benchmarks/plan_document.py`.

Replaces the output of the commands of the first, and in the second the tables of plan_accuracy.py, plan/traced.py and
plan_examples.py, which have to run first.
"""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
PLAN, ACCURACY = (HERE.parent / "docs" / name for name in ("plan.md", "plan-accuracy.md"))


def printed(command: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-m", *shlex.split(command)], capture_output=True, text=True, cwd=HERE.parent
    )
    if done.returncode not in (0, 3):  # 3: it does not fit, which is among the examples
        raise SystemExit(f"{command}: {done.stderr.strip()}")
    return done.stdout.rstrip().splitlines()


def with_output(block: str) -> str:
    """A command with its new output; after a line «…» only the paragraph that starts with the following line."""
    first, *before = block.splitlines()
    found = printed(first.removeprefix("$ "))
    if before and before[0] == "…":
        start = [_words(line) for line in found].index(_words(before[1]))
        end = next((line for line in range(start, len(found)) if not found[line]), len(found))
        found = ["…", *found[start:end]]
    return "\n".join([first, *found])


def _words(line: str) -> str:
    """A line without its figures, which may have changed."""
    return re.sub(r"[\d.,]+", "#", line)


def table_like(text: str, header: str) -> str:
    """The table of `text` that begins with the line `header`."""
    start = text.index(header)
    found = re.match(r"(?:\|.*\n)+", text[start:])
    assert found is not None
    return found[0]


def replaced(document: str, table: str) -> str:
    header = table.splitlines()[0]
    return document.replace(table_like(document, header), table)


def accuracy() -> str:
    summary = json.loads((HERE / "plan" / "accuracy.json").read_text())["summary"]
    lines = ["| rows | figures | median | 90% within | worst | bias |", "| --- | --- | --- | --- | --- | --- |"]
    for name, one in summary.items():
        shares = " | ".join(f"{one[key]:.1%}" for key in ("median", "ninety_per_cent_within", "worst"))
        lines.append(f"| {name} | {one['figures']} | {shares} | {one['bias']:+.1%} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    examples = re.compile(r"(?<=```console\n)\$ shoal plan .*?(?=\n```)", re.DOTALL)
    PLAN.write_text(examples.sub(lambda block: with_output(block[0]), PLAN.read_text()))
    text = replaced(ACCURACY.read_text(), accuracy())
    for name in ("traced.md", "examples.md"):
        written = (HERE / "plan" / name).read_text()
        for header in re.findall(r"^(\|.*\n)\| ---", written, flags=re.MULTILINE):
            text = replaced(text, table_like(written, header))
    ACCURACY.write_text(text)


if __name__ == "__main__":
    main()
