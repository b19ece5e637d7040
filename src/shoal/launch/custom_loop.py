"""A custom training loop: what `shoal.init` returns.

    run = shoal.init("run.yaml")
    model, optimizer, loader, schedule = run.prepare(model, optimizer, loader, schedule)
    for batch in run.steps(loader):
        loss = compute_loss(model, batch)
        run.backward(loss)
        run.step(optimizer, schedule)

The step itself, and all that follows it, are those of `shoal train`: `train.step` and `train.conclude`.
"""

import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.config.schema import Config
from shoal.launch.custom import STATUS_STOPPED, JoinedRun, hold
from shoal.launch.custom_body import LoopBody
from shoal.launch.outcome import record_end
from shoal.mistakes import UserMistake
from shoal.observe.metrics import JsonLines
from shoal.parallel.micro_batches import accumulating
from shoal.parallel.shard import reshards_after_forward
from shoal.resilience.agreement import Agreement
from shoal.resilience.health import Action, Decision
from shoal.train.conclude import Watch, conclude_step, make_health
from shoal.train.custom import set_up_custom
from shoal.train.custom_evaluation import Compute, evaluate_batches, to_device
from shoal.train.custom_job import CustomJob
from shoal.train.custom_schedule import Per
from shoal.train.custom_weights import save_whole_weights
from shoal.train.default_hooks import default_hooks
from shoal.train.hooks import Fault, RunStart, StepEnd
from shoal.train.rollback import give_up, roll_back
from shoal.train.save import finish_save

NOT_PREPARED = "Call run.prepare(model, optimizer, loader) first."


class CustomLoop:
    """A run whose loop is the user's."""

    def __init__(self, joined: JoinedRun) -> None:
        self._joined = joined
        self._job: CustomJob | None = None
        self._body: LoopBody | None = None
        self._started = self._ended = self._closed = False
        hold(self)

    @property
    def config(self) -> Config:
        """The config; after `prepare` without any auto."""
        return self._joined.config if self._job is None else self._job.config

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self._joined.run.path

    @property
    def rank(self) -> int:
        return self._joined.ranks.rank

    @property
    def world_size(self) -> int:
        return self._joined.ranks.world_size

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which prints and writes."""
        return self._joined.ranks.first

    @property
    def device(self) -> torch.device:
        return self._joined.ranks.device

    @property
    def step_number(self) -> int:
        """The number of optimizer steps so far; after `prepare`."""
        return self._prepared.progress.step

    @property
    def total_steps(self) -> int:
        """The steps that the run will have; after `prepare`."""
        return self._prepared.steps

    @property
    def epoch(self) -> int:
        """The number of complete epochs so far; after `prepare`."""
        return self._prepared.epoch

    def prepare(
        self, model: Any, optimizer: Any, loader: Any, schedule: Any = None, *, schedule_per: Per = "step"
    ) -> tuple[Any, ...]:
        """Parallelize the model as the config says, and take over the others; returns them in the same order (without
        a schedule, three). Model, optimizer and schedule may be tuples or dicts of several, which take turns: see
        `step`. The schedule advances after every step, or with `schedule_per="epoch"` after every epoch. A run that
        resumes has its weights, optimizer state and schedule afterwards."""
        if self._job is not None:
            raise UserMistake("run.prepare was called already; a run has one model, one optimizer and one loader.")
        joined = self._joined
        self._job = job = set_up_custom(
            joined.config,
            joined.run,
            joined.ranks,
            joined.start,
            joined.device,
            model=model,
            optimizer=optimizer,
            loader=loader,
            schedule=schedule,
            schedule_per=schedule_per,
            nodes=joined.nodes,
        )
        self._body = LoopBody(job)
        return (model, optimizer, job.loader) if schedule is None else (model, optimizer, job.loader, schedule)

    def steps(self, loader: Any) -> Iterator[Any]:
        """This rank's micro-batches, on its device, up to the last step. Between two of them the body calls `backward`
        and `step`. Logs, saves, and stops on a signal: the program then ends with status 75."""
        job = self._prepared
        if loader is not job.loader:
            raise UserMistake("run.steps takes the loader that run.prepare returned.")
        if self._started:
            raise UserMistake("run.steps was called already: it goes through all steps of the run, epoch after epoch.")
        return self._steps(job)

    def backward(self, loss: Tensor, weight: float | Tensor | None = None) -> None:
        """The backward pass of a micro-batch. `loss` is its mean; `weight` is what it is the mean over, by default the
        number of samples. The loss of the step is the mean over all micro-batches and ranks, by weight."""
        self._open.backward(loss, weight)

    def step(self, optimizer: Any, schedule: Any = None) -> bool:
        """Clip the gradients, update the weights and advance the schedule, after the last micro-batch of a step; before
        that it does nothing. Returns whether it did. Of several optimizers this is the turn of one: its parameters
        alone are updated, by the gradients of the last `backward`."""
        return self._open.step(optimizer, schedule)

    def stop(self) -> None:
        """Save and stop after this step, on all ranks, as on a signal."""
        self._joined.stop.ask()

    def mean(self, value: float | Tensor, weight: float | Tensor = 1.0) -> float:
        """The mean of `value` over all ranks, by weight. Waits for the device; all ranks call it."""
        pair = torch.stack([torch.as_tensor(one, dtype=torch.float64).detach().cpu() for one in (value, weight)])
        total = self._joined.ranks.sum(torch.stack([pair[0] * pair[1], pair[1]]))
        return float(total[0] / total[1])

    def evaluate(self, compute: Compute, loader: Iterable[Any]) -> float:
        """The mean loss of a held-out set. `compute` gets a batch of `loader`, which is not the prepared one, and
        returns its mean loss, or a pair of it and what it is the mean over, by default the number of samples. Each rank
        computes its share of the batches, without dropout and gradients; all ranks call it and get the mean over all of
        them."""
        job = self._prepared
        job.synchronize_buffers()  # one model is evaluated, the one that a checkpoint would have
        with job.log.paused(), job.communication.paused():
            found = evaluate_batches(compute, loader, job.model.modules, job.ranks, seed=job.config.seed)
        for copies in job.model.copies:
            copies.uninstall()
        return found

    def log_evaluation(self, loss: float, **others: float) -> None:
        """Write the loss of a held-out set to `metrics.jsonl`, as eval_loss; `checkpoint.keep_best` compares it. The
        same on every rank."""
        job = self._prepared
        values = {"eval_loss": float(loss), **{f"eval_{name}": float(value) for name, value in others.items()}}
        line = {"step": job.progress.step, "attempt": job.log.attempt, **values}
        if self._ended:  # the hooks are, too
            if self.first:
                lines = JsonLines(job.run.metrics)
                lines.write(line)
                lines.close()
        else:
            job.hooks.on_evaluation(line)
        job.progress.evaluated_at, job.progress.eval_loss = job.progress.step, float(loss)

    def save_weights(self, path: Path | str) -> None:
        """Write the unsharded weights to one safetensors file. All ranks call it; rank 0 writes."""
        from shoal.paths import user_path

        save_whole_weights(self._prepared, user_path(path, "The file"))

    def close(self, error: BaseException | None = None) -> None:
        """End the run: log, watchdog, process group and lock. Called when the program ends."""
        if self._closed:
            return
        self._closed = True
        job = self._job
        if job is not None and self._started and not self._ended:
            self._ended = True
            if error is not None:
                job.hooks.on_fault(Fault(job.progress.step, error, str(error)))
            else:
                self._say_left(job)
            job.hooks.on_run_end(error)
        self._joined.leave(error)

    def _say_left(self, job: CustomJob) -> None:
        """The body has left the loop with `break`, or the program ends within it. Nothing is saved here: another rank
        may be at another step."""
        if self.first:
            job.reporter.warn(
                f"the loop was left after step {job.progress.step} of {job.steps}, and nothing since the last "
                "checkpoint is saved; call run.stop() instead of break, which saves one and stops."
            )
            record_end(job.run.path, "left")

    def __enter__(self) -> "CustomLoop":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(None if isinstance(error, SystemExit) else error)

    @property
    def _prepared(self) -> CustomJob:
        if self._job is None:
            raise UserMistake(NOT_PREPARED)
        return self._job

    @property
    def _open(self) -> LoopBody:
        """The step that the loop is in."""
        if self._body is None:
            raise UserMistake(NOT_PREPARED)
        return self._body

    def _steps(self, job: CustomJob) -> Generator[Any, None, None]:
        self._started = True
        job.hooks.add(*default_hooks(job, self._joined.context, self._joined.hooks))
        job.hooks.on_run_start(RunStart(job.run.path, job.resolved, job.ranks, job.progress.step, job.steps))
        with Agreement(job.ranks, job.hooks) as agreement:
            watch = Watch(self._joined.stop, agreement, make_health(job))
            while True:
                decision, stopped = yield from self._until_decision(job, watch)
                if decision.action is Action.STOP:
                    give_up(job, decision.steps)
                if decision.action is not Action.ROLL_BACK:
                    break
                roll_back(job, decision.steps)
        finish_save(job)
        if stopped is not None:
            job.hooks.on_stop(job.progress.step, stopped)
        self._ended = True
        job.hooks.on_run_end(None)
        if self.first:
            record_end(job.run.path, stopped)
        if stopped == "signal":
            job.reporter.say("Stopped early; a checkpoint was saved. Start the program again with resume.")
            raise SystemExit(STATUS_STOPPED)

    def _until_decision(self, job: CustomJob, watch: Watch) -> Generator[Any, None, tuple[Decision, str | None]]:
        """Steps up to the last one, or to one after which health decides otherwise."""
        resolved, progress = job.resolved, job.progress
        stopped: str | None = None
        stream = job.loader.micro_batches(progress.step, job.steps, progress.left_out)
        while progress.step < job.steps and stopped is None:
            with job.communication.step():
                data_seconds = yield from self._step_batches(job, stream)
            result, lr = self._open.end_step()
            arrived = job.log.after_step(
                progress.step,
                result,
                lr=lr,
                tokens=resolved.global_batch,
                total_tokens=progress.tokens,
                loss_tokens=0,
                positions=0,
                flops=0.0,
                data_seconds=data_seconds,
                save_seconds=job.saver.waited,
            )
            job.hooks.on_step_end(StepEnd(progress.step, data_seconds, job.log.step_seconds))
            decision, stopped = conclude_step(job, watch, arrived)
            if not decision.continues:
                return decision, None
        return Decision(Action.CONTINUE), stopped

    def _step_batches(self, job: CustomJob, stream: Iterator[Any]) -> Generator[Any, None, float]:
        """The micro-batches of one step. Returns the seconds in which the loop waited for them."""
        resolved, body = job.resolved, self._open
        keeps_weights = reshards_after_forward(job.config.parallel, resolved.strategy) is False
        data_seconds = 0.0
        for index in range(resolved.grad_accum_steps):
            began = time.perf_counter()
            batch = to_device(next(stream), job.ranks.device)
            data_seconds += time.perf_counter() - began
            last = index == resolved.grad_accum_steps - 1
            body.begin_micro_batch(last=last)
            with ExitStack() as stack:
                for module in job.model.modules:
                    stack.enter_context(accumulating(module, last=last, keeps_weights=keeps_weights))
                yield batch
            body.end_micro_batch()
        return data_seconds
