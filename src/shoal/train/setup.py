"""From a config to a job: preflight finds errors early, setup builds model and optimizer and loads a checkpoint."""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shoal.catalogue.optimizers import find_optimizer
from shoal.checkpoint import state, store
from shoal.checkpoint.state import Progress, read_progress
from shoal.config.effect import without_effect
from shoal.config.mesh import Mesh
from shoal.config.run import RunDirectory
from shoal.config.schema import Config
from shoal.mistakes import UserMistake
from shoal.models.anatomy import matmul_parameters
from shoal.models.attention import attention_width
from shoal.models.base import check_drawn_on, check_resumed_base, describe_base, read_base
from shoal.models.emulate import LOW_PRECISION, emulated_dtypes
from shoal.models.peft_config import adapter_folder
from shoal.models.peft_weights import check_adapter
from shoal.models.prepare import PreparedModel, prepare_model
from shoal.models.read_weights import check_stored, fresh_parameters
from shoal.objectives import Objective, find_objective
from shoal.observe.progress import Reporter
from shoal.optim.check import check_groups, check_quantization_blocks
from shoal.optim.loss_scaler import LossScaler
from shoal.optim.offload import find_store
from shoal.parallel.apply import check_parallel
from shoal.parallel.device import Device, describe_machine
from shoal.parallel.exposed import ExposedCommunication
from shoal.parallel.float8 import check_float8
from shoal.parallel.precision import read_precision
from shoal.parallel.ranks import Ranks
from shoal.parallel.stages import stages_per_rank
from shoal.plan.resolved import ResolvedRun, describe_accumulation
from shoal.plan.stages import bubble_share
from shoal.resilience.health import SpikeGuard, spike_settings
from shoal.resilience.out_of_memory import explained
from shoal.train.build import build, keep_low_precision_gradients, make_step
from shoal.train.data_changes import check_same_data, fingerprint
from shoal.train.describe import describe, plan_values, record_interval
from shoal.train.hooks import Hooks
from shoal.train.inputs import Inputs
from shoal.train.job import Job
from shoal.train.log import StepLog, next_attempt
from shoal.train.resolve import machine_here, resolve_for_all, resolve_run
from shoal.train.rollback import set_aside
from shoal.train.save import checkpoint_folders, make_saver
from shoal.train.save_interval import SaveInterval
from shoal.train.schedule import peak_lr


@dataclass(frozen=True)
class Start:
    """Where a run starts. By default at step 0."""

    resume: bool = False  # from the run's newest checkpoint
    checkpoint: Path | None = None  # from this checkpoint, of any run
    restarted: bool = False  # these ranks ran before: from a checkpoint that they have saved since, if any
    overrides: Mapping[str, Any] = field(default_factory=dict)  # config keys replaced after running out of memory


@dataclass(frozen=True)
class Preflight:
    """A run whose errors were looked for without device memory, other ranks or a run folder."""

    inputs: Inputs
    prepared: PreparedModel
    resolved: ResolvedRun
    device: Device

    def agree(self, config: Config, ranks: Ranks, overrides: Mapping[str, Any]) -> "Preflight":
        """The same run on every rank: where devices, host memory or precision differ, it is resolved anew."""
        resolved = resolve_for_all(self.resolved, config, self.prepared, self.device, ranks, overrides)
        if resolved is not self.resolved:
            _check(self.prepared, resolved, self.device)
        return replace(self, resolved=resolved)


def preflight(
    config: Config,
    inputs: Inputs,
    world_size: int,
    device: Device,
    *,
    overrides: Mapping[str, Any] | None = None,
    start_from: Path | None = None,
    resume: bool = False,
) -> Preflight:
    """Build the model on the meta device, resolve every auto, and find the errors that setup would find."""
    prepared = prepare_model(
        inputs.blueprint,
        attention=config.model.attention,
        longest=config.data.max_length,
        freeze=config.model.freeze,
        adapter=config.adapter,
    )
    model = prepared.model
    check_groups(dict(model.named_parameters()), config.train)
    find_store(config.parallel.offload)
    resolved = resolve_run(config, prepared, machine_here(config, device, world_size), overrides=overrides)
    _check(prepared, resolved, device)
    if inputs.blueprint.folder is not None:
        check_stored(model, inputs.blueprint.folder, prepared.new_rows)
    if start_from is not None:
        check_checkpoint(start_from, config)
        if prepared.adapters is not None:
            check_resumed_base(RunDirectory(start_from.parent.parent), inputs.blueprint.folder)
    elif prepared.adapters is not None and config.adapter.from_ is not None and not resume:
        check_adapter(model, adapter_folder(config.adapter.from_))
    return Preflight(inputs, prepared, resolved, device)


def _check(prepared: PreparedModel, resolved: ResolvedRun, device: Device) -> None:
    """A UserMistake if the model or the device does not support the run as it is resolved."""
    config, model = resolved.config, prepared.model
    check_parallel(
        model, config, strategy=resolved.strategy, mesh=resolved.mesh, grad_accum_steps=resolved.grad_accum_steps
    )
    check_quantization_blocks(model, config.train, resolved.mesh.tp)
    if config.train.precision == "fp8":
        check_float8(model, device)


def check_checkpoint(start_from: Path, config: Config) -> None:
    """A UserMistake if `--from` names a checkpoint that is incomplete, damaged or of another optimizer."""
    checkpoint = store.read_manifest(start_from)
    if checkpoint is None:
        raise UserMistake(
            f"--from: {start_from} is not a complete checkpoint: its MANIFEST.json is missing or invalid."
        )
    if (file := store.damaged_file(checkpoint)) is not None:
        raise UserMistake(f"--from: {start_from / file} is damaged: it is not what was saved.")
    before, now = state.read_progress(start_from).optimizer, config.train.optimizer.name
    if before and before != now:
        raise UserMistake(f"--from: {start_from} holds the optimizer state of {before}, which {now} cannot use.")


def set_up(
    checked: Preflight, run: RunDirectory, ranks: Ranks, start: Start, objective: Objective | None = None
) -> Job:
    """Build the parallelized model and its optimizer, and load the checkpoint to start from, if any."""
    with explained(checked.resolved, ranks):
        return _assemble(checked, run, ranks, start, objective or objective_of(checked.resolved.config, checked.inputs))


def objective_of(config: Config, inputs: Inputs) -> Objective:
    return find_objective(config, inputs.tokenizer, inputs.sets.training.summary.classes)


def _assemble(checked: Preflight, run: RunDirectory, ranks: Ranks, start: Start, objective: Objective) -> Job:
    inputs, prepared, resolved, device = checked.inputs, checked.prepared, checked.resolved, checked.device
    config, reporter = resolved.config, Reporter(enabled=ranks.first)
    hooks = Hooks(reporter.warn)
    seed_everything(config.seed, ranks.rank, config.train.deterministic)
    checkpoint = starting_point(config, run, ranks, reporter, start)
    if checkpoint is not None and checkpoint != start.checkpoint:
        check_same_data(read_progress(checkpoint).data, fingerprint(inputs.sets))
    flops = count_flops(prepared, resolved.mesh, resolved.run.head_share)
    for name in prepared.new_rows:
        if not prepared.model.get_parameter(name).requires_grad:
            why = "model.freeze: " if prepared.adapters is None else "adapter.train_also does not list it: "
            reporter.warn(f"{why}{name} is frozen, so its rows of added tokens stay as they start.")
    if prepared.new_rows and checkpoint is not None and checkpoint == start.checkpoint:
        reporter.warn(f"model.add_tokens: the rows of added tokens are those in {checkpoint}, not the mean.")

    emulated = emulated_on_any(config, ranks)
    # A checkpoint of an adapter does not hold the base.
    values = checkpoint is None or prepared.adapters is not None
    resumes = checkpoint is not None
    model, optimizer = build(
        prepared, resolved, ranks, objective=objective, values=values, resumes=resumes, emulated=emulated
    )
    keep_low_precision_gradients(model, optimizer, resolved)
    scaler, guard = make_scaler(config, ranks), make_guard(config, ranks)
    plan = plan_values(inputs, resolved, parameters=prepared.parameters, machine=describe_machine(ranks.device))
    base = None
    if prepared.adapters is not None and checkpoint is not None and (recorded := read_base(run)) is not None:
        check_drawn_on(recorded, ranks.device, run)
    if prepared.adapters is not None and ranks.first:
        base = describe_base(prepared, seed=config.seed, device=ranks.device)
    describe_in = partial(describe, inputs=inputs, plan=plan, architecture=prepared.architecture, base=base)
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
            peak=device.peak(config.train.precision),
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
    if checkpoint is not None:
        _resume(job, checkpoint, same_run=checkpoint != start.checkpoint)
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
        _announce(job, device.gpu.name if device.gpu else ranks.device.type, prepared)
        if model.precision.compute in emulated:
            reporter.warn(
                f"train.precision {config.train.precision} is emulated: this CPU has no fast matmuls for it, so "
                "matmuls and attention round their inputs and compute in fp32. train.precision 32-true is faster here."
            )
        known = without_effect(resolved.requested, ranks.world_size)  # reported at the start
        for note in (*model.notes, *without_effect(config, ranks.world_size)):
            if note not in known:
                reporter.warn(note)
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
    if find_optimizer(
        config.train.optimizer.name
    ).needs_whole_matrices:  # orthogonalizes in bf16, whatever the precision of the model
        computed.append(torch.bfloat16)
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


def _announce(job: Job, device: str, prepared: PreparedModel) -> None:
    """Print how the run is carried out, and warn of settings that are probably unintended."""
    reporter, resolved, config = job.reporter, job.resolved, job.config
    counted = f"{prepared.parameters:,} parameters"
    if prepared.adapters is not None:
        every = prepared.parameters + prepared.adapters.parameters
        counted = f"{every:,} parameters, of which {prepared.trained_parameters:,} are trained"
    reporter.say(
        f"{counted}, {resolved.describe()} on {resolved.world_size} × {device}; "
        f"{job.inputs.steps} steps of {resolved.global_batch} sequences, micro-batch {resolved.micro_batch}, "
        f"{describe_accumulation(resolved.grad_accum_steps)}."
    )
    if prepared.folder is not None and job.progress.step == 0 and (fresh := head_of(prepared)):
        reporter.say(
            f"{config.model.from_} has no head for these classes: {', '.join(fresh)} start from random values."
        )
    parallel, stages = config.parallel, resolved.mesh.pp
    if parallel.sharding == "hybrid_shard" and resolved.strategy == "fsdp" and resolved.mesh.dp_replicate == 1:
        reporter.warn("on one machine hybrid_shard equals full_shard; parallel.replicate sets the number of replicas.")
    if stages > resolved.grad_accum_steps:
        share = bubble_share(stages, resolved.grad_accum_steps, stages_per_rank(parallel.pp_schedule))
        reporter.warn(
            f"parallel.pp {stages} with {resolved.grad_accum_steps} micro-batches per step leaves each device idle for "
            f"{share:.0%} of the step; lower train.micro_batch or raise train.global_batch for more."
        )
    if config.train.lr_scaling == "linear":
        reporter.say(
            f"train.lr {config.train.lr:g} × global_batch {resolved.global_batch} / base_batch "
            f"{config.train.base_batch} = {peak_lr(config.train):g} is the peak learning rate."
        )


def head_of(prepared: PreparedModel) -> list[str]:
    """The modules of a classifier that have no values in its folder."""
    assert prepared.folder is not None
    return list(dict.fromkeys(one.rpartition(".")[0] for one in fresh_parameters(prepared.model, prepared.folder)))


def starting_point(config: Config, run: RunDirectory, ranks: Ranks, reporter: Reporter, start: Start) -> Path | None:
    """The checkpoint to start from, if any."""
    given = start.checkpoint
    if given is not None and not start.restarted:
        return given
    own = state.newest(checkpoint_folders(config, run), ranks, reporter.warn) if start.resume else None
    if given is None or (own is not None and read_progress(own).step > read_progress(given).step):
        return own
    return given


def count_flops(prepared: PreparedModel, mesh: Mesh, head_share: float = 1.0) -> Callable[[int, int], float]:
    """FLOPs per device of a micro-batch of (sequences, length), by the usual model FLOPs formula.

    Six per matmul parameter and token (four where it is frozen and needs no weight gradient), plus attention without
    the causal mask's savings. Devices that share a micro-batch share them. NaN for mixtures of experts, of which the
    active share is not known. `head_share`: of the tokens, those with logits.
    """
    model, anatomy = prepared.model, prepared.anatomy
    settings = model.config.get_text_config()
    if any(getattr(settings, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        return lambda sequences, length: math.nan
    if getattr(settings, "num_hidden_layers", None) is None:  # BLT has several models within
        return lambda sequences, length: math.nan
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    adapters = 0 if prepared.adapters is None else prepared.adapters.parameters
    per_token: float = 4 * (prepared.matmul_parameters + adapters) + 2 * matmul_parameters(trained, anatomy)
    if head_share < 1:
        output = model.get_submodule(anatomy.head).weight if not anatomy.classifies else None
        size = 0 if output is None else output.numel()
        per_token -= (1 - head_share) * size * (6 if output is not None and output.requires_grad else 4)
    attention: int = 12 * settings.num_hidden_layers * attention_width(settings)
    sharing = mesh.pp * mesh.cp * mesh.tp
    return lambda sequences, length: sequences * length * (per_token + attention * length) / sharing


def seed_everything(seed: int, rank: int, deterministic: bool) -> None:
    """Seed each rank differently, so that dropout differs between ranks."""
    torch.manual_seed(seed * 100_003 + rank)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
