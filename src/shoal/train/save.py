"""Save checkpoints during training, and handle a disk that is full or not writable."""

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from shoal.checkpoint import state
from shoal.checkpoint.retention import tidy
from shoal.checkpoint.saver import Destination, Saved, Saver
from shoal.config.load import config_values
from shoal.config.run import RunDirectory
from shoal.config.schema import Config, OffloadConfig
from shoal.mistakes import RunFailed
from shoal.parallel.ranks import Ranks
from shoal.train.job import AnyJob

SAVE_PATIENCE = 10  # times hang_timeout, for a rank that waits for the others to write


class CannotSave(RunFailed):
    """The run failed: no checkpoint can be written."""


def fallback_of(config: Config) -> RunDirectory | None:
    """Where a run saves when its own folder is not writable: a run folder of its own, which can be exported."""
    return None if config.checkpoint.fallback is None else RunDirectory(Path(config.checkpoint.fallback) / config.name)


def checkpoint_folders(config: Config, run: RunDirectory) -> list[Path]:
    """The folders that may hold checkpoints of this run."""
    fallback = fallback_of(config)
    return [run.checkpoints] if fallback is None else [run.checkpoints, fallback.checkpoints]


def make_saver(
    config: Config,
    run: RunDirectory,
    ranks: Ranks,
    *,
    describe: Callable[[RunDirectory], None],
    while_waiting: Callable[[], None],
) -> Saver:
    """`describe` writes plan, model config and tokenizer into a fallback folder that is new. `while_waiting` is called
    regularly while training waits for a save."""
    keep, fallback = config.checkpoint, fallback_of(config)
    destinations = [Destination(run.checkpoints)]
    if fallback is not None:

        def prepare() -> None:
            if not fallback.exists:
                fallback.make(config)
                describe(fallback)

        destinations.append(Destination(fallback.checkpoints, prepare))

    def tidy_up(checkpoints: Path, step: int) -> None:
        tidy(
            checkpoints,
            written=step,
            newest=keep.keep,
            best=keep.keep_best,
            every=keep.keep_every,
            metric=keep.metric,
        )
        if run.replaced.exists:
            with suppress(OSError):  # the next start tries again
                run.replaced.delete()

    return Saver(
        destinations,
        ranks,
        in_background=keep.async_ and not too_large_to_copy(config),
        full=keep.format == "full",
        while_waiting=while_waiting,
        patience=SAVE_PATIENCE * config.train.hang_timeout,
        tidy=tidy_up,
    )


def too_large_to_copy(config: Config) -> bool:
    """Whether the state is offloaded to disk: host memory cannot hold it, and so cannot hold a copy either."""
    offload = config.parallel.offload
    return isinstance(offload, OffloadConfig) and offload.optimizer == "nvme"


def save(job: AnyJob, *, wait: bool) -> None:
    """Start to write a checkpoint, after a pending one. With `wait`, return when it is written. The metrics of every
    step so far are known, so that no checkpoint is written after unnoticed bad steps."""
    assert job.log.caught_up
    job.hooks.on_activity(job.progress.step, "saving")
    job.progress.metrics = metrics_of_this_step(job)
    job.progress.skipped = job.log.skipped
    job.progress.interval = job.interval.state()
    job.progress.stream = job.order.state(job.progress.step * job.resolved.global_batch)
    job.before_save()
    parts = state.collect(
        tensors=job.model.saved,
        placement=job.model.placement,
        optimizer=job.optimizer,
        controls=job.controls,
        ranks=job.ranks,
    )
    texts = {}
    if job.ranks.first:
        texts = {
            state.PROGRESS: json.dumps(asdict(job.progress)),
            state.CONFIG: json.dumps(config_values(job.resolved.requested), indent=1),
        }
    record_save(job, job.saver.save(job.progress.step, parts, texts, job.progress.metrics))
    if wait:
        ended = job.saver.settle()
        record_save(job, ended)
        if ended is None or not (ended.folder or ended.problems):
            raise RuntimeError("another rank failed while it saved")
        if ended.folder is None or ended.unwritable:
            _give_up(job, ended)
        job.cannot_save = False  # the folder is writable again
    job.log.restart_clock()


def poll_save(job: AnyJob) -> None:
    """Record the result of a save that has finished, if any."""
    record_save(job, job.saver.poll())


def finish_save(job: AnyJob) -> None:
    """Wait for a pending save, if any, and record its result."""
    record_save(job, job.saver.settle())


def record_save(job: AnyJob, ended: Saved | None) -> None:
    if ended is None:
        return
    if ended.folder is not None:
        job.saved = ended.folder
    if ended.problems and ended.folder is not None:
        job.reporter.warn(f"step {ended.step} was saved in {ended.folder}, because of {ended.explain()}.")
    elif ended.problems:
        job.reporter.warn(
            f"STEP {ended.step} COULD NOT BE SAVED ({ended.explain()}). Its files were removed; the next save tries "
            "again."
        )
    job.hooks.on_save(ended)
    # All ranks learn of this after the next step, and stop together.
    job.cannot_save = job.cannot_save or ended.unwritable


def _give_up(job: AnyJob, ended: Saved) -> None:
    if ended.folder is not None:
        found = f"Step {ended.step} is in {ended.folder}: continue with --from {ended.folder}."
    else:
        newest = f"; the newest checkpoint is {job.saved}" if job.saved else ""
        found = f"Step {ended.step} could not be saved{newest}. When it can be written again, --resume continues."
    raise CannotSave(f"{job.run.path} cannot be written any more ({ended.explain()}). {found}")


def metrics_of_this_step(job: AnyJob) -> dict[str, float]:
    """The metrics that `checkpoint.keep_best` compares. An earlier evaluation is not of these weights."""
    progress = job.progress
    found: dict[str, float] = {}
    if progress.eval_loss is not None and progress.evaluated_at == progress.step:
        found["eval_loss"] = progress.eval_loss
    if progress.loss is not None:
        found["loss"] = progress.loss
    return found
