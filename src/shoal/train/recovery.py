"""Handle non-finite losses and spikes: warn with the sequences of the step, stop, or roll back to a checkpoint."""

import math
from collections.abc import Sequence

from shoal.checkpoint import state, store
from shoal.config.schema_train import NanConfig
from shoal.data.order import around
from shoal.resilience.health import Diverged, Rollback, SpikeDetector, spike_settings
from shoal.train.job import Job
from shoal.train.log import StepMetrics
from shoal.train.save import checkpoint_folders, finish_save

TRIES = 3  # rollbacks to the same checkpoint; after that the data is not the cause
SEQUENCES_SHOWN = 8


class Recovery:
    """Checks the metrics of every step. They are the same on every rank, so all ranks decide the same."""

    def __init__(self, job: Job) -> None:
        self.job = job
        setting = job.config.train.on_nan
        self.limit = setting if isinstance(setting, NanConfig) else NanConfig(action=setting)
        spikes = spike_settings(job.config.train.on_spike)
        self.spikes, self.skips_spikes = SpikeDetector(spikes.sigma), spikes.action == "skip"

    def check(self, steps: Sequence[StepMetrics]) -> None:
        """Warn of non-finite steps and spikes. Raises `Rollback` or `Diverged` as `train.on_nan` says."""
        job = self.job
        job.progress.skipped = job.log.skipped
        last, bad = steps[-1], job.progress.bad_steps
        job.progress.loss = last.loss if math.isfinite(last.loss) else None
        bad_now: list[StepMetrics] = []
        for one in steps:
            if not self._is_bad(one):
                bad.clear()
                self._check_spike(one)
                continue
            bad_now.append(one)
            bad.append(one.step)
            if len(bad) >= self.limit.after and self.limit.action != "skip":
                self._give_up(bad)
        if bad_now:
            # An infinite loss may have finite gradients.
            skipped = "" if any(one.usable for one in bad_now) else "; no weights were updated"
            job.reporter.warn(
                f"non-finite loss or gradient in {len(bad_now)} {'step' if len(bad_now) == 1 else 'steps'} up to step "
                f"{last.step}, the last with {sequences_of(job, bad_now[-1].step)}{skipped}."
            )

    def _is_bad(self, one: StepMetrics) -> bool:
        # In 16-mixed an overflowing gradient is handled by the loss scaler and is no sign of divergence.
        overflow = not math.isfinite(one.norm) and not self.job.scaler.enabled
        return overflow or not math.isfinite(one.loss)

    def _check_spike(self, one: StepMetrics) -> None:
        height = self.spikes.update(one.loss)
        if height is not None:
            skipped = self.skips_spikes and not one.usable
            self.job.reporter.warn(
                f"loss spike at step {one.step}: {one.loss:.4f} is {height:.1f} sigma above the recent mean. The step "
                f"had {sequences_of(self.job, one.step)}{' and was skipped' if skipped else ''}."
            )

    def _give_up(self, bad: Sequence[int]) -> None:
        finish_save(self.job)  # a good checkpoint may be pending
        if self.limit.action == "rollback":
            raise Rollback(list(bad))
        start = f"resume from {self.job.saved}" if self.job.saved else "restart"
        raise Diverged(
            f"{_named(bad)} had a non-finite loss or gradient; no weights were updated. The last had "
            f"{sequences_of(self.job, bad[-1])}. Lower train.lr and {start}."
        )


def roll_back(job: Job, bad: Sequence[int]) -> None:
    """Resume from the newest checkpoint before the steps `bad`, and skip their sequences."""
    job.log.forget()
    job.pause_watchdog("rolling back")
    folders = checkpoint_folders(job.config, job.run)
    found = state.newest(folders, job.ranks, job.reporter.warn, before=bad[0])
    sequences = "; ".join(f"step {step}: {sequences_of(job, step)}" for step in bad[-3:])
    if found is None:
        raise Diverged(
            f"{_named(bad)} had a non-finite loss or gradient ({sequences}), and there is no checkpoint before them to "
            "roll back to. Lower train.lr, or checkpoint.every."
        )
    job.rollbacks[found.name] += 1
    if job.rollbacks[found.name] > TRIES:
        raise Diverged(
            f"{_named(bad)} had a non-finite loss or gradient, after {TRIES} rollbacks to {found} that skipped the "
            "sequences of such steps. Lower train.lr."
        )
    left_out, skipped = positions_without(job, bad), job.progress.skipped
    job.load(found)
    job.progress.left_out, job.progress.skipped = left_out, skipped
    job.reporter.warn(
        f"{_named(bad)} had a non-finite loss or gradient ({sequences}). Rolling back to {found}; these sequences are "
        "skipped."
    )
    job.ranks.barrier()  # all ranks have read it
    set_aside(job)
    job.ranks.barrier()


def set_aside(job: Job) -> None:
    """Rank 0 moves aside checkpoints after the current step: they belong to an abandoned run."""
    if not job.ranks.first:
        return
    for folder in checkpoint_folders(job.config, job.run):
        try:
            store.set_aside(folder, above=job.progress.step)
        except OSError as error:  # the next save fails the same way, and all ranks agree on that
            job.reporter.warn(f"checkpoints beyond step {job.progress.step} cannot be moved aside: {error}.")


def positions_without(job: Job, bad: Sequence[int]) -> list[tuple[int, int]]:
    """The positions that are skipped already, and those of these steps."""
    size = job.chosen.global_batch
    spans = [span for step in bad for span in around((step - 1) * size, size, job.progress.left_out)]
    return sorted([*job.progress.left_out, *spans])


def sequences_of(job: Job, step: int) -> str:
    """The sequences of a step, for a message."""
    size = job.chosen.global_batch
    found = job.inputs.sets.order.training_sequences((step - 1) * size, size, job.progress.left_out)
    shown = ", ".join(map(str, found[:SEQUENCES_SHOWN].tolist()))
    more = f" and {len(found) - SEQUENCES_SHOWN} more" if len(found) > SEQUENCES_SHOWN else ""
    return f"sequences {shown}{more}"


def _named(steps: Sequence[int]) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
