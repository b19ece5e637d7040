"""Sets up the run of a custom loop: a model, optimizer, loader and schedule that the user made."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from shoal.catalogue.strategies import find_strategy
from shoal.checkpoint.state import Progress
from shoal.config.run import RunDirectory
from shoal.config.schema import Config
from shoal.data.custom_loader import CustomLoader, Share, check_loader, order_of
from shoal.data.order import Order
from shoal.mistakes import UserMistake
from shoal.observe.progress import Reporter
from shoal.optim.given import GivenOptimizer, check_optimizers, named_optimizers, not_updated
from shoal.optim.loss_scaler import LossScaler
from shoal.optim.offload import find_store
from shoal.optim.zero1 import Partition
from shoal.parallel.custom import check_custom, named_networks, of_all, parallelize_custom
from shoal.parallel.device import Device
from shoal.parallel.exposed import ExposedCommunication
from shoal.parallel.model import TrainedModel
from shoal.parallel.ranks import Ranks
from shoal.plan.batches import count_steps
from shoal.plan.goodput import Conditions, conditions
from shoal.train.custom_announce import custom_plan, write_and_announce
from shoal.train.custom_job import CustomJob
from shoal.train.custom_run import CHECKPOINT_BYTES, CustomRun, resolve_custom
from shoal.train.custom_schedule import Per, check_per, check_schedule, named_schedules
from shoal.train.custom_turns import Turn, Turns
from shoal.train.describe import record_interval, write_plan
from shoal.train.hooks import Hooks
from shoal.train.log import StepLog, next_attempt
from shoal.train.resolve import machine_of_all
from shoal.train.rollback import set_aside
from shoal.train.save import make_saver
from shoal.train.save_interval import SaveInterval
from shoal.train.setup import Start, emulated_on_any, make_guard, make_scaler, seed_everything, starting_point
from shoal.train.step import TrainStep


def set_up_custom(
    config: Config,
    run: RunDirectory,
    ranks: Ranks,
    start: Start,
    device: Device,
    *,
    model: Any,
    optimizer: Any,
    loader: Any,
    schedule: Any,
    schedule_per: Per = "step",
    nodes: int = 1,
) -> CustomJob:
    """Parallelize the model, take over optimizer, loader and schedule, and load the checkpoint to start from. Model,
    optimizer and schedule may be several."""
    check_per(schedule_per)
    optimizers = named_optimizers(optimizer)
    made = Made(named_networks(model), optimizers, loader, named_schedules(schedule, optimizers), schedule_per)
    made.check(config)
    resolved = resolve_custom(config, made.networks.values(), loader, ranks.world_size, nodes, device)
    job = _assemble(made, resolved, run, ranks, device)
    # After the model was initialized, and before the checkpoint's state is restored: dropout differs between ranks.
    seed_everything(resolved.config.seed, ranks.rank, resolved.config.train.deterministic)
    _begin(job, start)
    if ranks.first:
        write_and_announce(job, sum(one.numel() for one in made.names), device)
    return job


@dataclass(frozen=True)
class Made:
    """What the user's script has made."""

    networks: Mapping[str, nn.Module]
    optimizers: Mapping[str, Any]
    loader: Any
    schedules: Mapping[str, Any]
    schedule_per: Per
    names: Mapping[nn.Parameter, str] = field(init=False)  # before the model is parallelized
    tied: Mapping[str, str] = field(init=False)  # other names of weights that modules share

    def __post_init__(self) -> None:
        names = {one: name for name, one in of_all(self.networks, nn.Module.named_parameters).items()}
        object.__setattr__(self, "names", names)
        every = of_all(self.networks, partial(nn.Module.named_parameters, remove_duplicate=False))
        tied = {name: names[one] for name, one in every.items() if names[one] != name}
        object.__setattr__(self, "tied", tied)

    @property
    def in_turns(self) -> bool:
        """Whether some backward passes are of a part of the parameters."""
        return len(self.networks) > 1 or len(self.optimizers) > 1

    def check(self, config: Config) -> None:
        """A UserMistake if one of them cannot be trained."""
        check_custom(self.networks, config)
        check_optimizers(self.optimizers, self.names)
        check_loader(self.loader)
        for name, schedule in self.schedules.items():
            check_schedule(schedule, self.optimizers[name])
        if self.in_turns and config.parallel.compress != "none":
            raise UserMistake(
                f"parallel.compress {config.parallel.compress} is for one model with one optimizer; leave it out."
            )


def _assemble(made: Made, resolved: CustomRun, run: RunDirectory, ranks: Ranks, device: Device) -> CustomJob:
    config, reporter = resolved.config, Reporter(enabled=ranks.first)
    order = order_of(made.loader, config.seed)
    steps = _count_steps(resolved, order)
    if (note := not_updated(made.optimizers.values(), made.names)) is not None:
        reporter.warn(note)
    trained = parallelize_custom(
        made.networks,
        config,
        strategy=resolved.strategy,
        mesh=resolved.mesh,
        ranks=ranks,
        in_turns=made.in_turns,
        emulated=emulated_on_any(config, ranks),
    )
    scaler = make_scaler(config, ranks)
    turns = Turns([_take_turn(made, name, trained, resolved, scaler, ranks) for name in made.optimizers], ranks)
    guards = {f"spikes{turn.name}": turn.step.guard for turn in turns.turns if turn.step.guard is not None}
    hooks = Hooks(reporter.warn)
    plan = custom_plan(trained.placement.shapes, resolved, steps, ranks)
    job = CustomJob(
        resolved=resolved,
        run=run,
        ranks=ranks,
        reporter=reporter,
        model=trained,
        optimizer=turns,
        scaler=scaler,
        controls={"scaler": scaler, **guards},
        step=turns.first.step,
        hooks=hooks,
        log=StepLog(
            every=config.log.every,
            total=steps,
            ranks=ranks,
            attempt=next_attempt(run.metrics),
            peak=None,
            hooks=hooks,
            objective=turns if turns.several else None,
            in_samples=True,
        ),
        communication=ExposedCommunication(trained),
        progress=Progress(world_size=ranks.world_size),
        plan=plan,
        saver=make_saver(
            resolved.requested,
            run,
            ranks,
            describe=lambda folder: write_plan(folder, plan),
            while_waiting=lambda: hooks.on_activity(job.progress.step, "waiting for a save"),
        ),
        interval=SaveInterval(
            # The script evaluates, and not at steps that are known here.
            config.model_copy(update={"data": config.data.model_copy(update={"validation": 0.0})}),
            _conditions(resolved, trained.placement.shapes, device, ranks),
            ranks,
            reporter,
            record=lambda every: record_interval(run, plan, every, ranks, reporter.warn),
        ),
        loader=CustomLoader(made.loader, _share(order, resolved, trained)),
        schedule_per=made.schedule_per,
        last_step=steps,
        tied=made.tied,
    )
    job.log.communication = job.communication.take
    return job


def _count_steps(resolved: CustomRun, order: Order) -> int:
    train = resolved.config.train
    return count_steps(
        epochs=train.epochs or 1,
        steps=train.steps,
        tokens=None,
        sequences=order.training_count or 0,
        loss_tokens=0,
        global_batch=resolved.global_batch,
    )


def _take_turn(
    made: Made, name: str, trained: TrainedModel, resolved: CustomRun, scaler: LossScaler, ranks: Ranks
) -> Turn:
    """An optimizer of the script over the parallelized parameters that it updates."""
    config, optimizer, parameters = resolved.config, made.optimizers[name], trained.parameters
    if len(made.optimizers) > 1:
        mine = {made.names[one] for group in optimizer.param_groups for one in group["params"]}
        parameters = {key: one for key, one in parameters.items() if key in mine}
        # It clips, measures and clears its own gradients; the weights and copies are those of all.
        trained = replace(trained, gradients=trained.gradients.part(parameters))
    partitions = find_strategy(resolved.strategy).partitions_update
    taken = GivenOptimizer(
        optimizer,
        parameters,
        made.names,
        partition=Partition(parameters, trained.parallel_dims.replicas) if partitions else None,
        store=find_store(config.parallel.offload),
        lr_scale=_lr_scale(config),
    )
    # `run.step` clears the gradients. In a loop that accumulates, a zero_grad that was left would discard some.
    optimizer.zero_grad = lambda set_to_none=True: None
    guard = make_guard(config, ranks)
    step = TrainStep(trained, taken, scaler, clip=config.train.clip, guard=guard, total=ranks.sum)
    return Turn(name, taken, step, made.schedules[name])


def _share(order: Order, resolved: CustomRun, trained: TrainedModel) -> Share:
    """Which samples of the global order this rank has."""
    return Share(
        order,
        resolved.global_batch,
        resolved.micro_batch,
        trained.parallel_dims.data_rank,
        resolved.data_parallel,
        resolved.config.seed,
    )


def _begin(job: CustomJob, start: Start) -> None:
    """At step 0, or where a checkpoint ended."""
    checkpoint = starting_point(job.config, job.run, job.ranks, job.reporter, start)
    if checkpoint is not None:
        job.load(checkpoint)
        _check_resumed(job)
        job.interval.restore(job.progress.interval)
        job.reporter.say(f"Resuming after step {job.progress.step} from {checkpoint}.")
    elif start.resume:
        job.reporter.warn("there is no complete checkpoint to resume from: starting at step 0.")
    set_aside(job)
    job.progress.optimizer, job.progress.data = job.optimizer.names, job.fingerprint()
    job.log.skipped = job.progress.skipped


def _lr_scale(config: Config) -> float:
    train = config.train
    if train.lr_scaling == "none":
        return 1.0
    assert train.base_batch is not None, "the schema demands it"
    return train.global_batch / train.base_batch


def _check_resumed(job: CustomJob) -> None:
    before, now = job.progress.data.get("training", {}), job.fingerprint()["training"]
    for key, value in now.items():
        if before.get(key) != value:
            raise UserMistake(
                f"The loader's {key.replace('_', ' ')} was {before.get(key)} when the run started and is {value} now, "
                "which a resumed run cannot change; restore it, or start a new run under another name=…"
            )
    if job.progress.optimizer not in ("", job.optimizer.names):
        raise UserMistake(
            f"The checkpoint holds the state of {job.progress.optimizer}, which {job.optimizer.names} cannot use."
        )


def _conditions(
    resolved: CustomRun, shapes: Mapping[str, tuple[int, ...]], device: Device, ranks: Ranks
) -> Conditions | None:
    """What `checkpoint.every: auto` depends on, besides the time of a step."""
    config = resolved.requested
    if config.checkpoint.every != "auto":
        return None
    size = CHECKPOINT_BYTES * sum(torch.Size(shape).numel() for shape in shapes.values())
    return conditions(config.hardware, config.checkpoint, machine_of_all(config, device, ranks), size)
