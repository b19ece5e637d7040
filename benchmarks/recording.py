"""Record a terminal session and draw it as an animated SVG: `python benchmarks/recording.py docs/images/session`.

Runs COMMANDS in a temporary folder and writes SESSION.json (what was printed when) and
SESSION.svg. `--draw` only draws the JSON again. The SVG needs no script: each screen is a group that CSS shows for the
time it was there. Waits are shortened to WAIT seconds; nothing that was printed is changed.
"""

import html
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

SHOAL = Path(sys.executable).parent / "shoal"

ROOT = Path(__file__).parents[1]
COMMANDS = [
    "shoal plan model.shape=llama3-8b hardware.gpu=h100-80gb hardware.devices=8 | grep -E '^(run|memory|speed)'",
    "shoal train recipes/chess-tiny.yaml data.games=600 train.steps=40 train.schedule.warmup=4 log.every=5",
    "shoal export runs/chess-tiny --to hf",
]
COLUMNS, ROWS = 118, 27
WAIT, HOLD = 1.2, 5.0  # seconds: the longest wait between two screens, and how long the last one stays
CHARACTER, LINE = 7.25, 16
BACK, FORE, DIM, PROMPT = "#1f2129", "#d8dee9", "#8a93a6", "#4fd1b5"


def record() -> list[tuple[float, str]]:
    """(seconds, text) of what was printed."""
    events: list[tuple[float, str]] = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "recipes").symlink_to(ROOT / "recipes")
        for command in COMMANDS:
            events.append((time.monotonic() - began, f"$ {command}\n"))
            for text in printed(command, folder):
                events.append((time.monotonic() - began, text))
    return events


def printed(command: str, folder: str) -> Iterator[str]:
    env = {**os.environ, "PATH": f"{SHOAL.parent}:{os.environ['PATH']}", "COLUMNS": str(COLUMNS)}
    # Not a terminal: progress is then lines, which stay, and not a bar.
    with subprocess.Popen(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=folder,
        env=env | {"SHOAL_CACHE": f"{folder}/cache"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        bufsize=1,
    ) as process:
        assert process.stdout is not None
        yield from process.stdout
    if process.returncode != 0:
        raise SystemExit(f"{command}: status {process.returncode}")


def screens(events: list[tuple[float, str]]) -> list[tuple[float, list[str]]]:
    """The lines on the screen after each event, and for how many seconds they are there."""
    lines: list[str] = [""]
    found: list[tuple[float, list[str]]] = []
    for index, (when, text) in enumerate(events):
        first, *others = text.split("\n")
        lines[-1] += first
        lines += others
        later = events[index + 1][0] if index + 1 < len(events) else when + HOLD
        stays = HOLD if index + 1 == len(events) else min(WAIT, max(later - when, 0.05))
        wrapped = [line[at : at + COLUMNS] for line in lines for at in range(0, max(1, len(line)), COLUMNS)]
        if found and found[-1][1] == wrapped[-ROWS:]:
            found[-1] = (found[-1][0] + stays, found[-1][1])
        else:
            found.append((stays, wrapped[-ROWS:]))
    return found


def draw(shown: list[tuple[float, list[str]]]) -> str:
    total = sum(stays for stays, _ in shown)
    width, height = COLUMNS * CHARACTER + 32, ROWS * LINE + 32
    styles, groups, began = [], [], 0.0
    for index, (stays, lines) in enumerate(shown):
        start, end = 100 * began / total, 100 * (began + stays) / total
        began += stays
        last = index + 1 == len(shown)
        styles.append(
            f"@keyframes s{index}{{0%{{opacity:{int(index == 0)}}}{start:.3f}%{{opacity:1}}"
            + ("100%{opacity:1}}" if last else f"{end:.3f}%{{opacity:0}}100%{{opacity:0}}}}")
            + f"#s{index}{{animation:s{index} {total:.2f}s step-end infinite;opacity:{int(last)}}}"
        )
        texts = []
        for row, line in enumerate(lines):
            if line.strip():
                fill = f' fill="{PROMPT}"' if line.startswith("$ ") else ""
                texts.append(f'<text x="16" y="{28 + row * LINE}"{fill}>{html.escape(line)}</text>')
        groups.append(f'<g id="s{index}">{"".join(texts)}</g>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" role="img" '
        'aria-label="shoal plan, train and export in a terminal">'
        f"<style>text{{font:12px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;white-space:pre;fill:{FORE}}}"
        f"text[fill]{{fill:{PROMPT}}}{''.join(styles)}</style>"
        f'<rect width="100%" height="100%" rx="8" fill="{BACK}"/>{"".join(groups)}</svg>\n'
    )


def main() -> None:
    target = Path(next(word for word in sys.argv[1:] if not word.startswith("-")))
    file = target.with_suffix(".json")
    if "--draw" not in sys.argv:
        file.write_text(json.dumps(record()) + "\n")
    target.with_suffix(".svg").write_text(draw(screens(json.loads(file.read_text()))))


if __name__ == "__main__":
    main()
