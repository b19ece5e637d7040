"""The members of a sweep: their names, their configs, and mistakes in them, found before the first one starts."""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shoal.config.load import config_values, load_config
from shoal.config.schema import Config
from shoal.launch.first_look import check_inputs
from shoal.launch.sweep.space import Overrides
from shoal.mistakes import UserMistake
from shoal.models.peft_config import follow_adapter
from shoal.plan.report import make_plan
from shoal.plan.terms import GIB

LONGEST_NAME = 60
NO_CONFIG = ""  # the digest of a member whose config is a mistake


@dataclass(frozen=True)
class Member:
    """One run of a sweep: FILE with the overrides that all members have, and with its own."""

    name: str  # its folder in the folder of the sweep
    overrides: Overrides  # its own
    digest: str  # of its config: a file that has changed since is noticed

    @property
    def shown(self) -> str:
        return " ".join(self.overrides) or "without overrides"


@dataclass(frozen=True)
class Base:
    """What all members have in common."""

    file: Path
    fixed: Overrides
    _loaded: dict[tuple[str, ...], Config] = field(default_factory=dict, compare=False, repr=False)

    def load(self, overrides: Sequence[str]) -> Config:
        """The config of a member, as the file was when this command began."""
        key = tuple(overrides)
        if key not in self._loaded:
            self._loaded[key] = load_config(self.file, [*self.fixed, *overrides])
        return self._loaded[key]


def member_name(index: int, overrides: Overrides) -> str:
    """Such as 03-lr-0.0003-strategy-fsdp: the number, and what a reader looks for."""
    words = []
    for text in overrides:
        key, _, value = text.partition("=")
        parts = re.split(r"[.\[]", key.rstrip("]"))
        # Of train.optimizer.name, what it is a name of.
        words += [parts[-2] if parts[-1] in ("name", "kind") and len(parts) > 1 else parts[-1], value]
    slug = re.sub(r"[^\w.+]+|-{2,}", "-", "-".join(words), flags=re.ASCII).strip("-.")
    return f"{index:02d}-{slug[:LONGEST_NAME].rstrip('-.')}" if slug else f"{index:02d}"


def make_members(
    base: Base, all_overrides: Sequence[Overrides], known: Sequence[Member], *, fits: bool
) -> list[Member]:
    """A member for each, checked; those that are known keep their names. Every mistake is in one UserMistake, a
    sentence each.

    With `fits`, a member that the plan says does not fit in memory is a mistake, too.
    """
    before = {member.overrides: member for member in known}
    found, mistakes, checked = [], [], _Checks(fits=fits)
    index = len(known)
    for overrides in all_overrides:
        member = before.get(overrides)
        try:
            config = base.load(overrides)
            checked.check(config)
        except UserMistake as mistake:
            said = str(mistake)
            mistakes.append(said if not overrides or said.startswith("override ") else f"{' '.join(overrides)}: {said}")
            continue
        if member is None:
            member = Member(member_name(index, overrides), overrides, digest_of(config))
            index += 1
        elif member.digest != digest_of(config):
            mistakes.append(
                f"{member.name} was started with another config than {base.file} with these overrides describes now; "
                "give the sweep another --name, or restore the file."
            )
            continue
        found.append(member)
    if mistakes:
        several = dict.fromkeys(_common(mistakes))
        raise UserMistake("\n".join(several))
    return found


def _common(mistakes: Sequence[str]) -> list[str]:
    """The same mistake of every member is said once, without the member."""
    reasons = {mistake.partition(": ")[2] for mistake in mistakes}
    return list(reasons) if len(reasons) == 1 and len(mistakes) > 1 and "" not in reasons else list(mistakes)


class _Checks:
    """Each input is looked at once, though many members have it."""

    def __init__(self, *, fits: bool) -> None:
        self.fits = fits
        self._inputs: dict[str, UserMistake | None] = {}

    def check(self, config: Config) -> None:
        key = json.dumps([config.model.model_dump(mode="json"), config.adapter.model_dump(mode="json"),
                          config.data.model_dump(mode="json"), config.train.objective])  # fmt: skip
        if key not in self._inputs:
            self._inputs[key] = _mistake_in(lambda: check_inputs(config))
        if (mistake := self._inputs[key]) is not None:
            raise mistake
        if self.fits:
            plan = make_plan(follow_adapter(config))
            if not plan.fits:
                choice = plan.choice
                raise UserMistake(
                    f"this does not fit: {choice.name} needs {choice.memory.reserved / GIB:.1f} GiB per device of "
                    f"{choice.machine.gpu.memory_gib:.1f} GiB on {choice.machine.gpu.name}; shoal plan says what "
                    "would, and --anyway starts it nevertheless."
                )


def _mistake_in(act: Callable[[], None]) -> UserMistake | None:
    try:
        act()
    except UserMistake as mistake:
        return mistake
    return None


def digest_of(config: Config) -> str:
    """Of everything that can change the results."""
    values = {key: value for key, value in config_values(config).items() if key not in ("name", "run_dir", "slurm")}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]
