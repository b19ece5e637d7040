"""The training loop, top to bottom: step, log, evaluate, save, until it is done or asked to stop."""

import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shoal.checkpoint import state, store
from shoal.checkpoint.retention import tidy
from shoal.config.run import RunDirectory
from shoal.config.schema import Config
from shoal.data.loader import batches
from shoal.observe.metrics import Line
from shoal.observe.progress import duration
from shoal.parallel.evaluate import held_out_loss
from shoal.parallel.ranks import Ranks
from shoal.train.health import Diverged, SpikeWatch, StopRequest, spike_sigma
from shoal.train.inputs import Inputs
from shoal.train.schedule import make_schedule, peak_rate
from shoal.train.setup import Job, set_up


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
    checkpoint: str | None
    stopped: str | None  # why it ended before its last step: "signal", "early_stop"; None: it did not

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def text(self) -> str:
        """For reading, with the next command to try."""
        loss = "–" if self.loss is None else f"{self.loss:.4f}"
        held_out = "" if self.eval_loss is None else f", held out {self.eval_loss:.4f}"
        why = "" if self.stopped is None else f" ({self.stopped.replace('_', ' ')})"
        return "\n".join(
            [
                f"step        {self.step} of {self.steps}{why}, {self.tokens:,} targets, {duration(self.seconds)}",
                f"loss        {loss}{held_out}",
                f"checkpoint  {self.checkpoint}",
                f"next        shoal export {self.run} --to hf",
            ]
        )


def train(
    config: Config, inputs: Inputs, run: RunDirectory, ranks: Ranks, *, resume: bool, start_from: Path | None
) -> Summary:
    """Train on this rank, together with the others."""
    began = time.perf_counter()
    job = set_up(config, inputs, run, ranks, resume=resume, start_from=start_from)
    job.reporter.begin(job.progress.step, job.inputs.steps)
    try:
        stopped = fit(job)
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
        checkpoint=str(job.saved) if job.saved else None,
        stopped=stopped,
    )


def fit(job: Job) -> str | None:
    """Run the steps that are left; returns why it stopped early, if it did."""
    config, progress, sets = job.config, job.progress, job.inputs.sets
    factor_at = make_schedule(config.train.schedule, job.inputs.steps)
    rate = peak_rate(config.train)
    spikes = SpikeWatch(spike_sigma(config.train.on_spike))
    job.log.listener = lambda line: look_after(job, line, spikes)
    stopped = None
    stream = batches(
        sets.training,
        sets.order,
        first_step=progress.step,
        global_batch=job.chosen.global_batch,
        micro_batch=job.chosen.micro_batch,
        rank=job.model.grid.data_rank,
        ranks=job.chosen.data_parallel,
        pad=job.inputs.tokenizer.pad,
        length=job.model.row_length,
        multiple=job.model.row_multiple,
        workers=config.data.workers,
        pin=job.ranks.device.type == "cuda",
    )
    with StopRequest(job.ranks) as stop:
        while progress.step < job.inputs.steps and stopped is None:
            asked = time.perf_counter()
            batch = next(stream)
            waited = time.perf_counter() - asked

            step_rate = rate * factor_at(progress.step)
            result = job.step(batch, step_rate)
            progress.step += 1
            progress.tokens += batch.targets

            job.log.after_step(
                progress.step,
                result,
                rate=step_rate,
                tokens=progress.tokens,
                flops=sum(job.flops(*one.inputs.shape) for one in batch.passes),
                data_seconds=waited,
            )

            last = progress.step == job.inputs.steps
            if sets.validation is not None and (last or progress.step % config.eval.every == 0):
                evaluate(job)
                if no_longer_improves(job):
                    stopped = "early_stop"
            if stop.agreed() and not last:
                stopped = "signal"
            if last or stopped or progress.step % config.checkpoint.every == 0:
                save(job)
        stop.settle()
    stream.close()
    return stopped


def look_after(job: Job, line: Line, spikes: SpikeWatch) -> None:
    """Notice what a written line says about the run's health. Steps between two lines show in what was skipped."""
    skipped = int(line["skipped"] or 0) - job.progress.skipped
    job.progress.skipped += skipped
    job.progress.loss = None if line["loss"] is None else float(line["loss"])
    # In 16-mixed a gradient that overflows is the loss scale's business, and no sign of ill health.
    if line["loss"] is None or (skipped and not job.scaler.enabled):
        found = f"up to step {line['step']}, {max(1, skipped)} steps had a loss or a gradient that is not a number"
        if job.config.train.on_nan == "stop":
            start = f"resume from {job.saved}" if job.saved else "start again"
            raise Diverged(f"{found}; they changed no weight. Lower train.lr and {start}.")
        job.reporter.warn(f"{found}, and were skipped.")
    elif line["loss"] is not None and (height := spikes.look(float(line["loss"]))) is not None:
        place = f"step {line['step']}"
        job.reporter.warn(f"the loss {line['loss']:.4f} at {place} is {height:.1f} sigma above the recent ones.")


def evaluate(job: Job) -> None:
    """Write the loss on held-out rows, and remember whether it is the best so far."""
    progress, config = job.progress, job.config
    job.log.flush()
    found = held_out_loss(
        job.model.measure,
        job.inputs.sets,
        micro_batch=job.chosen.micro_batch,
        rows=config.eval.batches * job.chosen.global_batch,
        pad=job.inputs.tokenizer.pad,
        ranks=job.ranks,
        share=(job.model.grid.data_rank, job.chosen.data_parallel),
        length=job.model.row_length,
        multiple=job.model.row_multiple,
        at_once=job.chosen.passes,
    )
    loss = found.loss if math.isfinite(found.loss) else None  # NaN is no JSON
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
    """Whether `train.early_stop` has seen enough evaluations without a better loss."""
    stop = job.config.train.early_stop
    return stop is not None and job.progress.evaluations_without_gain >= stop.patience


def save(job: Job) -> None:
    """Write a checkpoint, then remove those that need not stay."""
    job.log.flush()
    job.progress.metrics = metrics_of_this_step(job)
    state.save(
        job.run.checkpoints,
        tensors=job.model.saved,
        placement=job.model.placement,
        optimizer=job.optimizer,
        scaler=job.scaler,
        progress=job.progress,
        ranks=job.ranks,
    )
    job.saved = store.folder_for(job.run.checkpoints, job.progress.step)
    if job.ranks.first:
        keep = job.config.checkpoint
        tidy(job.run.checkpoints, written=job.progress.step, newest=keep.keep, best=keep.keep_best, metric=keep.metric)
    job.log.restart_clock()


def metrics_of_this_step(job: Job) -> dict[str, float]:
    """What the checkpoint may be chosen by. An older evaluation says nothing about these weights."""
    progress, last = job.progress, job.log.last
    found: dict[str, float] = {}
    if progress.eval_loss is not None and progress.evaluated_at == progress.step:
        found["eval_loss"] = progress.eval_loss
    if last.get("step") == progress.step and last["loss"] is not None:
        found["loss"] = float(last["loss"])
    return found
