"""Incompatible keys: refused when the config is loaded, with the reason and the nearest alternative."""

from collections.abc import Iterator

from shoal.catalogue.families import BUILDABLE, FAMILIES, listed
from shoal.catalogue.objectives import objective_facts
from shoal.catalogue.optimizers import find_optimizer
from shoal.catalogue.shapes import find_shape
from shoal.catalogue.strategies import SHARDINGS, STRATEGIES, Strategy, find_strategy
from shoal.config.engine import find_unsupported
from shoal.config.locate import KeyPath, Origins
from shoal.config.mesh import divide_processes, length_multiple
from shoal.config.reference import computes_before
from shoal.config.schema import Config, ParallelConfig
from shoal.mistakes import UserMistake

Finding = tuple[str, str]  # the key to point at, and the sentence


def refuse_combinations(config: Config, origins: Origins, *, planned: bool = False) -> None:
    """Raise a UserMistake with one line for each combination that cannot work; `planned`: in any system."""
    sentences = []
    for key, sentence in find_combinations(config, planned=planned):
        path: KeyPath = tuple(key.split("."))
        sentences.append(f"{origins.prefix(path)}{sentence}")
    if sentences:
        raise UserMistake("\n".join(sentences))


def find_combinations(config: Config, *, planned: bool = False) -> Iterator[Finding]:
    """The combinations that cannot work: a key of each, and a sentence. `planned`: without those that only our own code
    lacks."""
    if not planned:
        yield from find_untrained(config)
        yield from _labels(config)
    yield from _sharding(config)
    yield from _parallelism(config)
    yield from find_unsupported(config)
    yield from _attention(config)
    yield from _data(config)
    yield from _encoder(config)
    yield from _adapter(config)
    yield from _sizes(config)
    yield from _samples(config)


def find_untrained(config: Config) -> Iterator[Finding]:
    """What others train, as Megatron does: attention by matmuls over sharded sequences, encoders with tensor and
    pipeline parallelism."""
    objective = config.train.objective
    for key in ("tp", "pp", "cp"):
        degree = getattr(config.parallel, key)
        if degree > 1 and objective_facts(objective).encoder:
            yield (
                f"parallel.{key}",
                f"parallel.{key} {degree} is for causal language models, not for train.objective {objective}; "
                f"use {key} 1 and parallel.strategy fsdp, which shards any model.",
            )
    for key in ("cp", "tp"):
        if getattr(config.parallel, key) > 1 and config.model.attention == "eager":
            yield (
                "model.attention",
                f"model.attention eager needs unsharded sequences, and parallel.{key} shards them; use auto.",
            )


def _sharding(config: Config) -> Iterator[Finding]:
    parallel = config.parallel
    strategy, sharding = STRATEGIES.get(parallel.strategy), parallel.sharding  # None: auto
    if strategy is not None:
        yield from _strategy(strategy, sharding, parallel)
    if parallel.offload == "cpu" and parallel.pp > 1:
        yield (
            "parallel.offload",
            "parallel.offload cpu cannot be used with parallel.pp: a stage keeps its weights gathered for all "
            "micro-batches of a step; use offload optimizer, or pp 1.",
        )


def _strategy(strategy: Strategy, sharding: str, parallel: ParallelConfig) -> Iterator[Finding]:
    if strategy.shards_optimizer and not strategy.takes_sharding and sharding != "full_shard":
        nearest = SHARDINGS[sharding] if SHARDINGS[sharding] != "fsdp" else f"fsdp with sharding {sharding}"
        yield (
            "parallel.sharding",
            f"parallel.sharding {sharding} is for fsdp, and {strategy.name} has its own; use strategy {nearest}.",
        )
    if find_strategy(strategy.name, sharding).keeps_weights and parallel.reshard not in ("auto", False):
        yield (
            "parallel.reshard",
            f"parallel.reshard {str(parallel.reshard).lower()} frees weights after the forward pass, and "
            f"{sharding if strategy.takes_sharding else strategy.name} keeps them; use fsdp with full_shard.",
        )
    if parallel.offload == "cpu" and not strategy.fully_shard:
        yield (
            "parallel.offload",
            f"parallel.offload cpu offloads sharded state, and {strategy.name} shards no weights; use strategy fsdp, "
            "or offload optimizer.",
        )


def _parallelism(config: Config) -> Iterator[Finding]:
    parallel, train = config.parallel, config.train
    if parallel.tp > 1 and find_optimizer(train.optimizer.name).needs_whole_matrices:
        yield (
            "parallel.tp",
            f"parallel.tp shards matrices that {train.optimizer.name} needs whole; use tp 1 with strategy fsdp, or "
            "optimizer adamw.",
        )
    if parallel.pp > 1 and parallel.compress != "none":
        yield (
            "parallel.compress",
            f"parallel.compress {parallel.compress} is for DDP, and a pipeline reduces its gradients itself; use "
            "compress none, or pp 1.",
        )
    if parallel.pp > 1 and parallel.pp_schedule == "zero-bubble" and train.recompute == "selective":
        yield (
            "train.recompute",
            "train.recompute selective recomputes once, and zero-bubble runs two backward passes per block; use "
            "recompute full, or pp_schedule interleaved.",
        )


def _attention(config: Config) -> Iterator[Finding]:
    attention, train = config.model.attention, config.train
    if attention == "flex" and train.compile is False:
        yield (
            "train.compile",
            "train.compile false makes flex attention compute all pairs of tokens; use compile auto, or attention "
            "auto.",
        )
    if attention == "flex" and config.parallel.cp > 1:
        yield (
            "model.attention",
            "model.attention flex needs unsharded sequences, and parallel.cp shards them; use attention auto, or cp 1.",
        )


def _data(config: Config) -> Iterator[Finding]:
    objective = objective_facts(config.train.objective)
    if config.data.streaming and computes_before(config):
        yield (
            "data.streaming",
            f"data.streaming reads data while training, and train.objective {objective.name} computes the reference of "
            "all of it before, unless an adapter can be switched off; use false, or adapter.kind lora without "
            "train_also and pp.",
        )
    if config.data.streaming and config.train.epochs is not None:
        yield (
            "data.streaming",
            "data.streaming does not know how long an epoch is: set train.steps or train.tokens, not train.epochs.",
        )
    if config.data.streaming and "tokens" in config.data.kinds:
        yield (
            "data.streaming",
            "data.streaming has nothing to tokenize in source tokens, which is memory-mapped; use false.",
        )


def _labels(config: Config) -> Iterator[Finding]:
    """What a forecast does not need of a classifier."""
    if objective_facts(config.train.objective).classes and config.data.label is None:
        yield (
            "train.objective",
            "train.objective classify needs data.label, the field of the records that names the class of an example.",
        )


def _encoder(config: Config) -> Iterator[Finding]:
    """What the objectives of encoders need, and what they do not have."""
    train, data = config.train, config.data
    facts, family = objective_facts(train.objective), _family(config)
    if family is not None and facts.encoder and FAMILIES[family].causal:
        yield (
            "model.shape",
            f"model.shape is a {family}, whose tokens attend to earlier ones only, and train.objective "
            f"{train.objective} needs an encoder; use family "
            f"{listed([name for name in BUILDABLE if not FAMILIES[name].causal])}.",
        )
    if family is not None and not facts.encoder and not FAMILIES[family].causal:
        yield (
            "model.shape",
            f"model.shape is a {family}, an encoder, in which every token would attend to its own label; use "
            "train.objective masked_lm or classify, or family "
            f"{listed([name for name in BUILDABLE if FAMILIES[name].causal])}.",
        )
    if not facts.encoder:
        return
    if data.document_mask:
        yield (
            "data.document_mask",
            f"data.document_mask is for causal language models, not for train.objective {train.objective}; leave "
            "data.pack out, which makes a sequence of each document.",
        )
    if facts.classes and data.streaming:
        yield (
            "data.streaming",
            "data.streaming does not know all classes before it has read all examples, and train.objective classify "
            "needs them; use false.",
        )
    if facts.classes and not isinstance(data.source, str):
        yield (
            "data.source",
            "data.source is a list, and train.objective classify takes one source; list several files in data.path.",
        )


def _family(config: Config) -> str | None:
    shape = config.model.shape
    if shape is None:
        return None
    return find_shape(shape).family if isinstance(shape, str) else shape.family


def _adapter(config: Config) -> Iterator[Finding]:
    if config.adapter.from_ is not None and config.adapter.kind == "none":
        yield (
            "adapter.from",
            f"adapter.from {config.adapter.from_} is an adapter to train, and adapter.kind is none; use kind lora.",
        )


def _samples(config: Config) -> Iterator[Finding]:
    """The logits that samples need exist on every rank only without model parallelism."""
    if not config.eval.prompts:
        return
    for axis in ("tp", "pp", "cp"):
        if (size := getattr(config.parallel, axis)) > 1:
            yield (
                "eval.prompts",
                f"eval.prompts cannot be used with parallel.{axis} {size}; remove it, and use shoal generate RUN.",
            )
    if config.train.objective != "causal_lm":
        yield (
            "eval.prompts",
            f"eval.prompts is for train.objective causal_lm, not {config.train.objective}; use shoal generate RUN.",
        )


def _sizes(config: Config) -> Iterator[Finding]:
    parallel, hardware = config.parallel, config.hardware
    precision = config.train.precision
    multiple, length = length_multiple(parallel, precision), config.data.max_length
    if length % multiple:
        below = length // multiple * multiple
        near = " or ".join(str(one) for one in (below, below + multiple) if one)
        over = f"be sharded over parallel.cp {parallel.cp} × tp {parallel.tp}"
        if length % length_multiple(parallel, "bf16-mixed") == 0:
            over = f"be used with {precision} matmuls"
        yield (
            "data.max_length",
            f"data.max_length {length} cannot {over}: it must be a multiple of {multiple}, such as {near}.",
        )
    if hardware.devices != "auto":
        try:
            divide_processes(parallel, hardware.devices * hardware.nodes)
        except UserMistake as mistake:
            yield "hardware.devices", str(mistake)
