"""What cannot be sharded or adapted as configured, as far as sizes tell.

One set of rules: `shoal plan` has only the sizes of the model (`check_model`, `check_choice`), and training calls the
same functions with the model itself (`parallel/check.py`).
"""

from collections.abc import Iterator, Mapping

from shoal.catalogue.causal_models import why_not_packed
from shoal.catalogue.families import find_plan
from shoal.catalogue.objectives import objective_facts
from shoal.catalogue.optimizers import find_optimizer
from shoal.catalogue.shapes import ModelShape
from shoal.catalogue.strategies import find_strategy
from shoal.config.combinations import find_combinations
from shoal.config.schema import AdapterConfig, Config, RecomputeConfig, WrapConfig
from shoal.mistakes import UserMistake, suggestion
from shoal.plan.from_config import has_documents, is_adapted, selects
from shoal.plan.machine import Machine
from shoal.plan.resolved import ResolvedRun
from shoal.plan.run.blocks import linears
from shoal.plan.run.layout import stages_each

MOMENT_BLOCK = 256  # elements that share a scale of an 8-bit moment: as models/tensor_slices.py
QUANTIZED_FROM = 4096  # elements of a matrix whose moments have 8 bits: as optim/eight_bit.py
NF4_BLOCK = 64  # elements that share a scale of an nf4 weight: as models/nf4.py


def check_model(shape: ModelShape, config: Config, machine: Machine, *, native: bool = True) -> None:
    """A UserMistake if the model cannot be sharded or adapted as configured, or the device lacks the precision.
    `native`: it is trained by our own code, which other systems' limits do not concern."""
    parallel = config.parallel
    check_tensor_sizes(
        parallel.tp,
        {"attention heads": shape.heads, "key and value heads": shape.kv_heads, "MLP columns": shape.ffn},
    )
    virtual = 0 if parallel.pp_stages == "auto" else parallel.pp_stages
    check_stages(parallel.pp, parallel.pp_schedule, shape.layers, stages_each(parallel.pp_schedule, virtual))
    precision, gpu = config.train.precision, machine.gpu
    if precision == "fp8" and gpu.fp8 is None:
        raise UserMistake(f"train.precision fp8 is not supported by {gpu.name}; use bf16-mixed.")
    # Other systems load 16-bit weights in fp16 there, which is as large and as fast.
    if precision.startswith("bf16") and gpu.bf16 is None and (native or precision != "bf16-true"):
        raise UserMistake(f"train.precision {precision} is not supported by {gpu.name}; use 16-mixed.")
    names = [one.name for one in linears(shape)]
    targets = () if config.adapter.kind == "none" else config.adapter.targets
    for target in () if isinstance(targets, str) else targets:
        if not any(selects(target, name, shape) for name in names):
            raise UserMistake(
                f"adapter.targets: no linear layer of a {shape.family} block is called {target}."
                f"{suggestion(target, names)} The names are {', '.join(names)}."
            )
    if native:
        check_window(parallel.cp, shape.sliding_window, config.data.max_length)
        check_ulysses(parallel.cp, parallel.tp, parallel.cp_method, shape.heads)
        check_adapter(config.adapter, precision, parallel.tp)
        _check_adapted(shape, config.adapter)
        _check_row_shards(shape, config)


def check_choice(choice: ResolvedRun) -> None:
    """A UserMistake if the schedule of the pipeline does not take this number of micro-batches, or blocks that are
    recomputed selectively have FSDP units inside."""
    check_rounds(choice.mesh.pp, choice.config.parallel.pp_schedule, choice.grad_accum_steps)
    wrap, shape = choice.config.parallel.wrap, choice.run.shape
    if not isinstance(wrap, WrapConfig) or wrap.min_params is None or not find_strategy(choice.strategy).fully_shard:
        return
    for part in (shape.traits.names.attention, shape.traits.names.mlp):
        if sum(one.parameters for one in linears(shape) if one.name in part) >= wrap.min_params:
            check_units_in_blocks(choice.config.train.recompute, f"parts of a block: {', '.join(part)}")


def is_trainable(shape: ModelShape, config: Config) -> bool:
    """Whether training accepts the keys of `config` together, and has a plan for the axes by which the model is split:
    for configs that nobody has written."""
    return next(find_combinations(config), None) is None and find_unplanned(shape, config) is None


def find_refused(shape: ModelShape, config: Config) -> Iterator[str]:
    """What training refuses of this type of model, although it can be forecast: a sentence for each."""
    unplanned = find_unplanned(shape, config)
    if unplanned is not None:
        yield unplanned
    facts, not_apart = objective_facts(config.train.objective), why_not_packed(shape.model_type)
    if not_apart is not None and facts.of_answers:
        yield f"train.objective {facts.name} needs to know the documents of a sequence, but {not_apart}."
    elif not_apart is not None and config.data.pack is True and not facts.encoder and has_documents(config):
        yield f"data.pack is true, but {not_apart}; set data.pack: false, or leave it out."
    if config.data.max_length > shape.positions:
        yield (
            f"data.max_length {config.data.max_length} exceeds the {shape.positions} positions that the model was "
            "trained for; lower it, or choose a model with a longer context."
        )


def find_unplanned(shape: ModelShape, config: Config) -> str | None:
    """The sentence with which training refuses to split a model of this type; None: it does not."""
    for axis in ("tp", "pp", "cp"):
        if getattr(config.parallel, axis) > 1:
            try:
                find_plan(shape.model_type, f"parallel.{axis}")
            except UserMistake as mistake:
                return str(mistake)
    return None


def check_tensor_sizes(tp: int, counts: Mapping[str, int]) -> None:
    """Every tensor-parallel rank needs as many heads and columns."""
    for what, count in counts.items():
        if count % tp:
            fitting = max(one for one in range(1, tp) if all(each % one == 0 for each in counts.values()))
            raise UserMistake(
                f"parallel.tp {tp} does not divide the model's {count} {what}; the next smaller degree "
                f"that does is {fitting}."
            )


def check_stages(pp: int, schedule: str, blocks: int, each: int) -> None:
    """Every pipeline stage needs a block; `each` of them are on a device."""
    stages = pp * each
    if pp > 1 and blocks < stages:
        other = "" if schedule == "1f1b" else ", or use parallel.pp_schedule 1f1b, which has one stage per device"
        raise UserMistake(
            f"parallel.pp {pp} with pp_schedule {schedule} makes {stages} stages, but the model has {blocks} "
            f"blocks, and each stage needs one; lower parallel.pp to {max(1, blocks // each)}{other}."
        )


def check_rounds(pp: int, schedule: str, grad_accum_steps: int) -> None:
    """All schedules but 1f1b run micro-batches in rounds of equal size."""
    rounds = max(1, grad_accum_steps // pp)
    if pp > 1 and schedule != "1f1b" and grad_accum_steps % rounds:
        raise UserMistake(
            f"pp_schedule {schedule} runs micro-batches in rounds of equal size, and {grad_accum_steps} micro-batches "
            f"cannot be split into {rounds} rounds; change train.global_batch or micro_batch so that there are "
            f"{pp * rounds} or {pp * (rounds + 1)}, or use pp_schedule 1f1b."
        )


def check_window(cp: int, window: int | None, longest: int) -> None:
    """The shard of a sequence does not know which of the other keys are within the window."""
    if cp > 1 and window is not None and window < longest:
        raise UserMistake(
            f"parallel.cp cannot be used with a sliding window ({window} tokens) shorter than data.max_length; lower "
            "that, or use parallel.strategy fsdp alone."
        )


def check_ulysses(cp: int, tp: int, method: str, heads: int) -> None:
    """Ulysses shards attention by heads."""
    heads //= tp
    if cp > 1 and method == "ulysses" and heads % cp:
        raise UserMistake(
            f"parallel.cp {cp} with cp_method ulysses does not divide the {heads} attention heads "
            f"{'of a tensor-parallel rank' if tp > 1 else 'of the model'}; use cp_method gather."
        )


def check_adapter(adapter: AdapterConfig, precision: str, tp: int) -> None:
    """What neither tensor parallelism nor fp8 has of adapters."""
    if adapter.kind == "none":
        return
    if adapter.dora and tp > 1:
        raise UserMistake(
            f"adapter.dora needs the norm of whole weight matrices, which parallel.tp {tp} splits; use "
            "parallel.strategy fsdp, or adapter.dora false."
        )
    if adapter.kind != "qlora":
        return
    if precision == "fp8":
        raise UserMistake(
            "train.precision fp8 and adapter.kind qlora both decide how the frozen weights are stored: use bf16-mixed, "
            "or adapter.kind lora."
        )
    if tp > 1 and adapter.quantize.endswith("-dq"):
        raise UserMistake(
            f"adapter.quantize {adapter.quantize} quantizes the scales of a whole matrix together, which parallel.tp "
            f"{tp} splits; use {adapter.quantize.removesuffix('-dq')}."
        )


def check_units_in_blocks(recompute: str | RecomputeConfig, inside: str) -> None:
    """A unit inside a block would be gathered in the middle of selective recomputation, which must see the same
    operators as the forward pass."""
    if recompute == "selective":
        raise UserMistake(
            "train.recompute selective needs FSDP units of whole blocks, and parallel.wrap selects "
            f"{inside}; use recompute full, or wrap auto."
        )


def check_nf4_shard(tp: int, name: str, inputs: int) -> None:
    """Tensor parallelism must not split a block of an nf4 weight."""
    if inputs % (tp * NF4_BLOCK):
        raise UserMistake(
            f"adapter.kind qlora with parallel.tp {tp}: {name} has {inputs} inputs, and each rank "
            f"needs a multiple of {NF4_BLOCK}; use adapter.kind lora, or a smaller parallel.tp."
        )


def check_moment_shards(tp: int, optimizer: str, widths: Mapping[str, int]) -> None:
    """Tensor parallelism must not split a block of 8-bit moments. `widths`: of the matrices whose rows it splits."""
    for name, width in widths.items():
        if width % (tp * MOMENT_BLOCK):
            fitting = max(
                one
                for one in range(1, tp)
                if tp % one == 0 and (one == 1 or all(each % (one * MOMENT_BLOCK) == 0 for each in widths.values()))
            )
            raise UserMistake(
                f"parallel.tp {tp} shards rows of {name} into {width // tp} elements, not a multiple of the "
                f"{optimizer} block of {MOMENT_BLOCK}; use parallel.tp {fitting}, or train.optimizer.name adamw."
            )


def _check_adapted(shape: ModelShape, adapter: AdapterConfig) -> None:
    """The layers of a block, whose sizes are known of families."""
    if adapter.kind == "none" or not shape.is_family:
        return
    if adapter.dora and shape.traits.transposed:
        raise UserMistake(
            f"adapter.dora: the linear layers of a {shape.family} store their matrices transposed; use adapter.dora "
            "false for this model."
        )
    # Transposed matrices are not quantized.
    if adapter.kind == "qlora" and (shape.traits.transposed or all(one.inputs % NF4_BLOCK for one in linears(shape))):
        raise UserMistake(
            f"adapter.kind qlora: the blocks of the model have no linear layers whose input size is a multiple of "
            f"{NF4_BLOCK}; use adapter.kind lora."
        )
    wanted = [one for one in linears(shape) if is_adapted(adapter, one.name, shape)]
    least = min(min(one.inputs, one.outputs) for one in wanted)
    if adapter.rank > least:
        raise UserMistake(
            f"adapter.rank {adapter.rank} is larger than a matrix that it adapts; use at most {least}, or leave that "
            "out of adapter.targets."
        )


def _check_row_shards(shape: ModelShape, config: Config) -> None:
    """Blocks of quantized weights and moments under tensor parallelism. A model of which something is frozen has names
    that sizes do not tell: training checks it."""
    tp, optimizer = config.parallel.tp, config.train.optimizer.name
    rows = [one for one in linears(shape) if one.row]
    if tp == 1:
        return
    if config.adapter.kind == "qlora":
        for one in rows:
            if one.inputs % NF4_BLOCK == 0:  # others are not quantized
                check_nf4_shard(tp, one.name, one.inputs)
    if find_optimizer(optimizer).is_quantized and config.adapter.kind == "none" and not config.model.freeze:
        widths = {one.name: one.inputs for one in rows if one.parameters >= QUANTIZED_FROM}
        check_moment_shards(tp, optimizer, widths)
