"""What the body of a custom loop does with the micro-batches of a step: the backward pass and the update."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from shoal.launch.custom import explain_backward
from shoal.mistakes import UserMistake
from shoal.parallel.gradients import gradient_versions
from shoal.train.custom_job import CustomJob
from shoal.train.custom_turns import Turn
from shoal.train.step import StepResult


class _MicroBatch:
    """What the loop's body has done with a micro-batch."""

    def __init__(self, *, last: bool, alone: bool) -> None:
        self.last = last  # of the step
        self.alone = alone  # the step has no other
        self.backward = False
        self.turns: list[Turn] = []  # whose optimizers were stepped
        self.since_backward: list[Turn] = []  # those that were since the last backward pass


class LoopBody:
    """The step that the loop is in."""

    def __init__(self, job: CustomJob) -> None:
        self.job = job
        self._micro: _MicroBatch | None = None
        self._sums: Tensor | None = None  # of this step, or turn: loss times weight; and weight, if it is given
        self._weighted: bool | None = None  # whether the script gives weights
        self._updates: list[StepResult] = []  # of this step
        self._turns: list[Turn] | None = None  # of the earlier micro-batches of this step
        self._epoch_ends = False  # with this step
        self._sharded = [one for part in job.model.modules for one in part.modules() if isinstance(one, FSDPModule)]
        self._versions: list[int] | None = None  # of the gradients after the last backward pass

    def begin_micro_batch(self, *, last: bool) -> None:
        self._micro = _MicroBatch(last=last, alone=self.job.resolved.grad_accum_steps == 1)

    def end_micro_batch(self) -> None:
        """A UserMistake unless the body has called what it has to."""
        micro, self._micro = self._micro, None
        assert micro is not None
        if not micro.since_backward:
            missing = "run.backward(loss)" if not micro.backward else "run.step(optimizer)"
            raise UserMistake(
                f"{missing} was not called for a batch of run.steps; call it once for each: gradients are "
                "accumulated by train.micro_batch or train.grad_accum, not by the loop."
            )
        if self._turns is not None and len(micro.turns) != len(self._turns):
            raise _other_turns()
        self._turns = micro.turns

    def end_step(self) -> tuple[StepResult, float]:
        """After the last turn of a step: its result, and its learning rate."""
        job = self.job
        if job.optimizer.several:
            job.model.gradients.clear()  # those of parameters that had no turn
            if self._epoch_ends and job.schedule_per == "epoch":
                for turn in job.optimizer.turns:
                    turn.advance_schedule()
        updates, self._updates, self._sums, self._turns = self._updates, [], None, None
        return job.optimizer.result(updates)

    def backward(self, loss: Tensor, weight: float | Tensor | None = None) -> None:
        job, micro = self.job, self._inside("run.backward")
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
        if isinstance(weight, Tensor) and weight.numel() != 1:
            raise UserMistake(
                f"The weight has shape {tuple(weight.shape)}; run.backward takes what the loss is the mean over, a "
                "single number."
            )
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
        job, micro = self.job, self._inside("run.step")
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
        job = self.job
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

    def _refuses_changes(self, micro: _MicroBatch) -> bool:
        """Whether gradients are not yet those of the step between `backward` and `step`."""
        job = self.job
        return not micro.alone or job.scaler.enabled or bool(self._weighted) or bool(job.model.gradients.averages)

    def _inside(self, call: str) -> _MicroBatch:
        if self._micro is None:
            raise UserMistake(f"{call} belongs into the body of: for batch in run.steps(loader).")
        return self._micro


def _other_turns() -> UserMistake:
    return UserMistake(
        "The micro-batches of a step had turns of different optimizers; let run.step_number choose, which is the same "
        "for all of them."
    )
