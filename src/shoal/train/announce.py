"""What a run says when it starts: how it is carried out, and settings that are probably unintended."""

from pathlib import Path

import torch

from shoal.config.effect import without_effect
from shoal.models.prepare import PreparedModel
from shoal.models.read_weights import fresh_parameters
from shoal.observe.figures import counted
from shoal.observe.progress import Reporter
from shoal.plan.resolved import describe_accumulation
from shoal.plan.unintended import unintended
from shoal.train.job import Job
from shoal.train.schedule import describe_lr_scale, peak_lr


def announce(job: Job, device: str, prepared: PreparedModel, emulated: frozenset[torch.dtype]) -> None:
    """Print how the run is carried out, and warn of settings without effect and of slow matmuls."""
    _say_what_is_trained(job, device, prepared)
    config = job.config
    if config.train.lr_scaling != "none":
        job.reporter.say(
            f"train.lr {config.train.lr:g} × {describe_lr_scale(config.train, 'global_batch')} = "
            f"{peak_lr(config.train):g} is the peak learning rate."
        )
    if job.model.precision.compute in emulated:
        job.reporter.warn(
            f"train.precision {config.train.precision} is emulated: this CPU has no fast matmuls for it, so "
            "matmuls and attention round their inputs and compute in fp32. train.precision 32-true is faster here."
        )
    requested = job.resolved.requested
    known = without_effect(requested, job.ranks.world_size)  # reported at the start
    ignored = without_effect(config, job.ranks.world_size, given=requested)
    notes = (*unintended(job.resolved), *job.model.notes, *ignored)
    for note in dict.fromkeys(notes):
        if note not in known:
            job.reporter.warn(note)


def warn_of_added_tokens(prepared: PreparedModel, reporter: Reporter, start_from: Path | None) -> None:
    """Rows of added tokens that are not trained, or not those that were asked for."""
    for name in prepared.new_rows:
        if not prepared.model.get_parameter(name).requires_grad:
            why = "model.freeze: " if prepared.adapters is None else "adapter.train_also does not list it: "
            reporter.warn(f"{why}{name} is frozen, so its rows of added tokens stay as they start.")
    if prepared.new_rows and start_from is not None:
        reporter.warn(f"model.add_tokens: the rows of added tokens are those in {start_from}, not the mean.")


def _say_what_is_trained(job: Job, device: str, prepared: PreparedModel) -> None:
    resolved, model = job.resolved, f"{prepared.parameters:,} parameters"
    if prepared.adapters is not None:
        every = prepared.parameters + prepared.adapters.parameters
        model = f"{every:,} parameters, of which {prepared.trained_parameters:,} are trained"
    steps = f"{job.inputs.steps} step{'' if job.inputs.steps == 1 else 's'}"
    job.reporter.say(
        f"{model}, {resolved.describe()} on {resolved.world_size} × {device}; "
        f"{steps} of {counted(resolved.global_batch, 'sequence')}, micro-batch {resolved.micro_batch}, "
        f"{describe_accumulation(resolved.grad_accum_steps)}."
    )
    if prepared.folder is not None and job.progress.step == 0 and (fresh := _new_heads(prepared)):
        job.reporter.say(
            f"{job.config.model.from_} has no head for these classes: {', '.join(fresh)} start from random values."
        )


def _new_heads(prepared: PreparedModel) -> list[str]:
    """The modules of a classifier that have no values in its folder."""
    assert prepared.folder is not None
    return list(dict.fromkeys(one.rpartition(".")[0] for one in fresh_parameters(prepared.model, prepared.folder)))
