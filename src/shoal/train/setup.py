"""From a run that passed preflight to a job: build the model and the optimizer, and load a checkpoint."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shoal.catalogue.optimizers import find_optimizer
from shoal.checkpoint import state
from shoal.checkpoint.state import Progress, read_progress
from shoal.config.run import RunDirectory
from shoal.config.schema import Config
from shoal.models.base import Base, check_drawn_on, describe_base, read_base
from shoal.models.emulate import LOW_PRECISION, emulated_dtypes
from shoal.objectives import Objective, find_objective
from shoal.observe.progress import Reporter
from shoal.optim.loss_scaler import LossScaler
from shoal.optim.optimizer import NamedOptimizer
from shoal.parallel.device import describe_machine
from shoal.parallel.exposed import ExposedCommunication
from shoal.parallel.model import ParallelModel
from shoal.parallel.precision import read_precision
from shoal.parallel.ranks import Ranks
from shoal.resilience.health import SpikeGuard, spike_settings
from shoal.resilience.out_of_memory import explained
from shoal.train.announce import announce, warn_of_added_tokens
from shoal.train.build import build, keep_low_precision_gradients, make_step
from shoal.train.data_changes import check_same_data, fingerprint
from shoal.train.describe import describe, plan_values, record_interval
from shoal.train.flops import count_flops
from shoal.train.hooks import Hooks
from shoal.train.inputs import Inputs
from shoal.train.job import Job
from shoal.train.log import StepLog, next_attempt
from shoal.train.preflight import Preflight
from shoal.train.rollback import set_aside
from shoal.train.save import checkpoint_folders, make_saver
from shoal.train.save_interval import SaveInterval


@dataclass(frozen=True)
class Start:
    """Where a run starts. By default at step 0."""

    resume: bool = False  # from the run's newest checkpoint
    checkpoint: Path | None = None  # from this checkpoint, of any run
    restarted: bool = False  # these ranks ran before: from a checkpoint that they have saved since, if any
    overrides: Mapping[str, Any] = field(default_factory=dict)  # config keys replaced after running out of memory


def set_up(
    checked: Preflight, run: RunDirectory, ranks: Ranks, start: Start, objective: Objective | None = None
) -> Job:
    """Build the parallelized model and its optimizer, and load the checkpoint to start from, if any."""
    with explained(checked.resolved, ranks):
        return _assemble(checked, run, ranks, start, objective or objective_of(checked.resolved.config, checked.inputs))


def objective_of(config: Config, inputs: Inputs) -> Objective:
    return find_objective(config, inputs.tokenizer, inputs.sets.training.summary.classes)


def _assemble(checked: Preflight, run: RunDirectory, ranks: Ranks, start: Start, objective: Objective) -> Job:
    inputs, prepared, resolved = checked.inputs, checked.prepared, checked.resolved
    config, reporter = resolved.config, Reporter(enabled=ranks.first)
    seed_everything(config.seed, ranks.rank, config.train.deterministic)
    checkpoint = starting_point(config, run, ranks, reporter, start)
    same_run = checkpoint is not None and checkpoint != start.checkpoint
    if checkpoint is not None and same_run:
        check_same_data(read_progress(checkpoint).data, inputs.sets)
    warn_of_added_tokens(prepared, reporter, None if same_run else checkpoint)
    # Before the model is sharded.
    flops = count_flops(prepared, resolved.mesh, resolved.run.head_share, resolved.run.shape.attended)
    emulated = emulated_on_any(config, ranks)
    # A checkpoint of an adapter does not hold the base.
    values = checkpoint is None or prepared.adapters is not None
    resumes = checkpoint is not None
    model, optimizer = build(
        prepared, resolved, ranks, objective=objective, values=values, resumes=resumes, emulated=emulated
    )
    keep_low_precision_gradients(model, optimizer, resolved)
    plan = plan_values(inputs, resolved, parameters=prepared.parameters, machine=describe_machine(ranks.device))
    base = _base(checked, run, ranks, resumes=resumes)
    describe_in = partial(describe, inputs=inputs, plan=plan, architecture=prepared.architecture, base=base)
    job = _make_job(checked, run, ranks, reporter, objective, model, optimizer, flops, plan, describe_in)
    if checkpoint is not None:
        _resume(job, checkpoint, same_run=same_run)
    else:
        if start.resume:
            reporter.warn("there is no complete checkpoint to resume from: starting at step 0.")
        set_aside(job)  # damaged ones, and those that an earlier run of this name may have left in the fallback
    job.progress.optimizer, job.progress.data = config.train.optimizer.name, fingerprint(inputs.sets)
    job.log.skipped = job.progress.skipped
    if ranks.first:
        try:
            describe_in(run)
        except OSError as error:
            raise run.unwritable(error) from None
        announce(job, checked.device.gpu.name if checked.device.gpu else ranks.device.type, prepared, emulated)
    return job


def _base(checked: Preflight, run: RunDirectory, ranks: Ranks, *, resumes: bool) -> Base | None:
    """Of an adapter: what its run records of the base model. A UserMistake if a resumed run had another."""
    if checked.prepared.adapters is None:
        return None
    if resumes and (recorded := read_base(run)) is not None:
        check_drawn_on(recorded, ranks.device, run)
    if not ranks.first:
        return None
    return describe_base(checked.prepared, seed=checked.resolved.config.seed, device=ranks.device)


def _make_job(
    checked: Preflight,
    run: RunDirectory,
    ranks: Ranks,
    reporter: Reporter,
    objective: Objective,
    model: ParallelModel,
    optimizer: NamedOptimizer,
    flops: Callable[[int, int], float],
    plan: dict[str, Any],
    describe_in: Callable[[RunDirectory], None],
) -> Job:
    """Everything that the loop works with, at step 0."""
    inputs, resolved = checked.inputs, checked.resolved
    config, hooks = resolved.config, Hooks(reporter.warn)
    scaler, guard = make_scaler(config, ranks), make_guard(config, ranks)
    job = Job(
        resolved=resolved,
        run=run,
        ranks=ranks,
        reporter=reporter,
        inputs=inputs,
        objective=objective,
        model=model,
        optimizer=optimizer,
        scaler=scaler,
        controls={"scaler": scaler} | ({} if guard is None else {"spikes": guard}),
        step=make_step(model, optimizer, scaler, clip=config.train.clip, guard=guard, total=ranks.sum),
        plan=plan,
        hooks=hooks,
        log=StepLog(
            every=config.log.every,
            total=inputs.steps,
            ranks=ranks,
            attempt=next_attempt(run.metrics),
            peak=checked.device.peak(config.train.precision),
            hooks=hooks,
            objective=objective,
        ),
        flops=flops,
        communication=ExposedCommunication(model),
        progress=Progress(world_size=ranks.world_size),
        saver=make_saver(
            resolved.requested,
            run,
            ranks,
            describe=describe_in,
            while_waiting=lambda: hooks.on_activity(job.progress.step, "waiting for a save"),
        ),
        interval=SaveInterval(
            config,
            resolved.goodput().conditions if resolved.requested.checkpoint.every == "auto" else None,
            ranks,
            reporter,
            record=lambda every: record_interval(run, plan, every, ranks, reporter.warn),
        ),
        saved=None,
    )
    job.log.communication = job.communication.take
    return job


def make_scaler(config: Config, ranks: Ranks) -> LossScaler:
    """On the device of the gradients."""
    return LossScaler(
        torch.device("cpu") if config.parallel.offload == "cpu" else ranks.device,
        enabled=read_precision(config.train.precision, config.train.reduce_dtype).scaled,
        start=config.train.loss_scale.initial,
        fixed=config.train.loss_scale.fixed,
    )


def make_guard(config: Config, ranks: Ranks) -> SpikeGuard | None:
    spikes = spike_settings(config.train.on_spike)
    return SpikeGuard(spikes.sigma, ranks.device) if spikes.action == "skip" else None


def emulated_on_any(config: Config, ranks: Ranks) -> frozenset[torch.dtype]:
    """Dtypes whose matmuls are emulated. On all ranks if on any, or results would differ in the last bits."""
    if ranks.device.type != "cpu":
        return frozenset()
    computed = [read_precision(config.train.precision, config.train.reduce_dtype).compute]
    if find_optimizer(config.train.optimizer.name).needs_whole_matrices:
        computed.append(torch.bfloat16)  # orthogonalizes in bf16, whatever the precision of the model
    found = emulated_dtypes(ranks.device, *computed)
    return frozenset(dtype for dtype in LOW_PRECISION if ranks.largest(float(dtype in found)))


def _resume(job: Job, checkpoint: Path, *, same_run: bool) -> None:
    """Load a checkpoint of this run or of another."""
    job.load(checkpoint)
    set_aside(job)
    if same_run:
        job.interval.restore(job.progress.interval)
    else:
        job.progress.evaluations_without_gain = 0
    step, steps = job.progress.step, job.inputs.steps
    if same_run and step < steps and job.no_longer_improves:
        job.reporter.say(
            f"The run is finished at {checkpoint}, step {step} of {steps}: {job.progress.evaluations_without_gain} "
            "evaluations had no better loss (train.early_stop). Raise its patience to continue."
        )
    elif same_run and step >= steps:
        job.reporter.say(
            f"The run is finished: {checkpoint} is step {step} of {steps}. Raise train.steps or epochs to continue."
        )
    else:
        job.reporter.say(f"Resuming after step {step} from {checkpoint}.")


def starting_point(config: Config, run: RunDirectory, ranks: Ranks, reporter: Reporter, start: Start) -> Path | None:
    """The checkpoint to start from, if any."""
    given = start.checkpoint
    if given is not None and not start.restarted:
        return given
    own = state.newest(checkpoint_folders(config, run), ranks, reporter.warn) if start.resume else None
    if given is None or (own is not None and read_progress(own).step > read_progress(given).step):
        return own
    return given


def seed_everything(seed: int, rank: int, deterministic: bool) -> None:
    """Seed each rank differently, so that dropout differs between ranks."""
    torch.manual_seed(seed * 100_003 + rank)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
