"""Options that are set but have no effect in this run: reported, so that nothing is ignored silently."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shoal.catalogue.objectives import objective_facts
from shoal.catalogue.optimizers import find_optimizer
from shoal.catalogue.strategies import Strategy, find_strategy
from shoal.config.engine import uses_deepspeed
from shoal.config.schema import Config
from shoal.config.schema_cells import CellsConfig
from shoal.config.schema_train import MaskingConfig, PreferenceConfig
from shoal.config.words import shown


@dataclass(frozen=True)
class _Run:
    """The config and the number of processes, if known; and the config that the user gave, where this one has more
    filled in."""

    config: Config
    world_size: int | None
    given: Config

    @property
    def strategy(self) -> str:
        """The strategy as far as it is known: auto on one process is single."""
        strategy = self.config.parallel.strategy
        return "single" if strategy == "auto" and self.world_size == 1 else strategy

    @property
    def data_parallelism(self) -> Strategy | None:
        """What the strategy amounts to with `parallel.sharding`; None: not known yet."""
        return None if self.strategy == "auto" else find_strategy(self.strategy, self.config.parallel.sharding)

    @property
    def averages(self) -> bool:
        """Whether gradients are all-reduced unsharded (DDP), as far as it is known."""
        return self.data_parallelism is None or self.data_parallelism.ddp


def _not_fsdp(run: _Run) -> str | None:
    return "parallel.engine is deepspeed, which has no FSDP units" if uses_deepspeed(run.config) else _unsharded(run)


def _unsharded(run: _Run) -> str | None:
    strategy = run.data_parallelism
    if strategy is None or strategy.fully_shard:
        return None
    if strategy.name != run.strategy:
        return f"sharding is {run.config.parallel.sharding}"
    if strategy.partitions_update:
        return f"parallel.strategy {strategy.name} shards the optimizer state and no weights"
    return f"parallel.strategy is {strategy.name}, which shards nothing"


def _state_is_not_partitioned(run: _Run) -> str | None:
    return None if run.strategy == "zero1" else f"parallel.strategy is {run.strategy}, not zero1"


def _in_a_pipeline(run: _Run) -> str | None:
    return (
        "a pipeline stage keeps its weights gathered for all micro-batches"
        if run.config.parallel.pp > 1
        else _not_fsdp(run)
    )


def _no_float8_head(run: _Run) -> str | None:
    train = run.config.train
    if train.fp8_head and train.precision != "fp8":
        return "train.precision is not fp8"
    return "train.loss_impl is plain" if train.fp8_head and train.loss_impl == "plain" else None


def _no_reduction(run: _Run) -> str | None:
    if run.config.train.reduce_dtype == "fp32" and run.config.train.precision != "bf16-true":
        return None  # which is what happens
    if run.config.train.precision == "32-true":
        return "train.precision 32-true reduces gradients in fp32 anyway"
    if run.config.train.precision == "bf16-true":
        return "train.precision bf16-true reduces gradients in bf16"
    if run.config.parallel.pp > 1 and run.averages:
        return "a pipeline without sharding reduces gradients in fp32"
    return "one device has nothing to reduce over" if run.strategy == "single" or run.world_size == 1 else None


def _unscaled(run: _Run) -> str | None:
    precision = run.config.train.precision
    return None if precision in ("auto", "16-mixed") else f"train.precision {precision} needs no loss scale"


def _plain_text(run: _Run) -> str | None:
    data = run.config.data
    if data.kinds == {"chess"}:
        return "a game has no answers, so every token counts"
    return (
        "plain text has no answers, so every token counts"
        if data.format == "text" or data.kinds <= {"text", "tokens", "cells"}
        else None
    )


def _no_chats(run: _Run) -> str | None:
    data = run.config.data
    formats = {block.format for block, _ in data.blocks()}
    if data.kinds <= {"text", "tokens", "chess", "cells"}:
        return "the data has no conversations"
    return (
        f"data.format is {data.format}"
        if not formats & {"auto", "chat", "completion", "preference", "unpaired"}
        else None
    )


def _no_tiles_to_skip(run: _Run) -> str | None:
    if run.config.model.attention != "flex":
        return None
    if _plain_text(run) is not None or not run.config.data.pack:
        return "it is for packed sequences of several documents, and here each sequence is one document"
    return None


def _nothing_played(run: _Run) -> str | None:
    data = run.config.data
    if "chess" not in data.kinds:
        return "only data.source chess generates games"
    return "games are read from data.path, not generated" if data.path is not None else None


def _only_for(source: str) -> Callable[[_Run], str | None]:
    def reason(run: _Run) -> str | None:
        return f"only data.source {source} has it" if not run.config.data.kinds & {source, None} else None

    return reason


def _cells_without(key: str) -> Callable[[_Run], str | None]:
    def reason(run: _Run) -> str | None:
        cells = run.config.data.cells
        if (elsewhere := _only_for("cells")(run)) is not None:
            return elsewhere
        if (key in ("bins", "binning") and cells.tokens != "binned") or (key == "medians" and cells.tokens == "binned"):
            return f"data.cells.tokens is {cells.tokens}"
        if key in ("target_sum", "log1p") and cells.normalized:
            return "data.cells.normalized is true: the matrix is used as it is"
        return None

    return reason


def _no_columns(run: _Run) -> str | None:
    kind = next((kind for kind in ("tokens", "cells") if run.config.data.kinds == {kind}), None)
    return None if kind is None else f"{kind} have no columns"


def _one_source(run: _Run) -> str | None:
    return "data.source is not a list" if isinstance(run.config.data.source, str) else None


def _optimizer_without(option: str) -> Callable[[_Run], str | None]:
    def reason(run: _Run) -> str | None:
        name = run.config.train.optimizer.name
        return f"{name} does not use it" if option not in find_optimizer(name).options else None

    return reason


def _objective_without(option: str) -> Callable[[_Run], str | None]:
    def reason(run: _Run) -> str | None:
        name = run.config.train.objective
        return f"train.objective {name} does not use it" if option not in dict(objective_facts(name).options) else None

    return reason


def _not_masked(run: _Run) -> str | None:
    name = run.config.train.objective
    return f"train.objective {name} masks nothing" if name != "masked_lm" else None


def _no_classes(run: _Run) -> str | None:
    name = run.config.train.objective
    return None if objective_facts(name).classes else f"train.objective {name} learns no classes"


def _compares_answers(run: _Run) -> str | None:
    name = run.config.train.objective
    if objective_facts(name).encoder:
        return f"train.objective {name} reads the whole text"
    if objective_facts(name).of_answers:
        return f"train.objective {name} compares the answers" if run.config.data.train_on == "all" else None
    return _plain_text(run)


def _no_rounding(run: _Run) -> str | None:
    precision = run.config.train.precision
    return None if precision == "bf16-true" else f"train.precision {precision} has fp32 weights"


def _no_evaluation(run: _Run) -> str | None:
    return "data.validation is 0, so nothing is evaluated" if run.config.data.validation == 0 else None


def _nobody_to_wait(run: _Run) -> str | None:
    return "one process has no stragglers" if run.world_size == 1 else None


def _no_best(run: _Run) -> str | None:
    if run.config.checkpoint.metric != "eval_loss":
        return None
    saved, evaluated = run.config.checkpoint.every, run.config.eval.every
    if saved != "auto" and saved % evaluated and evaluated % saved:
        return f"checkpoints every {saved} steps and evaluations every {evaluated} seldom coincide"
    return _no_evaluation(run)


def _interval_is_given(run: _Run) -> str | None:
    return None if run.given.checkpoint.every == "auto" else "checkpoint.every is not auto; it is for shoal plan"


def _no_adapter(run: _Run) -> str | None:
    return "adapter.kind is none" if run.config.adapter.kind == "none" else None


def _not_logged_to(sink: str) -> Callable[[_Run], str | None]:
    return lambda run: f"log.to does not name {sink}" if sink not in run.config.log.to else None


# A key, and the reason why it has no effect in a run (None if it has one).
_RULES: tuple[tuple[str, Callable[[_Run], str | None]], ...] = (
    *(
        (f"adapter.{key}", _no_adapter)
        for key in ("rank", "alpha", "dropout", "targets", "dora", "rslora", "train_also")
    ),
    ("adapter.quantize", lambda run: "adapter.kind is not qlora" if run.config.adapter.kind != "qlora" else None),
    ("model.freeze", lambda run: None if _no_adapter(run) else "an adapter freezes the whole model"),
    ("model.attention", _no_tiles_to_skip),
    ("data.train_on", _compares_answers),
    *((f"data.{key}", _only_for("hf")) for key in ("split", "subset")),
    ("data.token_dtype", _only_for("tokens")),
    *((f"data.cells.{key}", _cells_without(key)) for key in CellsConfig.model_fields),
    ("data.columns", _no_columns),
    *((f"data.mixing.{key}", _one_source) for key in ("by", "when_exhausted")),
    ("data.chat_template", _no_chats),
    *((f"data.{key}", _nothing_played) for key in ("games", "plies", "player")),
    (
        "train.base_batch",
        lambda run: "train.lr_scaling is none" if run.config.train.lr_scaling == "none" else None,
    ),
    (
        "train.schedule.min_ratio",
        lambda run: "a constant schedule does not decay" if run.config.train.schedule.name == "constant" else None,
    ),
    (
        "train.schedule.decay",
        lambda run: "only wsd has it" if run.config.train.schedule.name != "wsd" else None,
    ),
    *((f"train.optimizer.{option}", _optimizer_without(option)) for option in ("betas", "eps", "momentum")),
    *((f"train.preference.{option}", _objective_without(option)) for option in PreferenceConfig.model_fields),
    ("train.mask_ratio", _not_masked),
    *((f"train.masking.{key}", _not_masked) for key in MaskingConfig.model_fields),
    ("data.label", _no_classes),
    ("train.optimizer.rounding", lambda run: _optimizer_without("rounding")(run) or _no_rounding(run)),
    *((f"train.loss_scale.{key}", _unscaled) for key in ("initial", "fixed")),
    ("train.fp8_head", _no_float8_head),
    ("train.reduce_dtype", _no_reduction),
    ("train.slow_rank.behind", _nobody_to_wait),
    ("train.slow_rank.steps", _nobody_to_wait),
    *(
        (f"hardware.{key}", lambda run: "training uses the hardware that is present; it is for shoal plan")
        for key in ("price", "restart_minutes")
    ),
    *((f"hardware.{key}", _interval_is_given) for key in ("mtbf_hours", "disk_gb_per_second")),
    ("train.early_stop", _no_evaluation),
    ("eval.every", _no_evaluation),
    ("eval.batches", _no_evaluation),
    ("eval.prompts", _no_evaluation),
    ("eval.tokens", lambda run: None if run.config.eval.prompts else "eval.prompts is empty"),
    ("checkpoint.keep_best", _no_best),
    (
        "parallel.sharding",
        lambda run: _unsharded(run) if run.config.parallel.sharding != "no_shard" else None,
    ),
    *((f"parallel.{key}", _not_fsdp) for key in ("wrap", "prefetch")),
    ("parallel.optimizer_ranks", _state_is_not_partitioned),
    ("parallel.sequence_parallel", lambda run: "parallel.tp is 1" if run.config.parallel.tp == 1 else None),
    ("parallel.pp_stages", lambda run: "parallel.pp is 1" if run.config.parallel.pp == 1 else None),
    ("parallel.reshard", _in_a_pipeline),
    (
        "parallel.replicate",
        lambda run: "only hybrid_shard has replicas" if run.config.parallel.sharding != "hybrid_shard" else None,
    ),
    ("parallel.pp_schedule", lambda run: "parallel.pp is 1" if run.config.parallel.pp == 1 else None),
    ("parallel.cp_method", lambda run: "parallel.cp is 1" if run.config.parallel.cp == 1 else None),
    (
        "parallel.compress",
        lambda run: f"parallel.strategy is {run.strategy}" if not run.averages else None,
    ),
    *((f"log.wandb.{key}", _not_logged_to("wandb")) for key in ("project", "entity", "mode")),
    ("log.mlflow.experiment", _not_logged_to("mlflow")),
)


# Values that ask for nothing: a default among them is not worth a warning, also where it was given.
_ASKS_FOR_NOTHING: tuple[Any, ...] = (None, False, "auto", "none", "nearest", [], {})


def without_effect(config: Config, world_size: int | None, given: Config | None = None) -> list[str]:
    """A sentence for each option that changes nothing here, if it differs from its default or the user gave it.

    `world_size` if known. `given` is what the user wrote, where `config` has more filled in.
    """
    run = _Run(config, world_size, config if given is None else given)
    values = config.model_dump(mode="json")
    defaults = Config.model_construct().model_dump(mode="json")
    written = _written(run.given)
    sentences = []
    for key, rule in _RULES:
        value, default, was_given = (_at(tree, key) for tree in (values, defaults, written))
        asked = value != default or (was_given == value and value not in _ASKS_FOR_NOTHING)
        if asked and (reason := rule(run)) is not None:
            sentences.append(f"{key} {value if isinstance(value, str) else shown(value)} has no effect: {reason}.")
    return sentences


def _written(config: Config) -> dict[str, Any]:
    """What the user wrote. A config with every block was written by shoal, in a run's folder, with all defaults."""
    if config.model_fields_set >= Config.model_fields.keys() - {"include"}:
        return {}
    return config.model_dump(mode="json", exclude_unset=True)


def _at(tree: dict[str, Any], key: str) -> Any:
    """The value at the dotted key, or None."""
    value: Any = tree
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value
