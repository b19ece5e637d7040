"""The blocks `train` and `eval`."""

from typing import Annotated, Any, Literal

from annotated_types import Gt, Lt
from pydantic import Field, Strict, model_validator

from shoal.catalogue.objectives import OBJECTIVES
from shoal.catalogue.optimizers import ALIASES, OPTIMIZERS
from shoal.config.schema_base import (
    Block,
    Count,
    CountOrZero,
    Positive,
    PositiveOrZero,
    Seconds,
    Share,
    ShareBelowOne,
    Size,
    Texts,
    contradiction,
    spelled,
)

Precision = Annotated[
    Literal["auto", "bf16-mixed", "bf16-true", "16-mixed", "16-true", "32-true", "fp8"],
    spelled(
        ("auto", "bf16-mixed", "bf16-true", "16-mixed", "16-true", "32-true", "fp8"),
        {
            "fp16-true": "16-true",
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
# A type checker needs the literals; a test compares them with the table.
OptimizerName = Annotated[
    Literal["adamw", "adamw8bit", "lion", "sgd", "lamb", "adafactor", "muon"],
    spelled(tuple(OPTIMIZERS), ALIASES),
]

# The same here, with `catalogue.objectives`.
ObjectiveName = Annotated[
    Literal["causal_lm", "masked_lm", "classify", "dpo", "ipo", "orpo", "simpo", "apo_zero_unpaired", "kto"],
    spelled(tuple(OBJECTIVES), {"sft": "causal_lm", "mlm": "masked_lm", "classification": "classify"}),
]


class ScheduleConfig(Block):
    """The learning rate schedule."""

    name: ScheduleName = Field(
        "cosine", description="Learning rate schedule after the warmup; wsd: warmup, stable, decay."
    )
    warmup: CountOrZero | ShareBelowOne = Field(
        0.05, description="Warmup steps; as a decimal (0.03): fraction of all steps."
    )
    total_steps: Count | None = Field(
        None, description="The length of the schedule, if it is not that of the run; after it the rate stays lowest."
    )
    min_ratio: Share = Field(0.1, description="Final learning rate as a fraction of the peak.")
    decay: ShareBelowOne = Field(0.2, description="Fraction of all steps in which wsd decays, at the end.")


class LossScaleConfig(Block):
    """The loss scale of 16-mixed."""

    initial: Positive = Field(65536.0, description="The loss scale of the first step.")
    fixed: bool = Field(False, description="Keep it; else it halves after an overflow and doubles after 2000 steps.")


class OptimizerConfig(Block):
    """The optimizer and its hyperparameters."""

    name: OptimizerName = Field(
        "adamw",
        description="The optimizer; adamw8bit is AdamW with both moments of every matrix in 8 bits, a quarter of the "
        "memory.",
    )
    betas: Annotated[tuple[ShareBelowOne, ShareBelowOne], Strict(False)] = Field(
        (0.9, 0.95), description="Decay rates of the moving averages of the gradient and its square."
    )
    eps: Positive = Field(1e-8, description="Added to the denominator for numerical stability.")
    weight_decay: PositiveOrZero = Field(0.1, description="Weight decay coefficient.")
    momentum: ShareBelowOne = Field(0.9, description="Momentum of sgd and muon.")
    in_backward: bool = Field(
        False,
        description="Update each parameter in the backward pass, as soon as its gradient is complete, and free that.",
    )
    paged: bool = Field(
        False, description="Keep the optimizer state in unified memory, which moves to the host if the device is full."
    )
    rounding: Literal["nearest", "stochastic"] = Field(
        "nearest",
        description="How updated weights are rounded to bf16 with precision bf16-true; stochastic: up or down at "
        "random, so that updates smaller than the spacing of bf16 values are not lost.",
    )

    @model_validator(mode="before")
    @classmethod
    def _paged_is_a_key(cls, values: Any) -> Any:
        name = str(values.get("name", "")) if isinstance(values, dict) else ""
        if name.startswith("paged_"):
            plain = ALIASES.get(name.removeprefix("paged_").replace("32bit", "torch"), "adamw")
            raise contradiction(f"name is {name}; write name: {plain} and paged: true.", "name")
        return values


class RecomputeConfig(Block):
    """Activation checkpointing of some transformer layers, or of parts of every layer."""

    every: Count = Field(1, description="Recompute every n-th transformer layer in the backward pass.")
    first: Count | None = Field(
        None, description="Recompute only the first n transformer layers of each pipeline rank."
    )
    parts: Annotated[tuple[Literal["attention", "norm", "activation", "mlp"], ...], Strict(False)] = Field(
        (), description="Recompute these parts of every layer instead of whole layers."
    )

    @model_validator(mode="after")
    def _one_rule(self) -> "RecomputeConfig":
        if (self.every > 1) + (self.first is not None) + bool(self.parts) > 1:
            raise contradiction("train.recompute takes one of every, first and parts.", "parts", "first", "every")
        return self


class EarlyStopConfig(Block):
    """Early stopping on the evaluation loss."""

    patience: Count = Field(3, description="Consecutive evaluations without improvement before training stops.")


class NanConfig(Block):
    """Handling of non-finite losses and gradients."""

    action: Literal["skip", "rollback", "stop"] = Field(
        "skip",
        description="skip: the step updates nothing and training continues; rollback: resume from the last checkpoint "
        "before them and skip their sequences; stop: end the run.",
    )
    after: Count = Field(3, description="Consecutive non-finite steps after which to roll back or stop.")


class SlowRankConfig(Block):
    """Straggler detection."""

    behind: Positive = Field(0.3, description="How much slower than the other ranks, as a fraction.")
    steps: Count = Field(50, description="For how many consecutive steps.")


class SpikeConfig(Block):
    """Detection and handling of loss spikes."""

    sigma: Positive = Field(6.0, description="Standard deviations above the recent mean that count as a spike.")
    action: Literal["report", "skip"] = Field("report", description="report: log it; skip: also skip the step.")


class MaskingConfig(Block):
    """What the model sees in place of the tokens that masked_lm predicts."""

    mask: Share = Field(0.8, description="Fraction of the predicted tokens that are replaced by the mask token.")
    random: Share = Field(
        0.1, description="Fraction of them that are replaced by a random token; the rest stay as they are."
    )

    @model_validator(mode="after")
    def _at_most_all(self) -> "MaskingConfig":
        if self.mask + self.random > 1 + 1e-9:
            raise contradiction(
                f"train.masking: mask {self.mask:g} and random {self.random:g} are more than all of the predicted "
                "tokens; their sum must be at most 1.",
                "mask",
                "random",
            )
        return self


class PreferenceConfig(Block):
    """The hyperparameters of preference tuning."""

    beta: Positive | None = Field(
        None,
        description="Scale of the rewards: how far the model may move away from the reference (dpo, ipo, "
        "apo_zero_unpaired), weight of the odds ratio (orpo); null: 0.1, and 2.0 for simpo.",
    )
    gamma: PositiveOrZero | None = Field(
        None, description="Margin by which the reward of the chosen answer must be larger (simpo); null: 1.0."
    )
    desirable_weight: PositiveOrZero | None = Field(
        None, description="Factor of the losses of desirable answers (apo_zero_unpaired); null: 1.0."
    )
    undesirable_weight: PositiveOrZero | None = Field(
        None,
        description="Factor of the losses of undesirable answers (apo_zero_unpaired), where there are many more or "
        "fewer of them than of desirable ones; null: 1.0.",
    )


class TrainConfig(Block):
    """Length, batch size, optimizer and precision of training."""

    epochs: Count | None = Field(
        None, description="Passes over the training data; 1 if none of epochs, steps and tokens is given."
    )
    steps: Count | None = Field(None, description="Instead of epochs: number of optimizer steps.")
    tokens: Count | None = Field(None, description="Instead of epochs: number of loss tokens.")
    global_batch: Size = Field(
        64, description="Sequences per optimizer step, over all devices and gradient accumulation steps."
    )
    grad_accum: Size | None = Field(
        None,
        description="Gradient accumulation steps, as another way to set global_batch: micro_batch × grad_accum × "
        "data-parallel devices.",
    )
    micro_batch: Size | Literal["auto"] = Field(
        "auto",
        description="Sequences per device in one forward pass; auto: the fastest that fits, according to shoal plan.",
    )
    lr: Positive = Field(1e-4, description="Peak learning rate.")
    lr_scaling: Literal["none", "linear", "sqrt"] = Field(
        "none",
        description="linear: multiply the learning rate by global_batch / base_batch; sqrt: by its square root, which "
        "suits Adam.",
    )
    base_batch: Size | None = Field(None, description="The global batch that lr refers to, for lr_scaling.")
    lr_groups: dict[str, PositiveOrZero] = Field(
        {}, description="Learning rate multipliers, by pattern of parameter names."
    )
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig, description="The learning rate schedule.")
    optimizer: OptimizerConfig = Field(
        default_factory=OptimizerConfig, description="The optimizer and its hyperparameters."
    )
    clip: Positive | None = Field(1.0, description="Maximum gradient norm; null: no clipping.")
    precision: Precision = Field(
        "auto",
        description="The dtypes of weights and compute; auto: bf16-mixed on GPUs that have bf16, 16-mixed on those "
        "that do not, 32-true on CPUs.",
    )
    fp8_head: bool = Field(
        False,
        description="With precision fp8 and a chunked loss: logits, and the gradient of the last hidden states, by fp8 "
        "matmuls too.",
    )
    reduce_dtype: ReduceDtype = Field("fp32", description="Data type in which gradients are reduced over devices.")
    loss_scale: LossScaleConfig = Field(default_factory=LossScaleConfig, description="The loss scale of 16-mixed.")
    recompute: (
        Literal["none", "cheap", "attention", "selective", "full", "offload", "offload-all", "auto"] | RecomputeConfig
    ) = Field(
        "none",
        description="Activation checkpointing: what is recomputed in the backward pass instead of being stored; cheap: "
        "what costs next to no time, in compiled blocks; attention: its scores; offload: as full, and the inputs of "
        "the blocks are kept in pinned host memory; offload-all: all activations are, and nothing is recomputed; auto: "
        "the fastest that fits in memory.",
    )
    compile: bool | Literal["auto", "thunder", "aot_eager"] = Field(
        "auto",
        description="torch.compile of each transformer layer; auto: on CUDA; aot_eager: trace without compiling.",
    )
    cuda_graphs: bool | Literal["auto"] = Field(
        "auto",
        description="Replay forward and backward pass as CUDA graphs, on one GPU or each of ddp's, with compiled "
        "blocks; auto: where launching the kernels of a small model would take about as long as running them.",
    )
    objective: ObjectiveName = Field(
        "causal_lm",
        description="What is learnt; causal_lm: the next token, by cross-entropy over the loss tokens; "
        "masked_lm: tokens that are masked, by a bidirectional encoder; classify: the class of each example, which "
        "data.label names; dpo, ipo, orpo, "
        "simpo: to prefer the chosen answer of a pair to the rejected one; apo_zero_unpaired: to prefer answers whose "
        "label is true to those whose label is false; kto: the same with the KL term of KTO, not built.",
    )
    mask_ratio: Annotated[float, Gt(0), Lt(1)] = Field(
        0.15, description="Fraction of the tokens of an example that masked_lm predicts, rounded; at least one token."
    )
    masking: MaskingConfig = Field(
        default_factory=MaskingConfig, description="What the model sees in place of the tokens that masked_lm predicts."
    )
    preference: PreferenceConfig = Field(
        default_factory=PreferenceConfig, description="The hyperparameters of preference tuning."
    )
    loss_impl: Literal["auto", "plain", "chunked", "fused"] = Field(
        "auto",
        description="How cross-entropy is computed. plain: all logits of a micro-batch are stored; chunked: logits and "
        "their gradient are computed one chunk of tokens at a time; fused: the same "
        "as chunked; auto: chunked where the logits are large.",
    )
    deterministic: bool = Field(False, description="Use deterministic kernels only; slower.")
    early_stop: EarlyStopConfig | None = Field(None, description="Early stopping on the evaluation loss.")
    on_nan: Literal["skip", "rollback", "stop"] | NanConfig = Field(
        "skip",
        description="What to do about non-finite losses or gradients; such a step never updates the weights. A block "
        "also sets after how many consecutive steps.",
    )
    on_spike: Literal["report", "skip"] | SpikeConfig = Field(
        "report", description="What to do about a loss spike; a block also sets its threshold."
    )
    on_oom: Literal["stop", "shrink"] = Field(
        "stop",
        description="What to do when a device runs out of memory; shrink: restart all processes from the newest "
        "checkpoint, with half the micro_batch and the same global_batch.",
    )
    slow_rank: SlowRankConfig = Field(default_factory=SlowRankConfig, description="Straggler detection.")
    hang_timeout: Seconds = Field(600.0, description="Seconds without progress after which the run counts as hung.")

    @model_validator(mode="before")
    @classmethod
    def _one_epoch_unless_told(cls, given: Any) -> Any:
        if isinstance(given, dict) and all(given.get(key) is None for key in ("epochs", "steps", "tokens")):
            return {**given, "epochs": 1}
        return given

    @model_validator(mode="after")
    def _no_contradictions(self) -> "TrainConfig":
        if self.grad_accum is not None and self.micro_batch == "auto":
            raise contradiction(
                "train.grad_accum needs train.micro_batch as a number: global_batch is the product of both and the "
                "data-parallel devices.",
                "grad_accum",
            )
        lengths = [key for key in ("epochs", "steps", "tokens") if getattr(self, key) is not None]
        if len(lengths) > 1:
            named = " and ".join(f"train.{key}" for key in lengths)
            raise contradiction(
                f"{named} contradict each other: give one length and set the others to null.", *reversed(lengths)
            )
        if self.lr_scaling != "none" and self.base_batch is None:
            raise contradiction(
                f"train.lr_scaling {self.lr_scaling} needs train.base_batch, the global batch that lr refers to.",
                "lr_scaling",
            )
        # With grad_accum the global batch follows from the micro-batch.
        if self.micro_batch != "auto" and self.grad_accum is None and self.micro_batch > self.global_batch:
            raise contradiction(
                f"train.micro_batch ({self.micro_batch}) is larger than train.global_batch ({self.global_batch}).",
                "micro_batch",
                "global_batch",
            )
        return self


class EvalConfig(Block):
    """Evaluation during training."""

    every: Count = Field(200, description="Steps between evaluations.")
    batches: Count = Field(50, description="Maximum number of batches per evaluation.")
    prompts: Texts = Field(
        (), description="Prompts that the model continues at every evaluation, greedily; the report shows the texts."
    )
    tokens: Count = Field(32, description="Tokens that are generated after each prompt.")
