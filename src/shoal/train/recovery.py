"""When steps come to nothing: say so, with the rows they were made of, and go back to where all was well."""

import math
from collections.abc import Sequence

from shoal.checkpoint import state, store
from shoal.config.schema_train import NanConfig
from shoal.data.order import around
from shoal.resilience.health import Diverged, Rollback, SpikeWatch, spike_settings
from shoal.train.job import Job
from shoal.train.log import StepNumbers
from shoal.train.save import checkpoint_folders, finish_save

TRIES = 3  # times that a run goes back to the same checkpoint: then its rows are not what is wrong
SEQUENCES_SHOWN = 8


class Recovery:
    """Looks at every step's numbers, which are the same on every rank, and so decides the same."""

    def __init__(self, job: Job) -> None:
        self.job = job
        setting = job.config.train.on_nan
        self.limit = setting if isinstance(setting, NanConfig) else NanConfig(action=setting)
        spikes = spike_settings(job.config.train.on_spike)
        self.spikes, self.skips_spikes = SpikeWatch(spikes.sigma), spikes.action == "skip"

    def look_at(self, steps: Sequence[StepNumbers]) -> None:
        """Notice what is wrong with these steps; raises `Rollback` or `Diverged` if `train.on_nan` says so."""
        job = self.job
        job.progress.skipped = job.log.skipped
        last, bad = steps[-1], job.progress.bad_steps
        job.progress.loss = last.loss if math.isfinite(last.loss) else None
        bad_now: list[StepNumbers] = []
        for one in steps:
            if not self._is_bad(one):
                bad.clear()
                self._look_for_spike(one)
                continue
            bad_now.append(one)
            bad.append(one.step)
            if len(bad) >= self.limit.after and self.limit.action != "skip":
                self._give_up(bad)
        if bad_now:
            # An infinite loss may have finite gradients.
            nothing = "" if any(one.usable for one in bad_now) else ", and changed nothing"
            job.reporter.warn(
                f"up to step {last.step}, {len(bad_now)} {'step' if len(bad_now) == 1 else 'steps'} had a loss or a "
                f"gradient that is not a number, the last with {rows_of(job, bad_now[-1].step)}{nothing}."
            )

    def _is_bad(self, one: StepNumbers) -> bool:
        # In 16-mixed a gradient that overflows is the loss scale's business, and no sign of ill health.
        overflow = not math.isfinite(one.norm) and not self.job.scaler.enabled
        return overflow or not math.isfinite(one.loss)

    def _look_for_spike(self, one: StepNumbers) -> None:
        height = self.spikes.look(one.loss)
        if height is not None:
            left_out = self.skips_spikes and not one.usable
            self.job.reporter.warn(
                f"the loss {one.loss:.4f} at step {one.step} is {height:.1f} sigma above the recent ones; the step had "
                f"{rows_of(self.job, one.step)}{' and was left out' if left_out else ''}."
            )

    def _give_up(self, bad: Sequence[int]) -> None:
        finish_save(self.job)  # a good one may be under way
        if self.limit.action == "rollback":
            raise Rollback(list(bad))
        start = f"resume from {self.job.saved}" if self.job.saved else "start again"
        raise Diverged(
            f"{_named(bad)} had a loss or a gradient that is not a number; they changed no weight. The last had "
            f"{rows_of(self.job, bad[-1])}. Lower train.lr and {start}."
        )


def roll_back(job: Job, bad: Sequence[int]) -> None:
    """Go on from the newest checkpoint before the steps `bad`, and step over their rows this time."""
    job.log.forget()
    job.rest("going back")
    folders = checkpoint_folders(job.config, job.run)
    found = state.newest(folders, job.ranks, job.reporter.warn, before=bad[0])
    rows = "; ".join(f"step {step}: {rows_of(job, step)}" for step in bad[-3:])
    if found is None:
        raise Diverged(
            f"{_named(bad)} had a loss or a gradient that is not a number ({rows}), and there is no checkpoint before "
            "them to go back to. Lower train.lr, or checkpoint.every."
        )
    job.rollbacks[found.name] += 1
    if job.rollbacks[found.name] > TRIES:
        raise Diverged(
            f"{_named(bad)} had a loss or a gradient that is not a number, after going back to {found} {TRIES} times "
            "and stepping over their rows. Lower train.lr."
        )
    left_out, skipped = positions_without(job, bad), job.progress.skipped
    job.load(found)
    job.progress.left_out, job.progress.skipped = left_out, skipped
    job.reporter.warn(f"{_named(bad)} came to nothing ({rows}). Going back to {found}, to go on without those rows.")
    job.ranks.barrier()  # all have read it
    set_aside(job)
    job.ranks.barrier()


def set_aside(job: Job) -> None:
    """What lies beyond the step that the run goes on from belongs to another history; rank 0 puts it away."""
    if not job.ranks.first:
        return
    for folder in checkpoint_folders(job.config, job.run):
        try:
            store.set_aside(folder, above=job.progress.step)
        except OSError as error:  # the next save will find the same, and is agreed on
            job.reporter.warn(f"checkpoints beyond step {job.progress.step} cannot be put away: {error}.")


def positions_without(job: Job, bad: Sequence[int]) -> list[tuple[int, int]]:
    """What is stepped over already, and the positions of these steps."""
    size = job.chosen.global_batch
    spans = [span for step in bad for span in around((step - 1) * size, size, job.progress.left_out)]
    return sorted([*job.progress.left_out, *spans])


def rows_of(job: Job, step: int) -> str:
    """The rows of a step, for reading."""
    size = job.chosen.global_batch
    rows = job.inputs.sets.order.training_sequences((step - 1) * size, size, job.progress.left_out)
    shown = ", ".join(map(str, rows[:SEQUENCES_SHOWN].tolist()))
    return f"rows {shown}" + (f" and {len(rows) - SEQUENCES_SHOWN} more" if len(rows) > SEQUENCES_SHOWN else "")


def _named(steps: Sequence[int]) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
