"""How training goes: the blocks `train` and `eval`."""

from typing import Annotated, Any, Literal

from pydantic import Field, Strict, model_validator

from shoal.config.schema_base import (
    Block,
    Count,
    CountOrZero,
    Positive,
    PositiveOrZero,
    Share,
    ShareBelowOne,
    contradiction,
    spelled,
)

Precision = Annotated[
    Literal["auto", "bf16-mixed", "bf16-true", "16-mixed", "32-true", "fp8"],
    spelled(
        ("auto", "bf16-mixed", "bf16-true", "16-mixed", "32-true", "fp8"),
        {
            "bf16": "bf16-mixed",
            "16": "16-mixed",
            "fp16": "16-mixed",
            "fp16-mixed": "16-mixed",
            "32": "32-true",
            "fp32": "32-true",
            "float32": "32-true",
            "float8": "fp8",
        },
    ),
]
ReduceDtype = Annotated[
    Literal["fp32", "bf16", "fp16"],
    spelled(("fp32", "bf16", "fp16"), {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}),
]
ScheduleName = Annotated[
    Literal["cosine", "linear", "constant", "wsd"],
    spelled(
        ("cosine", "linear", "constant", "wsd"),
        {"warmup_stable_decay": "wsd", "constant_with_warmup": "constant"},
    ),
]
OptimizerName = Annotated[
    Literal["adamw", "adamw8bit", "lion", "sgd", "muon"],
    spelled(
        ("adamw", "adamw8bit", "lion", "sgd", "muon"),
        {
            "adamw_torch": "adamw",
            "adamw_torch_fused": "adamw",
            "adamw_8bit": "adamw8bit",
            "adamw_bnb_8bit": "adamw8bit",
        },
    ),
]


class ScheduleConfig(Block):
    """How the learning rate changes over the run."""

    name: ScheduleName = Field(
        "cosine", description="The curve after the warmup; wsd stays level, then falls near the end."
    )
    warmup: CountOrZero | ShareBelowOne = Field(
        100, description="Steps in which the rate rises from zero; or, with a point, their share of all steps."
    )
    min_ratio: Share = Field(0.1, description="The last learning rate as a share of the highest.")
    decay: ShareBelowOne = Field(0.2, description="The share of all steps, at the end, in which wsd falls.")


class OptimizerConfig(Block):
    """What turns gradients into changes of the weights."""

    name: OptimizerName = Field(
        "adamw",
        description="The optimizer; adamw8bit is adamw that keeps its two moments of every matrix in 8 bits, a quarter "
        "of the memory.",
    )
    betas: Annotated[tuple[ShareBelowOne, ShareBelowOne], Strict(False)] = Field(
        (0.9, 0.95), description="How slowly the running means of the gradient and of its square forget."
    )
    eps: Positive = Field(1e-8, description="Added to the denominator, against division by zero.")
    weight_decay: PositiveOrZero = Field(0.1, description="How strongly weights are pulled to zero.")
    momentum: ShareBelowOne = Field(0.9, description="How slowly the momentum of sgd and muon forgets.")


class RecomputeConfig(Block):
    """Recompute some blocks and not others."""

    every: Count = Field(1, description="Every how-many-th block is recomputed in the backward pass.")


class EarlyStopConfig(Block):
    """When to stop because evaluation no longer gets better."""

    patience: Count = Field(3, description="Evaluations in a row without a better loss before training stops.")


class NanConfig(Block):
    """When losses or gradients that are not numbers are too many, and what then happens."""

    action: Literal["skip", "rollback", "stop"] = Field(
        "skip",
        description="skip: the step changes nothing and the run goes on; rollback: go on from the last checkpoint "
        "before them, without their rows; stop.",
    )
    after: Count = Field(3, description="Steps in a row after which to roll back or stop.")


class SlowRankConfig(Block):
    """When a process that keeps the others waiting is named."""

    behind: Positive = Field(0.3, description="How much slower than the others, as a share.")
    steps: Count = Field(50, description="For how many steps in a row.")


class SpikeConfig(Block):
    """What counts as a spike of the loss, and what then happens."""

    sigma: Positive = Field(6.0, description="Standard deviations above the recent mean that make a spike.")
    action: Literal["report", "skip"] = Field("report", description="Say so, or leave the step out.")


class TrainConfig(Block):
    """How long, how large, how fast and how exactly."""

    epochs: Count | None = Field(
        None, description="Times the data is gone through; 1 when neither epochs, steps nor tokens is given."
    )
    steps: Count | None = Field(None, description="Instead of epochs: optimizer steps.")
    tokens: Count | None = Field(None, description="Instead of epochs: target tokens.")
    global_batch: Count = Field(
        64, description="Rows in an optimizer step, over all devices and passes (packed rows when packing)."
    )
    micro_batch: Count | Literal["auto"] = Field(
        "auto", description="Rows a device takes in one pass; auto: what shoal plan finds fastest of what fits."
    )
    lr: Positive = Field(1e-4, description="The highest learning rate.")
    lr_scaling: Literal["none", "linear"] = Field(
        "none", description="linear multiplies the learning rate by global_batch / base_batch."
    )
    base_batch: Count | None = Field(None, description="The batch at which lr is meant, for lr_scaling linear.")
    lr_groups: dict[str, PositiveOrZero] = Field(
        {}, description="Factors on the learning rate, by pattern of the parameter's name."
    )
    schedule: ScheduleConfig = Field(
        default_factory=ScheduleConfig, description="How the learning rate changes over the run."
    )
    optimizer: OptimizerConfig = Field(
        default_factory=OptimizerConfig, description="What turns gradients into changes of the weights."
    )
    clip: Positive | None = Field(1.0, description="Largest norm of the gradient; null: not clipped.")
    precision: Precision = Field(
        "auto",
        description="The dtypes of weights and compute; auto: bf16-mixed on GPUs that have bf16, 16-mixed on those "
        "that do not, 32-true on CPUs.",
    )
    reduce_dtype: ReduceDtype = Field("fp32", description="In which numbers gradients are summed over devices.")
    recompute: Literal["none", "cheap", "selective", "full", "auto"] | RecomputeConfig = Field(
        "none",
        description="What is computed again in the backward pass instead of being kept in memory; cheap: what costs "
        "next to no time, in compiled blocks; auto: the least with which the run is fastest of what fits.",
    )
    compile: bool | Literal["auto", "thunder", "aot_eager"] = Field(
        "auto",
        description="Whether the blocks are compiled; auto: each block, on CUDA; aot_eager traces without compiling.",
    )
    loss_impl: Literal["auto", "plain", "chunked", "fused"] = Field(
        "auto",
        description="How cross-entropy is computed. plain: all logits of a micro-batch are stored; chunked: logits and "
        "their gradient are computed a chunk of tokens at a time, and never stored whole; fused: chunked, with loss "
        "and gradient in one kernel, as chunked has it on CUDA anyway; auto: chunked where the logits are large.",
    )
    deterministic: bool = Field(False, description="Only kernels that give the same bits each time; slower.")
    early_stop: EarlyStopConfig | None = Field(
        None, description="When to stop because evaluation no longer gets better."
    )
    on_nan: Literal["skip", "rollback", "stop"] | NanConfig = Field(
        "skip",
        description="What happens at losses or gradients that are not numbers; such a step never changes a weight. A "
        "block also says after how many in a row.",
    )
    on_spike: Literal["report", "skip"] | SpikeConfig = Field(
        "report", description="What happens when the loss leaps; a block also says what a leap is."
    )
    on_oom: Literal["stop", "shrink"] = Field(
        "stop",
        description="What happens when memory runs out; shrink: all processes start again from the newest checkpoint, "
        "with half the micro_batch and the same global_batch.",
    )
    slow_rank: SlowRankConfig = Field(
        default_factory=SlowRankConfig, description="When a process that keeps the others waiting is named."
    )
    hang_timeout: Positive = Field(600.0, description="Seconds without progress after which a run counts as hung.")

    @model_validator(mode="before")
    @classmethod
    def _one_epoch_unless_told(cls, given: Any) -> Any:
        if isinstance(given, dict) and all(given.get(key) is None for key in ("epochs", "steps", "tokens")):
            return {**given, "epochs": 1}
        return given

    @model_validator(mode="after")
    def _no_contradictions(self) -> "TrainConfig":
        lengths = [key for key in ("epochs", "steps", "tokens") if getattr(self, key) is not None]
        if len(lengths) > 1:
            named = " and ".join(f"train.{key}" for key in lengths)
            raise contradiction(
                f"{named} contradict each other: give one length and set the others to null.", *reversed(lengths)
            )
        if self.lr_scaling == "linear" and self.base_batch is None:
            raise contradiction(
                "train.lr_scaling linear needs train.base_batch, the batch lr is meant for.", "lr_scaling"
            )
        if self.micro_batch != "auto" and self.micro_batch > self.global_batch:
            raise contradiction(
                f"train.micro_batch ({self.micro_batch}) is larger than train.global_batch ({self.global_batch}).",
                "micro_batch",
                "global_batch",
            )
        return self


class EvalConfig(Block):
    """When and how much is evaluated while training."""

    every: Count = Field(200, description="Steps between evaluations.")
    batches: Count = Field(50, description="Most batches in one evaluation.")
