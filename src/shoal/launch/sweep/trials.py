"""Optuna chooses the values of the next member by what the others have reached, and ends members that do worse.

The study lives in memory: sweep.json and the metrics of the members are all of its state, so that it continues after
any end, and no database is needed.
"""

import importlib.util
import logging
from typing import TYPE_CHECKING, Any

from shoal.launch.sweep.results import Metric
from shoal.launch.sweep.space import Overrides, Range, Space
from shoal.launch.sweep.state import Entry, Sweep
from shoal.mistakes import UserMistake
from shoal.observe.metrics import read_lines

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

PRUNERS = ("median", "hyperband", "none")
STARTUP_TRIALS = 4  # that are not pruned: there is little to compare with


class Trials:
    """Asks Optuna for members, and tells it how they end."""

    def __init__(self, space: Space, sweep: Sweep, metric: Metric, *, pruner: str, seed: int) -> None:
        if importlib.util.find_spec("optuna") is None:
            raise UserMistake("--optuna needs Optuna: pip install 'shoal[sweep]'.")
        import optuna

        logging.getLogger("optuna").setLevel(logging.WARNING)
        self.space, self.sweep, self.metric = space, sweep, metric
        # Another seed for each start: with the same one, it would propose again what it has proposed before.
        self.study = optuna.create_study(
            direction="maximize" if metric.maximized else "minimize",
            sampler=optuna.samplers.TPESampler(seed=seed + len(sweep.entries), n_startup_trials=STARTUP_TRIALS),
            pruner=_pruner(pruner),
        )
        self._running: Any = None  # the trial of the member that runs
        self._reported = -1
        self._looked = 0
        for entry in sweep.entries:
            if entry.state in ("done", "pruned", "failed"):
                self._add(entry)

    def ask(self) -> Overrides:
        """The overrides of a new member."""
        self._running, self._reported = self.study.ask(self._distributions()), -1
        values = [
            axis.written(self._running.params[axis.key]) if isinstance(axis, Range) else self._running.params[axis.key]
            for axis in self.space.varied
        ]
        return self.space.assign(values)

    def begin(self, entry: Entry) -> None:
        """A member runs that was not asked for now: one that was stopped, or that has failed before."""
        self.study.enqueue_trial(self._parameters(entry))
        self._running, self._reported = self.study.ask(self._distributions()), -1

    def should_prune(self, entry: Entry) -> bool:
        """Report what the member has logged since the last look; whether it does worse than the others."""
        path = self.sweep.run_of(entry) / "metrics.jsonl"
        if not path.is_file() or path.stat().st_size == self._looked:
            return False
        self._looked = path.stat().st_size
        for step, value in self.metric.curve(read_lines(path)).items():
            if step > self._reported:
                self._running.report(value, step)
                self._reported = step
                if self._running.should_prune():
                    return True
        return False

    def tell(self, entry: Entry) -> None:
        """How the member that runs has ended."""
        import optuna

        states = optuna.trial.TrialState
        value = self._value(entry) if entry.state == "done" else None
        state = {"done": states.COMPLETE, "pruned": states.PRUNED}.get(entry.state, states.FAIL)
        self.study.tell(self._running, value, states.FAIL if state is states.COMPLETE and value is None else state)

    def _add(self, entry: Entry) -> None:
        """A member of an earlier start."""
        import optuna

        curve, value = self._curve(entry), self._value(entry)
        state = (
            "FAIL" if entry.state == "failed" or value is None else "PRUNED" if entry.state == "pruned" else "COMPLETE"
        )
        self.study.add_trial(
            optuna.create_trial(
                params=self._parameters(entry),
                distributions=self._distributions(),
                intermediate_values=curve,
                value=value if state == "COMPLETE" else None,
                state=optuna.trial.TrialState[state],
            )
        )

    def _curve(self, entry: Entry) -> dict[int, float]:
        path = self.sweep.run_of(entry) / "metrics.jsonl"
        return self.metric.curve(read_lines(path)) if path.is_file() else {}

    def _value(self, entry: Entry) -> float | None:
        path = self.sweep.run_of(entry) / "metrics.jsonl"
        return self.metric.value(read_lines(path)) if path.is_file() else None

    def _parameters(self, entry: Entry) -> dict[str, Any]:
        given = dict(override.split("=", 1) for override in entry.member.overrides)
        wanted = {axis.key for axis in self.space.varied}
        if given.keys() != wanted:
            raise UserMistake(
                f"{entry.name} varies {', '.join(given) or 'nothing'}, but this command {', '.join(wanted)}; give the "
                "sweep another --name."
            )
        found: dict[str, Any] = {}
        for axis in self.space.varied:
            text = given[axis.key]
            if isinstance(axis, Range):
                found[axis.key] = int(text) if axis.whole else min(max(float(text), axis.low), axis.high)
            else:
                found[axis.key] = text
        return found

    def _distributions(self) -> "dict[str, BaseDistribution]":
        from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

        found: dict[str, BaseDistribution] = {}
        for axis in self.space.varied:
            if not isinstance(axis, Range):
                found[axis.key] = CategoricalDistribution(axis.values)
            elif axis.whole:
                found[axis.key] = IntDistribution(int(axis.low), int(axis.high), log=axis.logarithmic)
            else:
                found[axis.key] = FloatDistribution(axis.low, axis.high, log=axis.logarithmic)
        return found


def _pruner(name: str) -> Any:
    import optuna

    if name == "median":
        return optuna.pruners.MedianPruner(n_startup_trials=STARTUP_TRIALS)
    return optuna.pruners.HyperbandPruner() if name == "hyperband" else optuna.pruners.NopPruner()
