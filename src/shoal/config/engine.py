"""`parallel.engine: deepspeed`: the ZeRO stage of each strategy, and what DeepSpeed's engine cannot do here."""

from collections.abc import Iterator

from shoal.catalogue.optimizers import find_optimizer
from shoal.catalogue.strategies import STRATEGIES, find_strategy
from shoal.config.schema import Config, OffloadConfig, ParallelConfig

Finding = tuple[str, str]  # the key to point at, and the sentence
NATIVE = "or parallel.engine native"
TAKEN = ("adamw", "lion", "sgd")  # by ZeRO, which updates one-dimensional shards of all parameters together


def uses_deepspeed(config: Config) -> bool:
    return config.parallel.engine == "deepspeed"


def zero_stage(strategy: str, sharding: str = "full_shard") -> int:
    """DeepSpeed's ZeRO stage: how many of optimizer state, gradients and weights are sharded."""
    return find_strategy(strategy, sharding).sharded_kinds


def find_unsupported(config: Config) -> Iterator[Finding]:
    """What DeepSpeed's engine does not do: a key of each, and a sentence. Without a strategy, as far as it is known."""
    if not uses_deepspeed(config):
        yield from _only_deepspeed(config)
        return
    yield from _parallelism(config.parallel)
    yield from _training(config)
    if config.parallel.strategy in STRATEGIES:
        stage = zero_stage(config.parallel.strategy, config.parallel.sharding)
        yield from _stage(config, stage)
        yield from _offload(config.parallel, stage)


def _only_deepspeed(config: Config) -> Iterator[Finding]:
    offload = config.parallel.offload
    if isinstance(offload, OffloadConfig) and offload.parameters != "none":
        yield (
            "parallel.offload",
            f"parallel.offload.parameters {offload.parameters} is for parallel.engine deepspeed; use offload cpu, "
            "which offloads all sharded state to host memory.",
        )


def _parallelism(parallel: ParallelConfig) -> Iterator[Finding]:
    for axis in ("tp", "pp", "cp"):
        if (degree := getattr(parallel, axis)) > 1:
            yield (
                f"parallel.{axis}",
                f"parallel.{axis} {degree} cannot be used with parallel.engine deepspeed, which shards over "
                f"data-parallel ranks only; use {axis} 1, {NATIVE}.",
            )
    if parallel.sharding == "hybrid_shard":
        yield (
            "parallel.sharding",
            "parallel.sharding hybrid_shard cannot be used with parallel.engine deepspeed, which shards over all "
            f"ranks; use full_shard, {NATIVE}.",
        )
    if parallel.compress != "none":
        yield (
            "parallel.compress",
            f"parallel.compress {parallel.compress} is for DDP, and parallel.engine deepspeed reduces gradients "
            f"itself; use compress none, {NATIVE}.",
        )


def _training(config: Config) -> Iterator[Finding]:
    train, with_engine = config.train, "cannot be used with parallel.engine deepspeed"
    if config.adapter.kind == "qlora":
        yield (
            "adapter.kind",
            f"adapter.kind qlora {with_engine}, which casts and shards all weights and so cannot hold 4-bit ones; use "
            f"lora, {NATIVE}.",
        )
    if train.precision in ("fp8", "bf16-true"):
        yield (
            "train.precision",
            f"train.precision {train.precision} {with_engine}, which trains in fp32, or in bf16 or fp16 with fp32 "
            f"master weights; use bf16-mixed, {NATIVE}.",
        )
    optimizer = find_optimizer(train.optimizer.name)
    if optimizer.name not in TAKEN:
        why = "quantizes blocks of each parameter" if optimizer.is_quantized else "needs whole matrices"
        yield (
            "train.optimizer.name",
            f"train.optimizer.name {optimizer.name} {with_engine}: it {why}, and ZeRO updates one-dimensional shards "
            f"of all parameters together; use {', '.join(TAKEN)}, {NATIVE}.",
        )
    if train.compile not in ("auto", False):
        yield (
            "train.compile",
            f"train.compile {str(train.compile).lower()} {with_engine}, whose hooks gather weights between the modules "
            f"of a block; use false, {NATIVE}.",
        )
    if train.cuda_graphs is True:
        yield "train.cuda_graphs", f"train.cuda_graphs true {with_engine}; use auto, {NATIVE}."
    on_spike = train.on_spike
    if (on_spike if isinstance(on_spike, str) else on_spike.action) == "skip":
        yield (
            "train.on_spike",
            f"train.on_spike skip {with_engine}, which measures, clips and updates in one step; use report, {NATIVE}.",
        )
    if config.model.freeze and config.adapter.kind == "none" and train.precision in ("bf16-mixed", "16-mixed"):
        yield (
            "model.freeze",
            f"model.freeze with train.precision {train.precision} {with_engine}, which has no fp32 weights of frozen "
            f"parameters to save; use 32-true, {NATIVE}.",
        )


def _stage(config: Config, stage: int) -> Iterator[Finding]:
    if stage == 0 and config.adapter.kind != "none" and config.train.precision in ("bf16-mixed", "16-mixed"):
        yield (
            "adapter.kind",
            f"adapter.kind {config.adapter.kind} with train.precision {config.train.precision} needs ZeRO on "
            f"parallel.engine deepspeed; use strategy zero1, {NATIVE}.",
        )


def _offload(parallel: ParallelConfig, stage: int) -> Iterator[Finding]:
    """DeepSpeed offloads optimizer state from ZeRO-1 on, to host memory; parameters, and all to disk, with ZeRO-3."""
    offload, strategy = parallel.offload, parallel.strategy
    if stage == 0 and offload != "none":
        yield (
            "parallel.offload",
            f"parallel.offload with parallel.engine deepspeed needs ZeRO, and {strategy} shards nothing; use strategy "
            f"zero1, {NATIVE}.",
        )
    elif stage < 3 and (offload == "cpu" or (isinstance(offload, OffloadConfig) and "nvme" in offload.places)):
        what = "cpu offloads parameters" if offload == "cpu" else "to nvme is a part of ZeRO-3"
        yield (
            "parallel.offload",
            f"parallel.offload {what}, and {strategy} is ZeRO-{stage} on parallel.engine deepspeed; use strategy "
            "zero3, or offload optimizer.",
        )
    elif stage < 3 and isinstance(offload, OffloadConfig) and offload.parameters != "none":
        yield (
            "parallel.offload",
            f"parallel.offload.parameters needs ZeRO-3, and {strategy} is ZeRO-{stage} on parallel.engine deepspeed; "
            "use strategy zero3, or leave parameters out.",
        )
