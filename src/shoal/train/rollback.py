"""Act on non-finite steps: roll back to the checkpoint before them and skip their sequences, or end the run."""

from collections.abc import Sequence
from typing import NoReturn

from shoal.checkpoint import state, store
from shoal.data.order import around
from shoal.resilience.health import Diverged
from shoal.train.hooks import Fault
from shoal.train.job import AnyJob
from shoal.train.save import checkpoint_folders, finish_save

TRIES = 3  # rollbacks to the same checkpoint; after that the data is not the cause
SEQUENCES_SHOWN = 8


def roll_back(job: AnyJob, bad: Sequence[int]) -> None:
    """Resume from the newest checkpoint before the steps `bad`, and skip their sequences."""
    finish_save(job)  # it may be the checkpoint to roll back to
    job.log.forget()
    job.hooks.on_fault(Fault(job.progress.step, None, f"{_named(bad)} had a non-finite loss or gradient"))
    folders = checkpoint_folders(job.config, job.run)
    found = state.newest(folders, job.ranks, job.reporter.warn, before=bad[0])
    items = "; ".join(f"step {step}: {sequences_of(job, step)}" for step in bad[-3:])
    if found is None:
        raise Diverged(
            f"{_named(bad)} had a non-finite loss or gradient ({items}), and there is no checkpoint before them to "
            "roll back to. Lower train.lr, or checkpoint.every."
        )
    job.rollbacks[found.name] += 1
    if job.rollbacks[found.name] > TRIES:
        raise Diverged(
            f"{_named(bad)} had a non-finite loss or gradient, after {TRIES} rollbacks to {found} that skipped the "
            f"{job.items} of such steps. Lower train.lr."
        )
    left_out, skipped = positions_without(job, bad), job.progress.skipped
    job.load(found)
    job.progress.left_out, job.progress.skipped = left_out, skipped
    job.reporter.warn(
        f"{_named(bad)} had a non-finite loss or gradient ({items}). Rolling back to {found}; these {job.items} are "
        "skipped."
    )
    job.ranks.barrier()  # all ranks have read it
    set_aside(job)
    job.ranks.barrier()


def give_up(job: AnyJob, bad: Sequence[int]) -> NoReturn:
    """End the run because of the steps `bad`, with `Diverged`."""
    finish_save(job)
    start = f"resume from {job.saved}" if job.saved else "restart"
    raise Diverged(
        f"{_named(bad)} had a non-finite loss or gradient; no weights were updated. The last had "
        f"{sequences_of(job, bad[-1])}. Lower train.lr and {start}."
    )


def set_aside(job: AnyJob) -> None:
    """Rank 0 moves aside checkpoints after the current step: they belong to an abandoned run."""
    if not job.ranks.first:
        return
    for folder in checkpoint_folders(job.config, job.run):
        try:
            store.set_aside(folder, above=job.progress.step)
        except OSError as error:  # the next save fails the same way, and all ranks agree on that
            job.reporter.warn(f"checkpoints beyond step {job.progress.step} cannot be moved aside: {error}.")


def positions_without(job: AnyJob, bad: Sequence[int]) -> list[tuple[int, int]]:
    """The positions that are skipped already, and those of these steps."""
    size = job.resolved.global_batch
    spans = [span for step in bad for span in around((step - 1) * size, size, job.progress.left_out)]
    return sorted([*job.progress.left_out, *spans])


def sequences_of(job: AnyJob, step: int) -> str:
    """The sequences or samples of a step, for a message."""
    size = job.resolved.global_batch
    found = job.order.training_sequences((step - 1) * size, size, job.progress.left_out)
    shown = ", ".join(map(str, found[:SEQUENCES_SHOWN].tolist()))
    more = f" and {len(found) - SEQUENCES_SHOWN} more" if len(found) > SEQUENCES_SHOWN else ""
    return f"{job.items} {shown}{more}"


def _named(steps: Sequence[int]) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
