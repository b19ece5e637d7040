"""Whether a run resumes on the data that it started with."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from shoal.checkpoint import store
from shoal.checkpoint.state import PROGRESS, read_progress
from shoal.data.sets import Sets
from shoal.mistakes import UserMistake

COUNTS = ("documents", "tokens", "sequences", "loss_tokens")
STREAMED = "the training set is streamed from files with other names or sizes than before"

Fingerprint = Mapping[str, Mapping[str, int | str]]


def fingerprint(sets: Sets) -> dict[str, dict[str, int | str]]:
    """For each set, a hash of its sequences, and counts that help to say what has changed."""
    named = {"training": sets.training}
    if sets.validation is not None and sets.validation is not sets.training:  # not a share of the training set
        named["validation"] = sets.validation
    return {
        name: {"content": one.summary.content, **{key: getattr(one.summary, key) for key in COUNTS}}
        for name, one in named.items()
    }


def check_resumed_data(folders: Sequence[Path], sets: Sets) -> None:
    """As `check_same_data`, for the newest checkpoint in `folders`, before anything of the run is written."""
    complete = [one for folder in folders for one in store.list_complete(folder)]
    for one in sorted(complete, key=lambda one: one.step, reverse=True):
        if PROGRESS in one.files and store.damaged_file(one, [PROGRESS]) is None:
            check_same_data(read_progress(one.path).data, sets)
            return


def check_same_data(before: Fingerprint, sets: Sets) -> None:
    """A UserMistake if the sets have other sequences than those `before`, wherever their files are."""
    now, streamed = fingerprint(sets), {"training"} if sets.streams else set()
    changes = [
        STREAMED if name in streamed else _describe(name, before[name], now[name])
        for name in now
        if name in before and before[name] != now[name]
    ]
    if changes:
        raise UserMistake(
            f"--resume: the data has changed since the run started: {' and '.join(changes)}; restore it, or start "
            "another run from the checkpoint with --from and name=…"
        )


def _describe(name: str, before: Mapping[str, int | str], now: Mapping[str, int | str]) -> str:
    for key in COUNTS:
        if before.get(key) != now[key]:
            return f"the {name} set had {before.get(key)} {key.replace('_', ' ')} and has {now[key]} now"
    return f"the {name} set has as many documents, tokens and sequences as before, but other contents"
