"""A sweep from its command line to its table: make the members, check them, run those that are left, and compare."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shoal.config.lock import locked
from shoal.config.schema import Config
from shoal.launch.sweep.listing import read_members
from shoal.launch.sweep.local import Stopping, run_member, stopping
from shoal.launch.sweep.members import NO_CONFIG, Base, Member, make_members, member_name
from shoal.launch.sweep.plot import can_plot, plot_sweep
from shoal.launch.sweep.results import Metric, Table, gather, write_best
from shoal.launch.sweep.space import Overrides, Space, check_count, read_space
from shoal.launch.sweep.state import ENDED, Entry, Sweep, read_sweep
from shoal.mistakes import UserMistake
from shoal.paths import user_path

PLOT = "sweep.png"
NAME_SUFFIX = "-sweep"


@dataclass(frozen=True)
class Request:
    """What the command line asks for."""

    file: Path
    overrides: Sequence[str] = ()
    name: str | None = None
    runs: Path | None = None
    random: int | None = None
    listed: Path | None = None
    trials: int | None = None
    pruner: str = "median"
    seed: int = 0
    metric: str | None = None
    on: Literal["local", "slurm"] = "local"
    retry_failed: bool = False
    anyway: bool = False
    dry_run: bool = False
    plot: Path | None = None


@dataclass(frozen=True)
class Outcome:
    """How the command ended."""

    table: Table
    best: Path | None = None
    plot: Path | None = None
    stopped: bool = False
    script: str | None = None  # of a dry run on a scheduler

    def text(self) -> str:
        table, best = self.table, self.table.best
        lines = [table.text()]
        if best is not None and self.best is not None:
            lines += ["", f"best    {best.entry.name}: shoal train {self.best}"]
        if self.plot is not None:
            lines += [f"plot    {self.plot}"]
        failed = table.count("failed")
        if failed:
            lines += [f"failed  {failed} of {len(table.results)}; the same command with --retry-failed runs them again"]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        paths = {"best_config": self.best, "plot": self.plot}
        return {**self.table.as_dict(), **{key: None if path is None else str(path) for key, path in paths.items()}}


def sweep(request: Request, report: Callable[[str], None] = lambda _: None) -> Outcome:
    """Run what is left of a sweep, and gather what its members have reached."""
    space = read_space(request.overrides)
    base = Base(user_path(request.file, "The file"), space.fixed)
    wanted = _wanted(request, space)
    # Mistakes first, whatever folder it is. Optuna's members are checked as they come, but for what all have.
    make_members(base, wanted or [_first_trial(space)], (), fits=False)
    first = base.load(wanted[0] if wanted else _first_trial(space))
    name = request.name or f"{first.name}{NAME_SUFFIX}"
    _check_common(request, [base.load(overrides) for overrides in wanted])
    runs = user_path(first.run_dir if request.runs is None else request.runs, "--runs")
    _check_name(name)
    folder = runs / name
    with _held(folder, changes=not request.dry_run):
        found = read_sweep(folder)
        if request.trials is not None:  # those that Optuna has proposed before
            wanted = [member.overrides for member in found.members if member.digest != NO_CONFIG]
        members = make_members(base, wanted, found.members, fits=not request.anyway and request.on == "local")
        if request.dry_run:
            return _preview(request, base, found, members)
        _check_plot(request)
        found.add(members)
        if request.on == "slurm":
            from shoal.launch.sweep.slurm import submit_members, update_submitted

            update_submitted(found)
            submit_members(base, found, _left(found, members, request), anyway=request.anyway, report=report)
            stopped = False
        else:
            stopped = _run(request, space, base, found, members, report)
        table = gather(found, request.metric)
        plot = request.plot or (folder / PLOT if can_plot() else None)
        drawn = plot is not None and plot_sweep(table, plot)
        return Outcome(table, write_best(table, base, name), plot if drawn else None, stopped)


def _wanted(request: Request, space: Space) -> list[Overrides]:
    """The members of a grid, of random values, or of a list. Optuna chooses its own, one after another."""
    ways = {"--random": request.random, "--list": request.listed, "--optuna": request.trials}
    given = [name for name, value in ways.items() if value is not None]
    if len(given) > 1:
        raise UserMistake(f"{' and '.join(given)} are different ways to choose members; give one of them.")
    if request.listed is not None:
        if space.varied:
            raise UserMistake(f"--list has the members, so {space.varied[0].key} must have one value.")
        return _named_by_us(read_members(request.listed))
    if not space.varied:
        raise UserMistake(
            "Nothing varies: give a key several values, such as train.lr=1e-4,3e-4, or the members in a file: "
            "--list FILE."
        )
    if request.random is not None:
        return space.draw(request.random, request.seed)
    if request.trials is not None:
        if request.on != "local":
            raise UserMistake(
                "--optuna chooses each member by the results of those before, so it runs one after another on this "
                "machine; for a job array use --random N."
            )
        check_count(request.trials, "--optuna")
        return []
    return space.grid()


def _named_by_us(members: list[Overrides]) -> list[Overrides]:
    for overrides in members:
        for text in overrides:
            if text.partition("=")[0] in ("name", "run_dir"):
                raise UserMistake(f"override {text}: a sweep names the folders of its members; leave it out.")
    return members


def _first_trial(space: Space) -> Overrides:
    return space.draw(1, 0)[0]


def _check_common(request: Request, configs: Sequence[Config]) -> None:
    """The folder of a sweep is that of all its members, whatever FILE derives from what varies."""
    if request.name is None and len({config.name for config in configs}) > 1:
        raise UserMistake("The members have different names, as FILE derives them from what varies; give a --name.")
    if request.runs is None and len({config.run_dir for config in configs}) > 1:
        raise UserMistake("The members have different run_dir, as FILE derives it from what varies; give --runs.")


def _check_name(name: str) -> None:
    if os.sep in name or name.startswith(".") or not name:
        raise UserMistake(f"--name {name} must be the name of one folder.")


def _check_plot(request: Request) -> None:
    if request.plot is not None and not can_plot():
        raise UserMistake("--plot needs matplotlib: pip install 'shoal[plot]'.")


@contextmanager
def _held(folder: Path, *, changes: bool) -> Iterator[None]:
    """One process at a time runs a sweep."""
    if not changes:
        yield
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserMistake(f"{folder.parent} cannot be written: {error.strerror}.") from None
    lock = folder.with_name(f".{folder.name}.sweep.lock")
    with locked(lock, otherwise=f"Another process runs the sweep in {folder}; wait for it or stop it."):
        yield


def _preview(request: Request, base: Base, found: Sweep, members: Sequence[Member]) -> Outcome:
    known = {entry.name: entry for entry in found.entries}
    listed = Sweep(found.folder, [known.get(member.name, Entry(member)) for member in members])
    script = None
    if request.on == "slurm":
        from shoal.launch.sweep.slurm import render

        script = render(base, listed, dry_run=True)
    return Outcome(gather(listed, request.metric), script=script)


def _left(found: Sweep, members: Sequence[Member], request: Request) -> list[Entry]:
    """What has not ended yet; with --retry-failed, what has failed, too."""
    wanted = {member.name for member in members}
    again = [entry for entry in found.entries if entry.state == "failed" and request.retry_failed]
    left = [entry for entry in found.entries if entry.state not in ENDED and entry.name in wanted]
    return sorted({entry.name: entry for entry in (*left, *again)}.values(), key=lambda entry: entry.name)


def _run(
    request: Request,
    space: Space,
    base: Base,
    found: Sweep,
    members: Sequence[Member],
    report: Callable[[str], None],
) -> bool:
    """Run members here, one after another. Returns whether a signal has stopped the sweep."""
    with stopping() as asked:
        if request.trials is not None:
            _run_trials(request, space, base, found, asked, report)
        else:
            for entry in _left(found, members, request):
                if asked.signal is not None:
                    break
                _announce(found, entry, len(found.entries), report)
                _tell(found, run_member(base, found, entry, asked), request, report)
        return asked.signal is not None


def _run_trials(
    request: Request, space: Space, base: Base, found: Sweep, asked: Stopping, report: Callable[[str], None]
) -> None:
    from shoal.launch.sweep.trials import Trials

    assert request.trials is not None
    config = base.load(_first_trial(space))
    evaluated = config.data.validation not in (0, None)
    metric = Metric(request.metric or ("eval_loss" if evaluated else "loss"))
    trials = Trials(space, found, metric, pruner=request.pruner, seed=request.seed)
    # Those that were stopped or have failed are of earlier proposals.
    left = _left(found, found.members, request)
    while asked.signal is None:
        if left:
            entry = left.pop(0)
            trials.begin(entry)
        elif len(found.entries) < request.trials:
            entry = _propose(request, base, found, _new(trials, found))
            if entry.state == "failed":  # Optuna learns that, and proposes another
                trials.tell(entry)
                _tell(found, entry, request, report)
                continue
        else:
            break
        _announce(found, entry, request.trials, report)
        entry = run_member(base, found, entry, asked, prune=trials.should_prune)
        if entry.state != "stopped":
            trials.tell(entry)
        _tell(found, entry, request, report)


def _propose(request: Request, base: Base, found: Sweep, proposed: Overrides) -> Entry:
    """The member that Optuna proposes; one that cannot be trained, such as one that does not fit, has failed."""
    try:
        (member,) = make_members(base, [proposed], found.members, fits=not request.anyway)
        found.add([member])
        return found.entries[-1]
    except UserMistake as mistake:
        found.add([Member(member_name(len(found.entries), proposed), proposed, NO_CONFIG)])
        return found.update(found.entries[-1], state="failed", error=str(mistake))


def _new(trials: Any, found: Sweep) -> Overrides:
    """A proposal that there was not before: with few values, Optuna repeats itself."""
    known = {entry.member.overrides for entry in found.entries}
    for _ in range(100):
        proposed: Overrides = trials.ask()
        if proposed not in known:
            return proposed
    raise UserMistake(f"Optuna finds no members but the {len(known)} that there are; ask for fewer with --optuna N.")


def _announce(found: Sweep, entry: Entry, count: int, report: Callable[[str], None]) -> None:
    index = [one.name for one in found.entries].index(entry.name) + 1
    report(f"[{index}/{count}] {entry.name}: {entry.member.shown}; log: {found.log_of(entry)}")


def _tell(found: Sweep, entry: Entry, request: Request, report: Callable[[str], None]) -> None:
    table = gather(Sweep(found.folder, [entry]), None)
    value = table.results[0].value
    reached = "" if value is None else f", {table.metric.name} {value:.4f}"
    report(f"    {entry.state}{reached}, {entry.seconds:.0f} s" + (f": {entry.error}" if entry.error else ""))
