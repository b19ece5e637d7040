"""The training loop: step, log, evaluate and save, until the last step or a request to stop."""

import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from shoal.config.run import RunDirectory
from shoal.config.schema import Config
from shoal.data.loader import MicroBatch, batches
from shoal.observe.metrics import Line
from shoal.observe.progress import duration
from shoal.parallel.evaluate import held_out_loss
from shoal.parallel.ranks import Ranks
from shoal.resilience.agreement import Agreement
from shoal.resilience.health import Rollback, StopRequest
from shoal.resilience.stragglers import StragglerDetector
from shoal.resilience.watchdog import Watchdog
from shoal.train.compare import Comparison
from shoal.train.inputs import Inputs
from shoal.train.job import Job
from shoal.train.out_of_memory import explained
from shoal.train.recovery import Recovery, roll_back
from shoal.train.save import finish_save, poll_save, save
from shoal.train.schedule import make_schedule, peak_lr
from shoal.train.setup import Start, set_up


@dataclass(frozen=True)
class Summary:
    """How a run ended."""

    run: str
    step: int
    steps: int
    tokens: int
    loss: float | None
    eval_loss: float | None
    skipped: int
    seconds: float
    save_seconds: float  # part of `seconds` in which training waited for checkpoints; it always waits for the last
    checkpoint: str | None
    stopped: str | None  # why the run ended before its last step: "signal" or "early_stop"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def text(self) -> str:
        """Human-readable summary with the next command to run."""
        loss = "–" if self.loss is None else f"{self.loss:.4f}"
        eval_loss = "" if self.eval_loss is None else f", eval loss {self.eval_loss:.4f}"
        why = "" if self.stopped is None else f" ({self.stopped.replace('_', ' ')})"
        return "\n".join(
            [
                f"step        {self.step} of {self.steps}{why}, {self.tokens:,} loss tokens, {duration(self.seconds)}",
                f"loss        {loss}{eval_loss}",
                f"checkpoint  {self.checkpoint}",
                f"next        shoal export {self.run} --to hf",
            ]
        )


def train(
    config: Config,
    inputs: Inputs,
    run: RunDirectory,
    ranks: Ranks,
    start: Start,
    *,
    stop: StopRequest | None = None,
    heartbeats: Path | None = None,
    tell: Callable[[str], None] = lambda sentence: print(f"shoal: {sentence}", file=sys.stderr),
) -> Summary:
    """Train on this rank, together with the others.

    `stop` is given if signal handlers are installed already. `heartbeats` is a file shared by the ranks of this node,
    through which the watchdog of each sees the others. `tell` receives the watchdog's message when it ends a hung run.
    """
    began = time.perf_counter()
    with StopRequest() if stop is None else nullcontext(stop) as stop_request:
        job = set_up(config, inputs, run, ranks, start)
        job.reporter.begin(job.progress.step, job.inputs.steps)
        folder = run.logs / f"hang-{job.log.attempt}"
        try:
            watchdog = Watchdog(folder, ranks, config.train.hang_timeout, heartbeats=heartbeats, tell=tell)
            with watchdog, explained(job.forecast, ranks, job):
                job.heartbeat = lambda activity: watchdog.heartbeat(job.progress.step, activity)
                job.pause_watchdog = lambda activity: watchdog.pause(job.progress.step, activity)
                stopped = fit(job, stop_request)
                watchdog.ended()
        finally:
            job.reporter.end()
            job.log.close()
    progress = job.progress
    return Summary(
        run=str(run.path),
        step=progress.step,
        steps=job.inputs.steps,
        tokens=progress.tokens,
        loss=progress.loss,
        eval_loss=progress.eval_loss,
        skipped=progress.skipped,
        seconds=round(time.perf_counter() - began, 1),
        save_seconds=round(job.saver.waited, 3),
        checkpoint=str(job.saved) if job.saved else None,
        stopped=stopped,
    )


def fit(job: Job, stop: StopRequest) -> str | None:
    """Run the remaining steps, with rollbacks. Returns why the run stopped early, if it did."""
    job.log.on_steps = Recovery(job).check
    comparison = Comparison(job)
    job.log.on_line = comparison.update
    stragglers = StragglerDetector(job.config.train.slow_rank, job.ranks.world_size, job.reporter.warn)
    with Agreement(job.ranks, stragglers) as agreement:
        while True:
            try:
                stopped = run_steps(job, stop, agreement)
                comparison.end()
                return stopped
            except Rollback as rollback:
                roll_back(job, rollback.steps)


def run_steps(job: Job, stop: StopRequest, agreement: Agreement) -> str | None:
    """Train from the current step to the last. Returns why the run stopped early, if it did."""
    config, progress, sets, ranks = job.config, job.progress, job.inputs.sets, job.ranks
    factor_at = make_schedule(config.train.schedule, job.inputs.steps)
    lr = peak_lr(config.train)
    stopped = None
    stream = batches(
        sets.training,
        sets.order,
        first_step=progress.step,
        global_batch=job.chosen.global_batch,
        micro_batch=job.chosen.micro_batch,
        rank=job.model.parallel_dims.data_rank,
        ranks=job.chosen.data_parallel,
        pad=job.inputs.tokenizer.pad,
        length=job.model.sequence_length,
        multiple=job.model.sequence_multiple,
        workers=config.data.workers,
        pin=ranks.device.type == "cuda",
        left_out=progress.left_out,
    )
    with closing(stream):
        while progress.step < job.inputs.steps and stopped is None:
            began = time.perf_counter()
            batch = next(stream)
            data_seconds = time.perf_counter() - began

            step_lr = lr * factor_at(progress.step)
            result = job.step(batch, step_lr)
            progress.step += 1
            progress.tokens += batch.loss_tokens

            job.log.after_step(
                progress.step,
                result,
                lr=step_lr,
                tokens=progress.tokens,
                positions=sum(one.inputs.numel() for one in batch.micro_batches),
                flops=sum(job.flops(*one.inputs.shape) for one in batch.micro_batches),
                data_seconds=data_seconds,
            )
            job.heartbeat("training")

            last = progress.step == job.inputs.steps
            if sets.validation is not None and (last or progress.step % config.eval.every == 0):
                evaluate(job)
                if no_longer_improves(job):
                    stopped = "early_stop"
            agreed = agreement.after_step(
                stop=stop.wanted,
                cannot_save=job.cannot_save,
                data_seconds=data_seconds,
                step_seconds=job.log.step_seconds,
            )
            if agreed.stop and not last and stopped is None:
                stopped = "signal"
            final = last or stopped is not None or agreed.cannot_save
            save_now = config.checkpoint.at_end if last else final
            if save_now or progress.step % config.checkpoint.every == 0:
                save(job, wait=final)
            else:
                poll_save(job)
    job.log.flush()
    finish_save(job)
    return stopped


def evaluate(job: Job) -> None:
    """Log the loss on the validation set, and record whether it is the best so far."""
    progress, config = job.progress, job.config
    job.log.flush()

    def measure(some: Sequence[MicroBatch]) -> Tensor:
        job.heartbeat("evaluating")
        return job.model.measure(some)

    found = held_out_loss(
        measure,
        job.inputs.sets,
        micro_batch=job.chosen.micro_batch,
        sequences=config.eval.batches * job.chosen.global_batch,
        pad=job.inputs.tokenizer.pad,
        ranks=job.ranks,
        share=(job.model.parallel_dims.data_rank, job.chosen.data_parallel),
        length=job.model.sequence_length,
        multiple=job.model.sequence_multiple,
        at_once=job.chosen.grad_accum_steps,
    )
    loss = found.loss if math.isfinite(found.loss) else None  # JSON has no NaN
    perplexity = None if loss is None else found.perplexity
    line: Line = {"step": progress.step, "attempt": job.log.attempt, "eval_loss": loss, "eval_perplexity": perplexity}
    job.log.write(line)
    job.reporter.say(f"step {progress.step}  evaluation: loss {found.loss:.4f}, perplexity {found.perplexity:.2f}")
    progress.evaluated_at, progress.eval_loss = progress.step, loss
    if loss is not None and (progress.best is None or loss < progress.best):
        progress.best, progress.evaluations_without_gain = loss, 0
    else:
        progress.evaluations_without_gain += 1
    job.log.restart_clock()


def no_longer_improves(job: Job) -> bool:
    """Whether `train.early_stop` ends the run: `patience` evaluations without a better loss."""
    stop = job.config.train.early_stop
    return stop is not None and job.progress.evaluations_without_gain >= stop.patience
