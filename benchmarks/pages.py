"""Write the forecasts in docs/howto, docs/concepts and two other pages: `python -m benchmarks.pages`.

Tables stand between `<!-- begin: NAME -->` and `<!-- end -->`; the output below `$ shoal plan …` and `$ shoal bench …
--no-measure` is replaced line by line, where … stands for lines that the page leaves out.
"""

import contextlib
import re
import shlex
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from typer.testing import CliRunner

from benchmarks.pictures.forecast import gib, plan
from benchmarks.tables import TABLES
from shoal.cli.app import app

DOCS = Path(__file__).parents[1] / "docs"
FOLDERS = ("howto", "concepts")
TABLE = re.compile(r"(<!-- begin: (\S+) -->\n).*?(?=<!-- end -->)", re.DOTALL)
FILE = re.compile(r'```yaml title="(\S+)"\n(.*?)```', re.DOTALL)
OUTPUT = re.compile(r"(?<=```console\n)(.*?)(?=\n```)", re.DOTALL)
LEFT_OUT = "…"
OTHERS = [DOCS / "bench.md", DOCS / "tutorials" / "one-gpu-to-a-cluster.md"]


def pages() -> list[Path]:
    return sorted(page for folder in FOLDERS for page in (DOCS / folder).glob("*.md"))


def refreshed(text: str) -> str:
    """The text of a page with the tables and the output of today."""
    text = TABLE.sub(lambda found: found[1] + table(found[2]), text)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for name, body in FILE.findall(text):
            Path(name).write_text(body, encoding="utf-8")
        return OUTPUT.sub(lambda block: "\n".join(_with_output(block[1])), text)


def table(name: str) -> str:
    """A table of TABLES: what the plan says of each of its rows."""
    if isinstance(made := TABLES[name], Callable):
        lines = list(made())
    else:
        common, settings = made
        lines = ["| | GiB per device | tokens/s per device |", "| --- | --- | --- |"]
        for words, more in settings.items():
            found = plan(f"{common} {more}")
            speed = f"{found.choice.speed.tokens_per_second_per_gpu:,.0f}" if found.fits else "does not fit"
            lines.append(f"| {words} | {gib(found.choice.memory.worst.reserved):.1f} | {speed} |")
    return "\n".join(["", *lines, ""]) + "\n"


def _with_output(block: str) -> Iterator[str]:
    command = block.partition("\n")[0]
    whole = "--no-measure" in command or (command.startswith("$ shoal plan ") and LEFT_OUT not in block.splitlines())
    if whole and block.count("\n$ ") == 0:  # all of the output of one command is shown
        yield from (command, *(line.rstrip() for line in _printed(command[2:])))
        return
    rest: list[str] | None = None
    in_list = False  # of changes or strategies, whose order is the plan's: its lines are taken as they come
    for line in block.splitlines():
        if line.startswith("$ "):
            rest = _printed(line[2:]) if line.startswith("$ shoal plan ") else None
        elif line == LEFT_OUT:
            in_list = False
        elif rest is not None:
            like = [0] if in_list else [index for index, one in enumerate(rest) if _form(one) == _form(line)]
            if not like:
                raise SystemExit(f"no longer printed: {line}")
            line, rest = rest[like[0]], rest[like[0] + 1 :]
            in_list = in_list or line.endswith(":")
        yield line


def _form(line: str) -> str:
    """A line without its figures, bars and spaces."""
    return re.sub(r"[\d.,]+", "#", re.sub(r"\b([wogahcr])\1*[wogahcr.!|]*(?=\s|\||$)|[-+\s]", "", line))


def _printed(command: str) -> list[str]:
    done = CliRunner().invoke(app, shlex.split(command, comments=True)[1:], env={"COLUMNS": "120"})
    if done.exit_code not in (0, 3):  # 3: it does not fit
        raise SystemExit(f"{command}: {done.output}")
    return done.stdout.rstrip().splitlines()


def main() -> None:
    for page in [*pages(), *OTHERS]:
        page.write_text(refreshed(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
