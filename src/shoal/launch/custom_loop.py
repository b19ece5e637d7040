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
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shoal.config.schema import Config
from shoal.launch.custom import STATUS_STOPPED, JoinedRun, explain_backward, hold
from shoal.launch.outcome import record_end
from shoal.mistakes import UserMistake
from shoal.observe.metrics import JsonLines
from shoal.parallel.gradients import gradient_versions
from shoal.parallel.micro_batches import accumulating
from shoal.parallel.shard import reshards_after_forward
from shoal.resilience.agreement import Agreement
from shoal.resilience.health import Action, Decision
from shoal.train.conclude import Watch, conclude_step, make_health
from shoal.train.custom import CustomJob, set_up_custom
from shoal.train.custom_evaluation import Compute, evaluate_batches, to_device
from shoal.train.custom_schedule import Per
from shoal.train.custom_turns import Turn
from shoal.train.default_hooks import default_hooks
from shoal.train.hooks import Fault, RunStart, StepEnd
from shoal.train.rollback import give_up, roll_back
from shoal.train.save import finish_save
from shoal.train.step import StepResult


class _MicroBatch:
    """What the loop's body has done with a micro-batch."""

    def __init__(self, *, last: bool, alone: bool) -> None:
        self.last = last  # of the step
        self.alone = alone  # the step has no other
        self.backward = False
        self.turns: list[Turn] = []  # whose optimizers were stepped
        self.since_backward: list[Turn] = []  # those that were since the last backward pass


class CustomLoop:
    """A run whose loop is the user's."""

    def __init__(self, joined: JoinedRun) -> None:
        self._joined = joined
        self._job: CustomJob | None = None
        self._micro: _MicroBatch | None = None
        self._sums: Tensor | None = None  # of this step, or turn: loss times weight; and weight, if it is given
        self._weighted: bool | None = None  # whether the script gives weights
        self._updates: list[StepResult] = []  # of this step
        self._turns: list[Turn] | None = None  # of the earlier micro-batches of this step
        self._epoch_ends = False  # with this step
        self._sharded: list[FSDPModule] = []
        self._versions: list[int] | None = None  # of the gradients after the last backward pass
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
        """The number of optimizer steps so far."""
        return self._prepared.progress.step

    @property
    def total_steps(self) -> int:
        return self._prepared.steps

    @property
    def epoch(self) -> int:
        """The number of complete epochs so far."""
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
        self._sharded = [one for part in job.model.modules for one in part.modules() if isinstance(one, FSDPModule)]
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
        job, micro = self._prepared, self._inside("run.backward")
        if micro.backward and not (job.optimizer.several and micro.since_backward):
            raise UserMistake("run.backward was called twice for one micro-batch; add the losses, and call it once.")
        if micro.since_backward and not micro.alone:
            raise UserMistake(
                "With gradient accumulation a step has one turn: the second would see the weights before the first. "
                "Let run.step_number choose whose it is, or set train.micro_batch so that a step has one micro-batch."
            )
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = f"has shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"is a {type(loss).__name__}"
            raise UserMistake(f"The loss {found}; run.backward takes the mean over the micro-batch, a single number.")
        if not loss.requires_grad:
            raise UserMistake("The loss has no gradient; was it detached, or computed under torch.no_grad()?")
        if self._weighted is None:
            self._weighted = weight is not None
        if self._weighted != (weight is not None):
            raise UserMistake("run.backward needs a weight in every call or in none: losses are averaged by it.")
        if micro.since_backward:  # another turn; what the last one left in others' gradients is not theirs
            job.model.gradients.clear()
            self._sums, micro.since_backward = None, []
        micro.backward = True
        if weight is None:
            factor = job.step.loss_factor(job.resolved.global_batch / job.resolved.micro_batch)
        else:
            factor = job.step.loss_factor(job.resolved.global_batch) * weight
        unscaled = isinstance(factor, float) and factor == 1.0
        try:
            torch.autograd.backward(loss if unscaled else loss * factor)
        except RuntimeError as error:
            raise explain_backward(error, sharded=bool(self._sharded)) from error
        self._versions = gradient_versions(job.model.gradients) if self._refuses_changes(micro) else None
        sums = loss.detach().reshape(1).double() * (job.resolved.micro_batch if weight is None else weight)
        if weight is not None:
            sums = torch.cat([sums, torch.as_tensor(weight, dtype=torch.float64, device=loss.device).reshape(1)])
        self._sums = sums if self._sums is None else self._sums + sums

    def step(self, optimizer: Any, schedule: Any = None) -> bool:
        """Clip the gradients, update the weights and advance the schedule, after the last micro-batch of a step; before
        that it does nothing. Returns whether it did. Of several optimizers this is the turn of one: its parameters
        alone are updated, by the gradients of the last `backward`."""
        job, micro = self._prepared, self._inside("run.step")
        turn = job.optimizer.of(optimizer)
        self._check_turn(turn, schedule, micro)
        micro.turns.append(turn)
        micro.since_backward.append(turn)
        if not micro.last:
            return False
        assert self._sums is not None
        correction, whole = None, job.resolved.global_batch
        turn.step.model.gradients.finish()
        if self._weighted:
            correction = (whole / job.ranks.sum(self._sums.clone())[1]).float()
        for unit in self._sharded:
            unit.reshard()  # a forward pass after the backward pass has gathered weights that are old now
        turn.lr = turn.optimizer.lr
        result = turn.step.update(self._sums, None if self._weighted else whole, None, correction)
        for copies in job.model.copies:
            copies.uninstall()  # so that model.parameters() are the master weights until the next forward pass
        if job.optimizer.several:
            turn.record(result, turn.lr, job.ranks)
        if not self._updates:
            self._epoch_ends = job.count()
        self._updates.append(result)
        # Turns that follow in the last step of an epoch are of that epoch too.
        if job.schedule_per == "step" or (self._epoch_ends and not job.optimizer.several):
            turn.advance_schedule()
        return True

    def _check_turn(self, turn: Turn, schedule: Any, micro: _MicroBatch) -> None:
        """A UserMistake unless the optimizer of `turn` can be stepped now."""
        job = self._prepared
        if schedule is not (None if turn.by_metric else turn.schedule):
            raise UserMistake(
                "ReduceLROnPlateau needs a metric: call schedule.step(metric) yourself, and run.step(optimizer)."
                if turn.by_metric
                else "run.step takes the schedule that was given to run.prepare: run.step(optimizer, schedule)."
            )
        if not micro.backward:
            raise UserMistake("run.step was called before run.backward(loss), which replaces loss.backward().")
        if turn in micro.since_backward:
            after = "one backward pass" if job.optimizer.several else "one micro-batch"
            raise UserMistake(f"run.step was called twice for {after}.")
        if micro.since_backward and job.scaler.enabled:
            raise UserMistake(
                "With train.precision 16-mixed each optimizer needs a run.backward of its own: its step changes the "
                "loss scale; use bf16-mixed."
            )
        if self._versions is not None and self._versions != gradient_versions(job.model.gradients):
            raise UserMistake(
                "Gradients were changed between run.backward and run.step, before they were complete (those of all "
                "micro-batches and ranks, without a loss scale); to clip them, set train.clip."
            )
        self._versions = None
        if self._turns is not None and turn not in self._turns[len(micro.turns) : len(micro.turns) + 1]:
            raise _other_turns()

    def stop(self) -> None:
        """Save and stop after this step, on all ranks, as on a signal."""
        self._joined.stop.ask()

    def mean(self, value: float | Tensor, weight: float | Tensor = 1.0) -> float:
        """The mean of `value` over all ranks, by weight. Waits for the device; all ranks call it."""
        pair = torch.stack([torch.as_tensor(one, dtype=torch.float64).detach().cpu() for one in (value, weight)])
        total = self._joined.ranks.sum(torch.stack([pair[0] * pair[1], pair[1]]))
        return float(total[0] / total[1])

    def evaluate(self, compute: Compute, loader: Iterable[Any]) -> float:
        """The mean loss of a held-out set. `compute` gets a batch of `loader` and returns its mean loss, or a pair of
        it and what it is the mean over, by default the number of samples. Each rank computes its share of the batches,
        without dropout and gradients; all ranks call it and get the mean over all of them."""
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
        from safetensors.torch import save_file

        from shoal.paths import user_path

        job, file = self._prepared, user_path(path, "The file")
        found: dict[str, Tensor] = {}
        for name, tensor in job.model.saved.items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if self.first:
                found[name] = whole.detach().cpu().contiguous()
        if self.first:
            partial = file.with_name(f".{file.name}.tmp")
            save_file(found, partial)
            partial.replace(file)
        job.ranks.barrier()

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
            job.hooks.on_run_end(error)
        self._joined.leave(error)

    def __enter__(self) -> "CustomLoop":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(None if isinstance(error, SystemExit) else error)

    @property
    def _prepared(self) -> CustomJob:
        if self._job is None:
            raise UserMistake("Call run.prepare(model, optimizer, loader) first.")
        return self._job

    def _inside(self, call: str) -> _MicroBatch:
        if self._micro is None:
            raise UserMistake(f"{call} belongs into the body of: for batch in run.steps(loader).")
        return self._micro

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
            result, lr = self._end_step(job)
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
        resolved = job.resolved
        keeps_weights = reshards_after_forward(job.config.parallel, resolved.strategy) is False
        data_seconds = 0.0
        for index in range(resolved.grad_accum_steps):
            began = time.perf_counter()
            batch = to_device(next(stream), job.ranks.device)
            data_seconds += time.perf_counter() - began
            last = index == resolved.grad_accum_steps - 1
            self._micro = micro = _MicroBatch(last=last, alone=resolved.grad_accum_steps == 1)
            with ExitStack() as stack:
                for module in job.model.modules:
                    stack.enter_context(accumulating(module, last=last, keeps_weights=keeps_weights))
                yield batch
            self._micro = None
            if not micro.since_backward:
                missing = "run.backward(loss)" if not micro.backward else "run.step(optimizer)"
                raise UserMistake(
                    f"{missing} was not called for a batch of run.steps; call it once for each: gradients are "
                    "accumulated by train.micro_batch or train.grad_accum, not by the loop."
                )
            if self._turns is not None and len(micro.turns) != len(self._turns):
                raise _other_turns()
            self._turns = micro.turns
        return data_seconds

    def _refuses_changes(self, micro: _MicroBatch) -> bool:
        """Whether gradients are not yet those of the step between `backward` and `step`."""
        job = self._prepared
        return not micro.alone or job.scaler.enabled or bool(self._weighted) or bool(job.model.gradients.averages)

    def _end_step(self, job: CustomJob) -> tuple[StepResult, float]:
        """After the last turn of a step: its result, and its learning rate."""
        if job.optimizer.several:
            job.model.gradients.clear()  # those of parameters that had no turn
            if self._epoch_ends and job.schedule_per == "epoch":
                for turn in job.optimizer.turns:
                    turn.advance_schedule()
        updates, self._updates, self._sums, self._turns = self._updates, [], None, None
        return job.optimizer.result(updates)


def _other_turns() -> UserMistake:
    return UserMistake(
        "The micro-batches of a step had turns of different optimizers; let run.step_number choose, which is the same "
        "for all of them."
    )
