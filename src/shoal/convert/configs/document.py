"""Writes the tables of docs/coming-from: the words of other systems and ours, from the rules that translate."""

import sys
from collections.abc import Iterator
from pathlib import Path

from shoal.convert.configs.accelerate import ACCELERATE
from shoal.convert.configs.axolotl import AXOLOTL
from shoal.convert.configs.deepspeed import DEEPSPEED
from shoal.convert.configs.hydra import HYDRA
from shoal.convert.configs.launchers import LAUNCHER
from shoal.convert.configs.lightning import LIGHTNING
from shoal.convert.configs.litgpt import LITGPT
from shoal.convert.configs.llamafactory import LLAMAFACTORY
from shoal.convert.configs.rules import Rule, System
from shoal.convert.configs.scmodelforge import SCMODELFORGE
from shoal.convert.configs.torchtune import TORCHTUNE
from shoal.convert.configs.trainer import TRAINER

PAGES = {
    "accelerate": ACCELERATE,
    "axolotl": AXOLOTL,
    "deepspeed": DEEPSPEED,
    "hydra": HYDRA,
    "launchers": LAUNCHER,
    "lightning": LIGHTNING,
    "litgpt": LITGPT,
    "llamafactory": LLAMAFACTORY,
    "scmodelforge": SCMODELFORGE,
    "torchtune": TORCHTUNE,
    "trainer": TRAINER,
}

# Blocks whose keys are those of another table.
ELSEWHERE = {
    "a Hydra config with trainer.dist": ("trainer.", "training.", "lora."),
    "a launcher": ("accelerate.",),
    "an Accelerate config": ("parallelism_config.parallelism_config_",),
}

BEGIN, END = "<!-- begin: words -->\n", "<!-- end -->"


def refreshed(page: Path) -> str:
    """The text of a page with the table of its system between the two marks."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, found, after = rest.partition(END)
    assert found, f"{page} has no table of words"
    return before + BEGIN + words(PAGES[page.stem]) + END + after


def words(system: System) -> str:
    """Their keys and ours, as Markdown."""
    return "\n".join(["", "| theirs | ours | |", "| --- | --- | --- |", *_rows(system), "", ""])


def _rows(system: System) -> Iterator[str]:
    groups: dict[tuple[tuple[str, ...], str], list[str]] = {}
    for name, rule in system.keys.items():
        if name.startswith(ELSEWHERE.get(system.name, ())) and not name.startswith("trainer.dist"):
            continue
        block, _, last = name.rpartition(".")
        if last.startswith("fsdp_") and f"{block}.{last.removeprefix('fsdp_')}" in system.keys:
            continue  # the same with and without the prefix
        groups.setdefault((rule.ours, _says(rule)), []).append(name)
    # What becomes a key first, what does not behind it.
    for (ours, says), names in sorted(groups.items(), key=lambda item: not item[0][0]):
        theirs = ", ".join(f"`{name}`" for name in names)
        yield f"| {theirs} | {', '.join(f'`{key}`' for key in ours)} | {says} |"


def _says(rule: Rule) -> str:
    return rule.says.replace("|", "\\|")


def main() -> None:
    """Refresh every page of a folder: `python -m shoal.convert.configs.document docs/coming-from`."""
    for name in PAGES:
        page = Path(sys.argv[1]) / f"{name}.md"
        page.write_text(refreshed(page), encoding="utf-8")


if __name__ == "__main__":
    main()
