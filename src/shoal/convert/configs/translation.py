"""The door: files and commands of other systems in, our YAML and a report out."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.config.interpolate import escape
from shoal.config.load import config_from_mapping
from shoal.config.locate import parse_document, write_yaml
from shoal.convert.configs.commands import read_command
from shoal.convert.configs.draft import BECAME, NO_MEANING, NOT_CARRIED, Draft, Line, Outcome
from shoal.convert.configs.finish import finish
from shoal.convert.configs.launchers import LAUNCHER
from shoal.convert.configs.recognise import SYSTEMS, read_source
from shoal.convert.configs.rules import Source, translate
from shoal.files import write_atomically
from shoal.mistakes import UserMistake

COMMAND_LINE = "the command"
# What a run needs and what is most often in another file.
NEEDED = {"model.from": "the model: a folder or an id of the Hub", "data.path": "the data"}


@dataclass(frozen=True)
class Translation:
    """Our config, and what became of each of their keys."""

    systems: tuple[str, ...]  # what was recognised, as "FILE: a DeepSpeed config"
    config: dict[str, Any]
    lines: tuple[Line, ...]
    contradictions: tuple[str, ...]
    remarks: tuple[str, ...]
    missing: tuple[str, ...]  # keys that a run needs and no source gives
    output: str | None = None

    def of(self, outcome: Outcome) -> list[Line]:
        return [line for line in self.lines if line.outcome == outcome]

    def as_dict(self) -> dict[str, Any]:
        return {
            "output": self.output,
            "recognised": list(self.systems),
            "became": [line.as_dict() for line in self.of(BECAME)],
            "no_meaning": [line.as_dict() for line in self.of(NO_MEANING)],
            "not_carried": [line.as_dict() for line in self.of(NOT_CARRIED)],
            "contradictions": list(self.contradictions),
            "remarks": list(self.remarks),
            "missing": list(self.missing),
            "config": self.config,
        }

    def yaml(self) -> str:
        """The file, which says where it comes from and what it lacks."""
        head = [f"# Translated by shoal import from {one}." for one in self.systems]
        head += [f"# Missing: {key}, {NEEDED[key]}." for key in self.missing]
        head += [f"# Not carried: {line.key}: {line.says}." for line in self.of(NOT_CARRIED)]
        # A comment must stay one whatever the values hold.
        comments = "\n".join("# " + " ".join(one.removeprefix("# ").split()) for one in head)
        return f"{comments}\n{write_yaml(escape(self.config))}"


def translate_configs(files: Sequence[Path], command: str = "") -> Translation:
    """Translate files and a command that belong together. Nothing is written."""
    sources: list[Source] = []
    for file in files:
        if not file.exists():
            raise UserMistake(f"{file} does not exist.")
        sources += read_source(file)
    if command:
        sources += read_command(command, COMMAND_LINE, Path())
    if not sources:
        raise UserMistake("There is no command in it that shoal translates.")
    draft = Draft(named={file.name for file in files})
    done: list[Source] = []
    waiting = sorted(sources, key=_order)
    while waiting:
        source = waiting.pop(0)
        translate(source, draft, SYSTEMS)
        done.append(source)
        for path in draft.queue:
            waiting = sorted([*waiting, *read_source(path)], key=_order)
        draft.queue.clear()
    finish(draft)
    tree = draft.tree()
    missing = [key for key in NEEDED if key not in draft.values]
    if any(key.startswith("model.shape") for key in draft.values):
        missing = [key for key in missing if key != "model.from"]
    if "data.source" in draft.values:
        missing = [key for key in missing if key != "data.path"]
    systems = tuple(dict.fromkeys(f"{source.name}: {source.system.name}" for source in done))
    found = Translation(
        systems, tree, tuple(draft.lines), tuple(draft.contradictions), tuple(draft.remarks), tuple(missing)
    )
    # The file is what counts: it is read back before anybody sees it.
    read_back = parse_document(found.yaml(), "the translation").value or {}
    config_from_mapping(read_back, needs_model=False)
    return found


def _order(source: Source) -> int:
    return -1 if source.system is LAUNCHER else next((at for at, one in enumerate(SYSTEMS) if one is source.system), 2)


def default_output(files: Sequence[Path], translation: Translation) -> Path:
    """Beside the first file; for a command alone, NAME.yaml here."""
    if files:
        return files[0].with_name(f"{files[0].stem}.shoal.yaml")
    return Path(f"{translation.config.get('name', 'run')}.yaml")


def write_translation(translation: Translation, output: Path, *, overwrite: bool) -> None:
    """Write the YAML; an existing file only with `overwrite`."""
    if output.exists() and not overwrite:
        raise UserMistake(f"{output} already exists; choose another file with --output, or give --overwrite.")
    if output.is_dir():
        raise UserMistake(f"{output} is a folder; --output is the YAML file to write.")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(output, translation.yaml())
    except OSError as error:
        raise UserMistake(f"{output} cannot be written: {error.strerror}.") from None
