"""Writes the output of the commands in a page's ```console blocks: `python benchmarks/docs_output.py docs/PAGE.md …`.

Runs every block of the page that is not marked, in order, in a temporary folder, as a reader would: at full size.
A block
that is stopped with Ctrl-C is stopped after its first checkpoint. Long output keeps its beginning and end.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.docs.blocks import COMMANDS, ROOT, Block, blocks, commands
from tests.launch.command import SHOAL

MOST = 45  # lines of one command


def main() -> None:
    for name in sys.argv[1:]:
        page = Path(name).resolve()
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(os.environ.get("DOCS_FOLDER", temporary))
            rewrite(page, folder)


def rewrite(page: Path, folder: Path) -> None:
    for linked in ("recipes", "examples"):
        if not (folder / linked).exists():
            (folder / linked).symlink_to(ROOT / linked)
    for block in list(blocks(page)):
        if block.title is not None:
            (folder / block.title).write_text(block.body)
        if block.language in COMMANDS and block.not_run is None:
            body = "".join(with_output(block, one.text, folder) for one in commands(block))
            if block.language == "console":
                page.write_text(page.read_text().replace(f"```console\n{block.body}```", f"```console\n{body}```", 1))


def with_output(block: Block, command: str, folder: Path) -> str:
    print(f"{block.place}: {command}", flush=True)
    with subprocess.Popen(
        ["bash", "-c", f"exec {command}" if "stops" in block.said else command],
        cwd=folder,
        env={**os.environ, "PATH": f"{SHOAL.parent}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "120"},
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
    return [line.rstrip() for line in printed.rstrip().splitlines()]


if __name__ == "__main__":
    main()
