"""Run the commands of a page as a reader would: in order, in a folder with the page's files."""

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from benchmarks.page_blocks import COMMANDS, ROOT, Block, Command, blocks, commands, missing
from benchmarks.page_files import PageFiles
from tests.launch.command import Ended, ForkedCommand, ForkedScript, environment

SHELL = re.compile(r"[|<>;&]|\$\(")
# Their output has no figure of the machine or of training.
EXACT = ("plan", "config", "init", "submit", "import")
# What `smaller` is for.
SIZED = ("shoal train ", "shoal bench ", "shoal sweep ", "python script.py")


def run_page(
    page: Path, folder: Path, env: Mapping[str, str], given: PageFiles, *, compared: bool = True, exact: bool = False
) -> int:
    """Run every command of a page that is not marked, and compare what it prints, with `exact` also the
    numbers of forecasts; return how many commands that were."""
    for name in ("recipes", "examples", "LICENSE"):  # a reader is in a clone
        (folder / name).symlink_to(ROOT / name)
    count = 0
    for block in blocks(page):
        if block.title is not None:
            file = folder / block.title
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.body)
        if block.language in COMMANDS:
            given.provide(block.given, folder)
            for command in filter(lambda one: one.is_run, commands(block)):
                run_command(block, command if compared else replace(command, shown=()), folder, env, exact=exact)
                count += 1
    return count


def run_command(block: Block, command: Command, folder: Path, env: Mapping[str, str], *, exact: bool) -> None:
    text = command.text.partition("  #")[0].rstrip()
    if text.startswith(SIZED):
        text = f"{text} {command.smaller}".rstrip()
    ended = _run(command, text, folder, env)
    said = f"{block.place}: {text}\n{ended.err}{ended.out}"
    assert ended.status == command.status, f"status {ended.status} of {said}"
    exact = exact and is_plain(text) and shlex.split(text)[1] in EXACT
    lost = missing(command.shown, ended.err + ended.out, exact=exact)
    assert lost is None, f"not printed (run make docs, or python -m benchmarks.docs_output PAGE): {lost!r} by {said}"


def _run(command: Command, text: str, folder: Path, env: Mapping[str, str]) -> Ended:
    before, pipe, last = text.rpartition(" | ")
    if is_plain(text):
        return _forked(command, text, folder, env)
    if pipe and is_plain(last):  # what is typed into it
        return _forked(command, last, folder, env, _shell(before, folder, env).out)
    return _shell(text, folder, env)


def is_plain(text: str) -> bool:
    """`shoal …` or `python FILE …` without anything of a shell, which runs in a fork."""
    quoted = re.sub(r"'[^']*'|\"[^\"]*\"", "", text)
    return re.match(r"shoal |python \w+\.py\b", text) is not None and SHELL.search(quoted) is None


def _forked(command: Command, text: str, folder: Path, env: Mapping[str, str], typed: str | None = None) -> Ended:
    program, *arguments = shlex.split(text)
    with {"shoal": ForkedCommand, "python": ForkedScript}[program](folder, arguments, env, typed) as running:
        if command.stopped:
            saved = folder / "runs"
            old = set(saved.glob("*/checkpoints/latest"))
            running.wait_until(lambda: bool(set(saved.glob("*/checkpoints/latest")) - old))
            os.kill(running.process.pid, signal.SIGINT)
        return running.wait()


def _shell(text: str, folder: Path, env: Mapping[str, str]) -> Ended:
    path = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text], cwd=folder, env={**env, "PATH": path}, capture_output=True, text=True
    )
    return Ended(done.returncode, done.stdout, done.stderr, 0.0, 0.0)


def page_files(folder: Path, env: Mapping[str, str]) -> PageFiles:
    """What pages are given, made in `folder` by forked commands."""

    def run(text: str) -> None:
        with ForkedCommand(folder, shlex.split(text)[1:], env, None) as running:
            ended = running.wait()
        assert ended.status == 0, f"{text}\n{ended.err}"

    return PageFiles(folder, run)


def page_environment(folder: Path) -> dict[str, str]:
    """Caches for all pages; the width of what is printed is that of the pages."""
    sources = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    return environment(folder, COLUMNS="120", HF_HUB_OFFLINE="1", PYTHONPATH=sources)
