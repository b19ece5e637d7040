"""The pages of docs/: in the nav, with links that lead somewhere, and with code that is right."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from benchmarks.page_blocks import COMMANDS, DOCS, FENCE, PAGES, ROOT, Block, blocks, commands
from shoal.api import load_config
from shoal.cli.app import app
from shoal.config.schema import every_key

OTHERS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "tests/README.md")]
LINK = re.compile(r"\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+)\)")
BLOCKS = [block for page in [*PAGES, *OTHERS] for block in blocks(page)]
SHOAL: Any = typer.main.get_command(app)
TOP_KEYS = {key.partition(".")[0] for key, _ in every_key()}


def of(*languages: str) -> list[Any]:
    return [pytest.param(block, id=block.place) for block in BLOCKS if block.language in languages]


def nav() -> list[str]:
    """Every page in the nav, in its order."""
    hooks: dict[str, Any] = {}
    exec((DOCS / "site" / "hooks.py").read_text(), hooks)
    found = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    return list(hooks["_pages"](hooks["expand_nav"](found, DOCS)))


def test_every_page_is_in_the_nav_once() -> None:
    assert sorted(nav()) == sorted(page.relative_to(DOCS).as_posix() for page in PAGES)


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    found: dict[str, int] = {}
    for heading in re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-")
        found[slug] = found.get(slug, -1) + 1
    return {slug if not index else f"{slug}-{index}" for slug, most in found.items() for index in range(most + 1)}


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    wrong = []
    for target in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            wrong.append(target)
    assert wrong == []


@pytest.mark.parametrize("block", of("python"))
def test_python_compiles(block: Block) -> None:
    compile(block.body, block.place, "exec")


@pytest.mark.parametrize("block", of("json", "jsonl"))
def test_json_parses(block: Block) -> None:
    lines = [line for line in block.body.splitlines() if line.strip() not in ("", "…")]
    try:
        json.loads("\n".join(lines))
    except json.JSONDecodeError:
        for line in lines:
            json.loads(line)


@pytest.mark.parametrize("block", of("yaml"))
def test_yaml_is_a_config(block: Block, tmp_path: Path) -> None:
    """Or a part of one: its keys exist, and their values are of the right kind."""
    found = yaml.safe_load(block.body)
    if not isinstance(found, dict) or not set(found) <= TOP_KEYS:
        assert block.not_run is not None or block.title is not None, "its keys are not ours: say so in a comment"
        return
    file = tmp_path / "run.yaml"
    file.write_text(block.body)
    load_config(file, planned=True, needs_model=False)


@pytest.mark.parametrize("block", of(*COMMANDS))
def test_commands_parse(block: Block) -> None:
    for command in commands(block):
        for words in shoal_calls(command.text):
            parse(words)


def shoal_calls(text: str) -> Iterator[list[str]]:
    """The arguments of each `shoal` in a line of a shell, whatever it is started by."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split, lexer.commenters = True, "#"
    call: list[str] | None = None
    for word in [*lexer, ";"]:
        if set(word) <= set("|&;<>"):
            if call is not None:
                yield call
            call = None
        elif call is not None:
            call.append(word)
        elif word == "shoal":
            call = []


def parse(words: list[str]) -> None:
    """The options exist and have values of the right kind; overrides are keys of ours."""
    command = SHOAL
    while getattr(command, "commands", None):
        if not words or words[0] in ("--help", "-h", "--version"):
            return
        command, words = command.commands[words[0]], words[1:]
    if {"--help", "-h"} & set(words):
        return
    command.make_context(command.name, list(words))
    given = [
        word
        for option, word in zip(["", *words], words, strict=False)
        if option != "--trait" and re.match(r"[a-z_]+(\.[a-z_]+)*=", word)
    ]
    if command.name in ("train", "plan", "submit", "show"):
        load_config(None, given, planned=True, needs_model=False)
