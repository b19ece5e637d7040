"""Writes the output of the commands in a page's ```console blocks: `python -m benchmarks.docs_output docs/PAGE.md …`.

Runs every command of the page that is not marked, in order, in a temporary folder, as a reader would: at full size.
A block that is stopped with Ctrl-C is stopped after its first checkpoint. Long output keeps its beginning and end.
With `--only TEXT`, only blocks with this text get their output.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

from benchmarks.page_blocks import COMMANDS, ROOT, Block, blocks, commands
from benchmarks.page_files import PageFiles

SHOAL = Path(sys.executable).parent / "shoal"
MOST = 60  # lines of one command


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("pages", nargs="+", type=Path)
    parser.add_argument("--only", default="")
    asked = parser.parse_args()
    for page in asked.pages:
        with tempfile.TemporaryDirectory() as temporary, tempfile.TemporaryDirectory() as made:
            given = PageFiles(Path(made), lambda line, made=made: run_line(line, Path(made)))
            rewrite(page.resolve(), Path(os.environ.get("DOCS_FOLDER", temporary)), given, asked.only)


def rewrite(page: Path, folder: Path, given: PageFiles, only: str) -> None:
    for linked in ("recipes", "examples", "LICENSE"):
        if not (folder / linked).exists():
            (folder / linked).symlink_to(ROOT / linked)
    for block in list(blocks(page)):
        if block.title is not None:
            (folder / block.title).write_text(block.body)
        if block.language in COMMANDS:
            given.provide(block.given, folder)
            found = [one for one in commands(block) if one.is_run]
            body = "".join(with_output(block, one.text, folder) for one in found)
            if block.language == "console" and found and only in block.body:
                page.write_text(page.read_text().replace(f"```console\n{block.body}```", f"```console\n{body}```", 1))


def run_line(line: str, folder: Path) -> None:
    subprocess.run(["bash", "-c", line], cwd=folder, env=environment(), check=True, stdout=subprocess.DEVNULL)


def environment() -> dict[str, str]:
    return {**os.environ, "PATH": f"{SHOAL.parent}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "120"}


def with_output(block: Block, command: str, folder: Path) -> str:
    print(f"{block.place}: {command}", flush=True)
    with subprocess.Popen(
        ["bash", "-c", f"exec {command}" if "stops" in block.said else command],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        if "stops" in block.said:
            while not list(folder.glob("runs/*/checkpoints/latest")) and process.poll() is None:
                time.sleep(0.1)
            process.send_signal(signal.SIGINT)
        printed = process.communicate()[0]
    if process.returncode != int(block.said.get("status", block.said.get("stops", 0))):
        raise SystemExit(f"{block.place}: {command}: status {process.returncode}\n{printed}")
    lines = clean(printed.replace(str(folder), "…").replace(str(SHOAL.parent), "…"))
    if len(lines) > MOST:
        lines = [*lines[: MOST // 2], "…", *lines[-MOST // 2 :]]
    return "\n".join([f"$ {command}", *lines]) + "\n"


def clean(printed: str) -> list[str]:
    """The lines, without what only this machine has: how fast it is, and what is in its cache."""
    printed = re.sub(r"^(step \d.*  lr \S+)  .*$", r"\1  …", printed, flags=re.MULTILINE)
    printed = re.sub(r"^(step +\d+ of .* tokens), .*$", r"\1, …", printed, flags=re.MULTILINE)
    printed = re.sub(r"^(Using cached|Generating|Tokenizing) .*\n", "", printed, flags=re.MULTILINE)
    lines = (line.rstrip() for line in printed.rstrip().splitlines())
    # As a terminal shows a sentence; tables and scripts have no line that long.
    return [part for line in lines for part in (textwrap.wrap(line, 120) if line.startswith("shoal: ") else [line])]


if __name__ == "__main__":
    main()
