"""What follows every optimizer step: judge it, evaluate, agree with the other ranks, save. For all training loops."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shoal.observe.profile.ranges import EVALUATION, SAVE, annotated
from shoal.resilience.agreement import Agreement
from shoal.resilience.health import Action, Decision, Health, StepMetrics
from shoal.resilience.signals import StopRequest
from shoal.train.job import AnyJob
from shoal.train.rollback import sequences_of
from shoal.train.save import finish_save, poll_save, save


@dataclass(frozen=True)
class Watch:
    """What watches the steps of a run."""

    stop: StopRequest
    agreement: Agreement
    health: Health


def make_health(job: AnyJob) -> Health:
    return Health(
        job.config.train,
        scaled=job.scaler.enabled,
        sequences_of=lambda step: sequences_of(job, step),
        warn=job.reporter.warn,
    )


def conclude_step(
    job: AnyJob, watch: Watch, arrived: Sequence[StepMetrics], *, evaluate: Callable[[], None] | None = None
) -> tuple[Decision, str | None]:
    """After a step, whose metrics, or those of earlier steps, have `arrived`: decide how the run goes on, `evaluate` if
    it is time to, and save if it is. Also returns why the run stops early, if it does."""
    config, progress = job.config, job.progress
    last = progress.step == job.steps
    decision = decide(job, watch.health, [*arrived, *(job.log.catch_up() if evaluate is not None else [])])
    if evaluate is not None and decision.continues:
        with annotated(EVALUATION):
            evaluate()
    agreed = watch.agreement.after_step(stop=watch.stop.wanted, cannot_save=job.cannot_save)
    stopped = None
    if not last:
        early = evaluate is not None and job.no_longer_improves
        stopped = "early_stop" if early else "signal" if agreed.stop else None
    ends = last or stopped is not None or agreed.cannot_save
    saves = job.interval.due(progress.step) or (config.checkpoint.at_end if last else ends)
    if (ends or saves) and decision.continues:
        decision = decide(job, watch.health, job.log.catch_up())  # no checkpoint after unnoticed bad steps
    if not decision.continues:
        return decision, None
    with annotated(SAVE):
        finish_save(job) if saves else poll_save(job)
        job.interval.settle(all_saved=saves)
        if saves:
            save(job, wait=ends)
    return decision, stopped


def decide(job: AnyJob, health: Health, arrived: Sequence[StepMetrics]) -> Decision:
    """Record the metrics that have arrived from the device, and judge them."""
    if not arrived:
        return Decision(Action.CONTINUE)
    progress, last = job.progress, arrived[-1]
    progress.skipped = job.log.skipped
    progress.loss = last.loss if math.isfinite(last.loss) else None
    return health.decide(arrived, progress.bad_steps, progress.losses)
