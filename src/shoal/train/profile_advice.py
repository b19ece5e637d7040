"""A profile held against the forecast: the plan's terms beside the measured ones, the bottleneck, and what to try."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.observe.profile.classify import (
    ATTENTION,
    COMMUNICATION,
    COMPUTE,
    COPY,
    DATA,
    ELEMENTWISE,
    IDLE,
    MATMUL,
    OPTIMIZER,
    OTHER,
    TERMS,
)
from shoal.plan.advise import Question
from shoal.plan.resolved import ResolvedRun
from shoal.plan.speed.compute import block_compute

# The plan's leaf → the profile's term. Collectives that overlap with kernels slow those down.
FORECAST = {
    "matmuls": MATMUL,
    "head and loss": MATMUL,
    "attention": ATTENTION,
    "elementwise kernels": ELEMENTWISE,
    "gradient accumulation": ELEMENTWISE,
    "copies around collectives": ELEMENTWISE,
    "slowdown by overlapped collectives": MATMUL,
    "slowdown by overlapped all-reduce": MATMUL,
    "optimizer": OPTIMIZER,
    "exposed activation transfer": COPY,
    "optimizer state transfer": COPY,
    "weight transfer and CPU optimizer step": COPY,
    "kernel launch overhead": IDLE,
    "pipeline bubble": IDLE,
    "exposed FSDP collectives": COMMUNICATION,
    "tensor parallel": COMMUNICATION,
    "context parallel": COMMUNICATION,
    "between pipeline stages": COMMUNICATION,
    "gradient all-reduce": COMMUNICATION,
    "all-gather of updated weights": COMMUNICATION,
}
# A forward pass once more, in whole or in part: split as the block's forward pass.
REPEATED = ("activation recomputation", "reference forward pass")

# A term is the bottleneck from this share of the step on; the first in this order that reaches its share. Matmuls are
# what a step is for, so they come last.
LIMITS = {
    DATA: 0.05,
    COMMUNICATION: 0.10,
    OTHER: 0.10,
    COPY: 0.10,
    IDLE: 0.15,
    OPTIMIZER: 0.20,
    ATTENTION: 0.35,
    ELEMENTWISE: 0.35,
}
WORDS = {
    DATA: "waiting for data",
    COMMUNICATION: "exposed communication",
    OTHER: "evaluation and checkpoints",
    COPY: "copies between host and device",
    IDLE: "idle time of the device, which waits for its host",
    OPTIMIZER: "the optimizer step",
    ATTENTION: "attention",
    ELEMENTWISE: "elementwise kernels",
    MATMUL: "matmuls",
}
IDLE_ON_CPU = "Python and dispatch between operators"
# Ranks differ if the slowest computes this much longer than the fastest.
UNEVEN = 1.15
# The forecast tells two settings apart from this ratio of their speeds on.
FASTER = 1.01


@dataclass(frozen=True)
class Advice:
    """What takes the time, and one change to try."""

    term: str
    share: float
    sentence: str
    settings: Mapping[str, Any] | None  # config keys and values
    forecast: float | None = None  # speed with them, relative to now, by the plan

    def as_dict(self) -> dict[str, Any]:
        return {
            "term": self.term,
            "share": round(self.share, 4),
            "sentence": self.sentence,
            "try": None if self.settings is None else dict(self.settings),
            "forecast_speedup": None if self.forecast is None else round(self.forecast, 3),
        }


def forecast_terms(resolved: ResolvedRun) -> dict[str, float]:
    """The plan's seconds of a step, in the terms of a profile. They add up to its step."""
    found = dict.fromkeys(TERMS, 0.0)
    block = block_compute(resolved.run)
    forward = {
        MATMUL: block.matmuls.forward,
        ATTENTION: block.attention.forward,
        ELEMENTWISE: block.elementwise.forward,
    }
    if resolved.run.recompute in ("cheap", "selective"):
        forward = {ELEMENTWISE: 1.0}
    for leaf in resolved.speed.step.leaves():
        if leaf.name in REPEATED:
            for term, seconds in forward.items():
                found[term] += leaf.amount * seconds / sum(forward.values())
        else:
            found[FORECAST.get(leaf.name, ELEMENTWISE)] += leaf.amount
    return found


def find_bottleneck(
    terms: Mapping[str, float], resolved: ResolvedRun, ranks: Sequence[Mapping[str, Any]] = ()
) -> Advice:
    """The bottleneck of a step with these `terms`, and a change to try."""
    step = sum(terms.values()) or 1.0
    over = (term for term, limit in LIMITS.items() if terms[term] >= limit * step)
    term = next(over, max(COMPUTE, key=lambda one: terms[one]))
    share = terms[term] / step
    uneven = _uneven(ranks) if term == COMMUNICATION else None
    words = uneven or (IDLE_ON_CPU if term == IDLE and resolved.machine.is_cpu else WORDS[term])
    settings, gain = _best(_candidates(term, resolved), resolved)
    said = f"{share:.0%} of the step is {words}"
    if uneven is not None:
        said, settings, gain = f"{said}; look at that rank's machine with shoal doctor", None, None
    elif settings is None and term == DATA:
        said += "; put the prepared data on a faster disk (SHOAL_CACHE=FOLDER)"
    elif settings is None:
        said += "; no change of the config is known to help"
    else:
        said += f"; try {' '.join(f'{key}={_shown(value)}' for key, value in settings.items())}"
        if gain is not None:
            said += f" ({gain:.2f} times the speed by the forecast)"
    return Advice(term, share, said + ".", settings, gain)


def _uneven(ranks: Sequence[Mapping[str, Any]]) -> str | None:
    """Which rank the others wait for, if one computes much longer."""
    computed = [sum(one["terms"][term] for term in (*COMPUTE, DATA, IDLE)) for one in ranks]
    if len(computed) < 2 or max(computed) < UNEVEN * min(computed):
        return None
    slowest = computed.index(max(computed))
    return (
        f"exposed communication, in which ranks wait for rank {slowest}: it computes "
        f"{max(computed) / min(computed) - 1:.0%} longer than the fastest"
    )


def _candidates(term: str, resolved: ResolvedRun) -> Iterator[dict[str, Any]]:
    """Changes that could help: those that only change how the run is executed first."""
    run, config = resolved.run, resolved.config
    larger = {"train.micro_batch": run.micro_batch * 2}
    may_grow = run.grad_accum_steps % 2 == 0
    if term == DATA:
        more = max(2, min(2 * config.data.workers, os.cpu_count() or 1))
        if more > config.data.workers:
            yield {"data.workers": more}
    elif term == COMMUNICATION:
        if may_grow:
            yield larger
        if run.sharded:
            yield {"parallel.strategy": "zero2"}
            yield {"parallel.strategy": "ddp"}
            yield {"parallel.prefetch": run.prefetch + 1}
        elif run.replicas > 1:
            yield {"parallel.compress": "bf16"}
        if config.train.reduce_dtype == "fp32" and run.mixed:
            yield {"train.reduce_dtype": "bf16"}
        if run.mesh.tp > 1:
            yield {"parallel.tp": run.mesh.tp // 2}
    elif term == OTHER:
        saved, evaluated = config.checkpoint.every, config.eval.every
        assert saved != "auto", "it is resolved"
        yield (  # the more frequent of the two; an evaluation has more to do
            {"eval.every": evaluated * 2}
            if config.data.validation and evaluated <= saved
            else {"checkpoint.every": saved * 2}
        )
    elif term == COPY:
        if config.parallel.offload != "none":
            yield {"parallel.offload": "none"}
        if config.train.recompute == "offload":
            yield {"train.recompute": "full"}
    elif term == IDLE:
        if may_grow:
            yield larger
        if not run.compiled:
            yield {"train.compile": True}
        elif run.world_size == 1 and config.train.cuda_graphs is not True:
            yield {"train.cuda_graphs": True}
        yield {**larger, "train.global_batch": run.global_batch * 2}
    elif term == OPTIMIZER:
        if run.world_size > 1 and not run.data_parallelism.shards_optimizer:
            yield {"parallel.strategy": "zero1"}
        yield {"train.global_batch": run.global_batch * 2}
    elif term == ATTENTION:
        if not (config.data.document_mask or config.data.pack):
            yield {"data.pack": True}
        if config.model.attention == "eager":
            yield {"model.attention": "sdpa"}
        if run.precision == "32-true" and not resolved.machine.is_cpu:
            yield {"train.precision": "bf16-mixed"}
    elif term == ELEMENTWISE:
        if not run.compiled:
            yield {"train.compile": True}
        if run.mixed and run.gpu.bf16:
            yield {"train.precision": "bf16-true"}
    elif term == MATMUL:
        if run.recompute != "none":
            yield {"train.recompute": "none"}
        if run.precision == "32-true" and run.gpu.bf16 and not resolved.machine.is_cpu:
            yield {"train.precision": "bf16-mixed"}
        if run.precision == "bf16-mixed" and run.gpu.fp8:
            yield {"train.precision": "fp8"}


def _best(candidates: Iterator[dict[str, Any]], resolved: ResolvedRun) -> tuple[dict[str, Any] | None, float | None]:
    """The first change that fits and is forecast to be faster, and by how much; if none is, the first that fits."""
    question = Question(resolved.config, resolved.run.shape, resolved.machine)
    now = resolved.speed.tokens_per_second_per_gpu
    possible: list[tuple[dict[str, Any], float]] = []
    for settings in candidates:
        answer = question.answer(settings)
        if answer is not None and (answer.fits or not resolved.fits):
            possible.append((settings, answer.speed.tokens_per_second_per_gpu / now))
    if not possible:
        return None, None
    return next((one for one in possible if one[1] > FASTER), (possible[0][0], None))


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
