"""The code blocks of a Markdown page, and what the page says about running them.

A fence ```bash holds commands, ```console holds `$ command` lines with their output, in which … stands for anything. A
fence with title="FILE" is a file. HTML comments on the lines before a fence are about it:

    <!-- not run: REASON -->            its commands are only parsed
    <!-- only parsed: START | START (REASON) -->   those of its commands that start so
    <!-- given: PATH … -->              what the reader's folder has, beside the files of the page (page_files.py)
    <!-- status: 3 -->                  the exit status of its last command
    <!-- smaller: train.steps=9 -->     overrides or options with which the tests run what trains or measures
    <!-- stops: 75 -->                  its last command is stopped with Ctrl-C once it has saved a checkpoint
"""

import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
COMMANDS = ("bash", "console")
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=indent)```[ \t]*$", re.MULTILINE | re.DOTALL
)
COMMENTS = re.compile(r"(?:^ *<!-- [a-z ]+: [^\n]*? -->\n)+\Z", re.MULTILINE)
COMMENT = re.compile(r"<!-- (not run|only parsed|given|status|smaller|stops): (.*?) -->")
# Numbers, with what belongs to them: a run's figures are not those of the page.
NUMBER = re.compile(r"\d(?:[\d,.]*\d)?(?:e[-+]?\d+)?%?")
PROGRESS = re.compile(r"^(step #/#) .*|^((?:Generating|Tokenizing)\b).*")


@dataclass(frozen=True)
class Block:
    page: Path
    line: int  # of the fence
    language: str
    title: str | None  # the file that it is
    body: str
    said: dict[str, str]  # by its comments

    @property
    def not_run(self) -> str | None:
        return self.said.get("not run")

    @property
    def given(self) -> str:
        return self.said.get("given", "")

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@dataclass(frozen=True)
class Command:
    text: str  # as for a shell
    shown: tuple[str, ...]  # the output that the page shows; empty: none
    status: int
    smaller: str  # overrides of the test
    stopped: bool  # with Ctrl-C
    is_run: bool

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text, comments=True)


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for fence in FENCE.finditer(text):
        words = shlex.split(fence["info"].replace("{", " ").replace("}", " "))
        options = dict(word.split("=", 1) for word in words if "=" in word)
        before = COMMENTS.search(text[: fence.start()])
        yield Block(
            page,
            text.count("\n", 0, fence.start()) + 1,
            next((word.lstrip(".") for word in words if "=" not in word), ""),
            options.get("title"),
            re.sub(f"^{fence['indent']}", "", fence["body"], flags=re.MULTILINE),
            dict(COMMENT.findall(before[0])) if before else {},
        )


def commands(block: Block) -> list[Command]:
    """The commands of a block in order; a backslash at the end of a line continues it."""
    lines = block.body.replace("\\\n", " ").splitlines()
    found: list[tuple[str, list[str]]] = []
    for line in lines:
        if block.language == "bash":
            if line.strip() and not line.startswith("#"):
                found.append((line, []))
        elif line.startswith("$ "):
            found.append((line[2:], []))
        else:
            assert found, f"{block.place}: output before a command"
            found[-1][1].append(line)
    status = int(block.said.get("status", block.said.get("stops", 0)))
    only_parsed = re.sub(r" \(.*\)$", "", block.said["only parsed"]).split(" | ") if "only parsed" in block.said else []
    return [
        Command(
            text,
            tuple(shown),
            status if index == len(found) - 1 else 0,
            block.said.get("smaller", ""),
            "stops" in block.said and index == len(found) - 1,
            block.not_run is None and not text.startswith(tuple(only_parsed)),
        )
        for index, (text, shown) in enumerate(found)
    ]


def missing(shown: tuple[str, ...], printed: str, *, exact: bool) -> str | None:
    """The first line that the page shows and the command has not printed, in this order; … stands for any text. Unless
    `exact`, numbers are not compared, and lines of progress count once."""
    stable = (lambda line: " ".join(line.split())) if exact else _stable
    lines = [stable(line) for line in printed.splitlines()]
    position = 0
    before = None
    for line in _unwrapped(shown):
        wanted = stable(line)
        if wanted in ("", "…", before):
            continue
        before = wanted
        pattern = re.compile(".*".join(map(re.escape, wanted.split("…"))))
        position = next((at + 1 for at in range(position, len(lines)) if pattern.fullmatch(lines[at])), 0)
        if not position:
            return line
    return None


def _unwrapped(lines: Iterable[str]) -> list[str]:
    """A mistake is one line, which a page shows on several; it ends with a full stop."""
    joined: list[str] = []
    for line in lines:
        if joined and joined[-1].startswith("shoal: ") and joined[-1][-1] != "." and line.strip() not in ("", "…"):
            joined[-1] += f" {line}"
        else:
            joined.append(line)
    return joined


def _stable(line: str) -> str:
    masked = " ".join(NUMBER.sub("#", line).split())
    return PROGRESS.sub(lambda found: found[1] or found[2], masked)
