"""Saving while training: what goes into a checkpoint, and what to do when the disk does not take it."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from shoal.checkpoint import state
from shoal.checkpoint.retention import tidy
from shoal.checkpoint.saver import Place, Saved, Saver
from shoal.config.load import config_values
from shoal.config.run import RunDirectory
from shoal.config.schema import Config, OffloadConfig
from shoal.mistakes import RunFailed
from shoal.parallel.ranks import Ranks
from shoal.train.job import Job

SAVE_PATIENCE = 10  # times hang_timeout, for a rank that waits for what others write


class CannotSave(RunFailed):
    """The run failed: what it has learnt cannot be kept."""


def fallback_of(config: Config) -> RunDirectory | None:
    """Where a run saves when its own folder does not take it: a small run folder of its own, that can be exported."""
    return None if config.checkpoint.fallback is None else RunDirectory(Path(config.checkpoint.fallback) / config.name)


def checkpoint_folders(config: Config, run: RunDirectory) -> list[Path]:
    """Where this run's checkpoints may be."""
    fallback = fallback_of(config)
    return [run.checkpoints] if fallback is None else [run.checkpoints, fallback.checkpoints]


def make_saver(config: Config, run: RunDirectory, ranks: Ranks, describe: Callable[[RunDirectory], None]) -> Saver:
    """`describe` writes what belongs beside checkpoints, for a fallback that has none of it yet."""
    keep, fallback = config.checkpoint, fallback_of(config)
    places = [Place(run.checkpoints)]
    if fallback is not None:

        def prepare() -> None:
            if not fallback.exists:
                fallback.make(config)
                describe(fallback)

        places.append(Place(fallback.checkpoints, prepare))
    return Saver(
        places,
        ranks,
        in_background=keep.async_ and not too_large_to_copy(config),
        full=keep.format == "full",
        patience=SAVE_PATIENCE * config.train.hang_timeout,
        tidy=lambda checkpoints, step: tidy(
            checkpoints,
            written=step,
            newest=keep.keep,
            best=keep.keep_best,
            every=keep.keep_every,
            metric=keep.metric,
        ),
    )


def too_large_to_copy(config: Config) -> bool:
    """Whether the state is kept on disk because the host's memory cannot hold it: then it cannot hold a copy either."""
    offload = config.parallel.offload
    return isinstance(offload, OffloadConfig) and offload.optimizer == "nvme"


def save(job: Job, *, wait: bool) -> None:
    """Begin a checkpoint; with `wait`, also end it. One that was under way is waited for first."""
    job.log.catch_up()
    job.beat("saving")
    job.progress.metrics = metrics_of_this_step(job)
    job.progress.skipped = job.log.skipped
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
            state.CONFIG: json.dumps(config_values(job.config), indent=1),
        }
    record_save(job, job.saver.save(job.progress.step, parts, texts, job.progress.metrics))
    if wait:
        ended = job.saver.settle()
        record_save(job, ended)
        if ended is None or not (ended.folder or ended.problems):
            raise RuntimeError("another rank failed while it saved")
        if ended.folder is None or ended.unwritable:
            _give_up(job, ended)
        job.cannot_save = False  # what was in the way is not any more
    job.log.restart_clock()


def poll_save(job: Job) -> None:
    """Take note of how a save ended, if one has."""
    record_save(job, job.saver.poll())


def finish_save(job: Job) -> None:
    """Wait for the save that is under way, if one is, and take note of how it ended."""
    record_save(job, job.saver.settle())


def record_save(job: Job, ended: Saved | None) -> None:
    if ended is None:
        return
    if ended.folder is not None:
        job.saved = ended.folder
    if ended.problems and ended.folder is not None:
        job.reporter.warn(f"step {ended.step} was saved in {ended.folder}, because of {ended.explain()}.")
    elif ended.problems:
        job.reporter.warn(
            f"STEP {ended.step} COULD NOT BE SAVED ({ended.explain()}). Nothing of it was left behind; the next save "
            "tries again."
        )
    # All ranks learn of this with the next pulse, and stop together.
    job.cannot_save = job.cannot_save or ended.unwritable


def _give_up(job: Job, ended: Saved) -> None:
    if ended.folder is not None:
        found = f"Step {ended.step} is in {ended.folder}: go on from there with --from {ended.folder}."
    else:
        found = "Nothing of it could be saved" + (f"; the newest checkpoint is {job.saved}." if job.saved else ".")
    raise CannotSave(f"{job.run.path} cannot be written any more ({ended.explain()}). {found}")


def metrics_of_this_step(job: Job) -> dict[str, float]:
    """What the checkpoint may be chosen by. An older evaluation says nothing about these weights."""
    progress = job.progress
    found: dict[str, float] = {}
    if progress.eval_loss is not None and progress.evaluated_at == progress.step:
        found["eval_loss"] = progress.eval_loss
    if progress.loss is not None:
        found["loss"] = progress.loss
    return found
