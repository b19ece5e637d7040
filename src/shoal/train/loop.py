"""The training loop: step, log, evaluate and save, until the last step or a request to stop."""

import math
import time
from collections.abc import Generator, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from shoal.config.run import RunDirectory
from shoal.data.loader import MicroBatch, StepBatch, batches
from shoal.objectives import Objective
from shoal.objectives.evaluate import evaluate_held_out
from shoal.observe.profile.ranges import DATA, annotated
from shoal.observe.progress import duration
from shoal.parallel.ranks import Ranks
from shoal.resilience.agreement import Agreement
from shoal.resilience.health import Action, Decision
from shoal.resilience.out_of_memory import InUse, explained
from shoal.resilience.signals import StopRequest
from shoal.train.conclude import Watch, conclude_step, make_health
from shoal.train.default_hooks import STARTED_ALONE, LaunchContext, default_hooks
from shoal.train.hooks import Fault, Hook, RunStart, StepEnd
from shoal.train.job import Job
from shoal.train.preflight import Preflight
from shoal.train.references import provide_references
from shoal.train.rollback import give_up, roll_back
from shoal.train.samples import write_samples
from shoal.train.save import finish_save
from shoal.train.schedule import make_schedule, peak_lr
from shoal.train.setup import Start, set_up


@dataclass(frozen=True)
class Summary:
    """How a run ended."""

    run: str
    step: int
    steps: int
    tokens: int
    loss_tokens: int
    loss: float | None
    eval_loss: float | None
    skipped: int
    seconds: float
    save_seconds: float  # part of `seconds` in which training waited for checkpoints; it always waits for the last
    checkpoint: str | None
    stopped: str | None  # why the run ended before its last step: "signal" or "early_stop"
    adapter: str = "none"  # its kind

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def _next(self) -> str:
        # The last checkpoint may be in checkpoint.fallback, and the run's own folder would export an older one.
        run = self.run if self.checkpoint is None else Path(self.checkpoint).parent.parent
        if self.adapter == "none":
            return f"shoal export {run} --to hf"
        return f"shoal merge {run}, or for PEFT: shoal export {run} --adapter"

    def text(self) -> str:
        """Human-readable summary with the next command to run."""
        loss = "–" if self.loss is None else f"{self.loss:.4f}"
        eval_loss = "" if self.eval_loss is None else f", eval loss {self.eval_loss:.4f}"
        why = "" if self.stopped is None else f" ({self.stopped.replace('_', ' ')})"
        return "\n".join(
            [
                f"step        {self.step} of {self.steps}{why}, {self.tokens:,} tokens, {duration(self.seconds)}",
                f"loss        {loss}{eval_loss}",
                f"checkpoint  {self.checkpoint}",
                f"next        {self._next}",
            ]
        )


def train(
    checked: Preflight,
    run: RunDirectory,
    ranks: Ranks,
    start: Start,
    *,
    stop: StopRequest | None = None,
    context: LaunchContext = STARTED_ALONE,
    hooks: Sequence[Hook] = (),
    objective: Objective | None = None,
) -> Summary:
    """Train on this rank, together with the others. `stop` is given if signal handlers are installed already.
    `objective`: in place of that of the config."""
    began = time.perf_counter()
    with StopRequest() if stop is None else nullcontext(stop) as stop_request:
        job = set_up(checked, run, ranks, start, objective)
        job.hooks.add(*default_hooks(job, context, hooks))
        failure: BaseException | None = None
        try:
            with explained(
                job.resolved,
                ranks,
                when=lambda: _current_step(job),
                in_use=lambda: _in_use(job),
                before=lambda: finish_save(job),
            ):
                job.hooks.on_run_start(RunStart(run.path, job.resolved, ranks, job.progress.step, job.inputs.steps))
                provide_references(job)
                stopped = fit(job, stop_request)
        except BaseException as error:
            failure = error
            job.hooks.on_fault(Fault(job.progress.step, error, str(error)))
            raise
        finally:
            job.hooks.on_run_end(failure)
    progress = job.progress
    return Summary(
        run=str(run.path),
        step=progress.step,
        steps=job.inputs.steps,
        tokens=progress.tokens,
        loss_tokens=progress.loss_tokens,
        loss=progress.loss,
        eval_loss=progress.eval_loss,
        skipped=progress.skipped,
        seconds=round(time.perf_counter() - began, 1),
        save_seconds=round(job.saver.waited, 3),
        checkpoint=str(job.saved) if job.saved else None,
        stopped=stopped,
        adapter=job.config.adapter.kind,
    )


def fit(job: Job, stop: StopRequest) -> str | None:
    """Run the remaining steps, with rollbacks. Returns why the run stopped early, if it did."""
    with Agreement(job.ranks, job.hooks) as agreement:
        watch = Watch(stop, agreement, make_health(job))
        while True:
            decision, stopped = run_steps(job, watch)
            if decision.action is Action.STOP:
                give_up(job, decision.steps)
            if decision.action is not Action.ROLL_BACK:
                return stopped
            roll_back(job, decision.steps)


def run_steps(job: Job, watch: Watch) -> tuple[Decision, str | None]:
    """Train from the current step to the last one, or to one after which health decides otherwise. Also returns why
    the run stopped early, if it did."""
    config, progress = job.config, job.progress
    factor_at = make_schedule(config.train.schedule, job.inputs.steps)
    lr = peak_lr(config.train)
    stopped = "early_stop" if job.no_longer_improves else None  # as before it was resumed
    with closing(step_batches(job)) as stream:
        while progress.step < job.inputs.steps and stopped is None:
            began = time.perf_counter()
            with annotated(DATA):
                batch = next(stream)
            data_seconds = time.perf_counter() - began

            step_lr = lr * factor_at(progress.step)
            with job.communication.step():
                result = job.step(batch, step_lr)
            progress.step += 1
            progress.tokens += batch.tokens
            progress.loss_tokens += batch.weight

            arrived = job.log.after_step(
                progress.step,
                result,
                lr=step_lr,
                tokens=batch.tokens,
                total_tokens=progress.tokens,
                loss_tokens=progress.loss_tokens,
                positions=sum(one.inputs.numel() for one in batch.micro_batches),
                flops=sum(job.flops(*one.inputs.shape) for one in batch.micro_batches),
                data_seconds=data_seconds,
                save_seconds=job.saver.waited,
            )
            job.hooks.on_step_end(StepEnd(progress.step, data_seconds, job.log.step_seconds))

            last = progress.step == job.inputs.steps
            evaluates = job.inputs.sets.validation is not None and (last or progress.step % config.eval.every == 0)
            decision, stopped = conclude_step(
                job, watch, arrived, evaluate=partial(evaluate, job) if evaluates else None
            )
            if not decision.continues:
                return decision, None
    finish_save(job)
    if stopped is not None:
        job.hooks.on_stop(progress.step, stopped)
    return Decision(Action.CONTINUE), stopped


def step_batches(job: Job) -> Generator[StepBatch, None, None]:
    """This rank's micro-batches, from the current step on."""
    config, sets = job.config, job.inputs.sets
    return batches(
        sets.training,
        sets.order,
        first_step=job.progress.step,
        global_batch=job.resolved.global_batch,
        micro_batch=job.resolved.micro_batch,
        rank=job.model.parallel_dims.data_rank,
        ranks=job.resolved.data_parallel,
        pad=job.inputs.tokenizer.pad,
        length=job.model.sequence_length,
        multiple=job.model.sequence_multiple,
        workers=config.data.workers,
        pin=job.ranks.device.type == "cuda",
        left_out=job.progress.left_out,
        collate=job.objective.collate,
        weigh=job.objective.weight,
    )


def evaluate(job: Job) -> None:
    """Compute the metrics of the validation set, and record whether its loss is the best so far."""
    progress, config = job.progress, job.config

    def measure(some: Sequence[MicroBatch]) -> Tensor:
        job.hooks.on_activity(progress.step, "evaluating")
        return job.model.measure(some)

    found = evaluate_held_out(
        measure,
        job.inputs.sets,
        job.objective,
        micro_batch=job.resolved.micro_batch,
        sequences=config.eval.batches * job.resolved.global_batch,
        pad=job.inputs.tokenizer.pad,
        ranks=job.ranks,
        share=(job.model.parallel_dims.data_rank, job.resolved.data_parallel),
        length=job.model.sequence_length,
        multiple=job.model.sequence_multiple,
        at_once=job.resolved.grad_accum_steps,
    )
    metrics = {f"eval_{name}": value if math.isfinite(value) else None for name, value in found.metrics.items()}
    now = round(time.time(), 3)
    job.hooks.on_evaluation(
        {"step": progress.step, "attempt": job.log.attempt, "time": now, **metrics}
    )  # JSON has no NaN
    write_samples(job)
    loss = metrics["eval_loss"]
    progress.evaluated_at, progress.eval_loss = progress.step, loss
    if loss is not None and (progress.best is None or loss < progress.best):
        progress.best, progress.evaluations_without_gain = loss, 0
    else:
        progress.evaluations_without_gain += 1
    job.log.restart_clock()


def _current_step(job: Job) -> str:
    return f"in step {job.progress.step + 1}"


def _in_use(job: Job) -> InUse:
    weights = [*job.model.saved.values(), *job.model.low_precision.values()]
    return InUse(weights, job.optimizer.state().values(), job.model.parallel_dims.coordinate["pp"])
