"""How single arguments of the Trainer and of TRL are translated; `trainer.py` has the tables."""

from typing import Any

from shoal.convert.configs.deepspeed import DEEPSPEED
from shoal.convert.configs.linked import follow
from shoal.convert.configs.rules import (
    Key,
    Source,
    rule,
    translate,
)
from shoal.convert.configs.values import (
    count,
    number,
    on,
    put_name,
    put_schedule,
    put_warmup_steps,
    text,
    texts,
    truth,
)

LAUNCHED = "a matter of the launcher"
LOSSES = {"sigmoid": "dpo", "ipo": "ipo"}


@rule("parallel.strategy", says="DeepSpeed's JSON, as a file or in place")
def deepspeed_file(key: Key) -> None:
    """A DeepSpeed config in another file or in this one."""
    if isinstance(key.value, dict):
        translate(Source(key.source.name, DEEPSPEED, key.value), key.draft, above=key.name)
    elif key.value is True:
        key.no_meaning("a switch: deepspeed_config names the JSON")
    elif not follow(key):
        key.not_carried("names DeepSpeed's JSON, which is not there: give it as another FILE")


@rule("train.steps", says="-1: train.epochs")
def steps(key: Key) -> None:
    """A number of steps that replaces epochs if it is positive."""
    if count(key.value) > 0:
        key.become("train.steps", count(key.value))
    else:
        key.no_meaning("-1: the epochs count")


@rule("train.precision", says="bf16-mixed, 16-mixed, or 32-true where neither is on")
def half(key: Key) -> None:
    """`bf16` and `fp16`, which are on or off."""
    mine = "bf16-mixed" if key.last.startswith(("bf16", "bfloat16")) else "16-mixed"
    others = [name for name in ("bf16", "fp16", "bfloat16", "float16") if name != key.last]
    if on(key.value):
        key.become("train.precision", mine)
    elif any(on(key.get(name)) for name in others) or key.draft.get("train.precision") is not None:
        key.no_meaning("off")
    else:
        key.become("train.precision", "32-true", "neither bf16 nor fp16")


@rule("train.precision", says="bf16 weights are bf16-true")
def dtype_rule(key: Key) -> None:
    name = str(key.value).removeprefix("torch.")
    if name in ("bfloat16", "bf16") and not on(key.get("use_peft", False)):
        key.become("train.precision", "bf16-true", "the weights are loaded in bf16")
    elif name in ("auto", "float32", "fp32", "bfloat16", "bf16"):
        key.no_meaning("train.precision decides: fp32 master weights, or frozen ones in bf16")
    else:
        key.not_carried("weights in fp16 are not trained: train.precision 16-mixed keeps fp32 master weights")


@rule("train.optimizer.betas")
def beta_rule(key: Key) -> None:
    both = [number(key.get("adam_beta1", 0.9)), number(key.get("adam_beta2", 0.999))]
    key.become("train.optimizer.betas", both)


@rule("train.schedule.name", "train.schedule.min_ratio")
def schedule(key: Key) -> None:
    """The scheduler's name."""
    put_schedule(key)


@rule("train.schedule.warmup", says="warmup_steps goes before it")
def warmup_ratio(key: Key) -> None:
    """A share of the run, unless steps are given."""
    if number(key.get("warmup_steps", 0) or 0) > 0:
        key.no_meaning("warmup_steps decides")
    elif number(key.value) == 0:
        key.become("train.schedule.warmup", 0)
    else:
        key.become("train.schedule.warmup", number(key.value))


@rule("train.schedule.warmup")
def warmup_steps(key: Key) -> None:
    """Steps; 0 means the ratio."""
    if number(key.value) == 0 and number(key.get("warmup_ratio", 0) or 0) > 0:
        key.no_meaning("0: warmup_ratio decides")
    else:
        put_warmup_steps(key)


@rule("eval.every", "data.validation", says="no: data.validation 0")
def eval_strategy(key: Key) -> None:
    """When the model is evaluated."""
    wanted = "no" if key.value is False else str(key.value)
    if wanted == "no":
        key.become("data.validation", 0.0, "no evaluation")
    elif wanted == "steps":
        key.no_meaning("eval.every counts steps")
    else:
        key.not_carried("eval.every counts steps, and how many an epoch has is known when the data is")


@rule("checkpoint.every")
def save_strategy(key: Key) -> None:
    """When checkpoints are saved."""
    wanted = "no" if key.value is False else str(key.value)
    if wanted == "steps":
        key.no_meaning("checkpoint.every counts steps")
    elif wanted == "no":
        key.not_carried("a run always saves: set checkpoint.every to a number that it does not reach")
    else:
        key.not_carried("checkpoint.every counts steps, and how many an epoch has is known when the data is")


def step_count(ours: str) -> Any:
    """Steps between two events, which transformers also takes as a share of the run."""

    @rule(ours)
    def translated(key: Key) -> None:
        if 0 < number(key.value) < 1:
            key.not_carried(f"{ours} counts steps, not a share of the run")
        else:
            key.become(ours, count(key.value))

    return translated


@rule("checkpoint.metric")
def metric_rule(key: Key) -> None:
    if str(key.value) in ("loss", "eval_loss"):
        key.become("checkpoint.metric", "eval_loss")
    else:
        key.not_carried("checkpoint.metric is eval_loss or loss")


@rule("model.attention")
def attention(key: Key) -> None:
    """The implementation of attention."""
    name = str(key.value).lower()
    if "flash" in name or name == "xformers":
        key.become("model.attention", "auto", "auto uses PyTorch's flash attention")
    else:
        key.become("model.attention", {"flex_attention": "flex"}.get(name, name))


@rule("data.path", "data.source")
def dataset(key: Key) -> None:
    """An id of the Hub, or a path."""
    key.become("data.path", text(key.value))


@rule("data.validation")
def test_split_rule(key: Key) -> None:
    if str(key.get("eval_strategy", key.get("evaluation_strategy", "no"))) in ("no", "False"):
        key.no_meaning("no evaluation")
    else:
        key.become("data.validation", text(key.value))


@rule("data.columns")
def text_field_rule(key: Key) -> None:
    if key.value == "text":
        key.no_meaning("the name that data.format: text has too")
    else:
        key.become("data.columns", {"text": text(key.value)})


@rule("data.train_on")
def answers_only(key: Key) -> None:
    """Whether only the answers count in the loss."""
    key.become("data.train_on", "answers" if truth(key.value) else "all")


@rule("adapter.kind")
def use_peft_rule(key: Key) -> None:
    if not truth(key.value):
        key.become("adapter.kind", "none")
    elif on(key.get("load_in_4bit", False)):
        key.become("adapter.kind", "qlora")
    else:
        key.become("adapter.kind", "lora")


@rule("adapter.kind", "adapter.quantize")
def four_bit(key: Key) -> None:
    """Frozen weights in four bits: QLoRA."""
    if not truth(key.value):
        key.no_meaning("off")
    elif str(key.get("bnb_4bit_quant_type", "nf4")) != "nf4":
        key.not_carried("adapter.quantize has nf4 and nf4-dq")
    else:
        double = on(key.get("use_bnb_nested_quant", False)) or on(key.get("bnb_4bit_use_double_quant", False))
        key.become("adapter.kind", "qlora")
        key.become("adapter.quantize", "nf4-dq" if double else "nf4")


@rule("adapter.rank", "adapter.kind")
def rank_of_a_script(key: Key) -> None:
    """TRL has `use_peft` beside it; a script that takes a rank alone trains LoRA."""
    key.become("adapter.rank", count(key.value))
    if key.get("use_peft") is None and not on(key.get("load_in_4bit", False)):
        key.become("adapter.kind", "lora", "a rank is given")


@rule("adapter.targets", says="all-linear is auto")
def targets(key: Key) -> None:
    """The layers that get an adapter."""
    names = texts(key.value)
    key.become("adapter.targets", "all-linear" if names in (["all-linear"], ["all_linear"]) else names)


@rule("train.objective", says="sft, dpo, orpo, kto")
def task(key: Key) -> None:
    """What TRL's command or script trains."""
    name = str(key.value)
    if name == "sft":
        key.become("train.objective", "causal_lm")
    elif name == "dpo":
        losses = texts(key.get("loss_type", "sigmoid"))
        if len(losses) == 1 and losses[0] in LOSSES:
            key.become("train.objective", LOSSES[losses[0]])
        else:
            key.not_carried(f"the losses of dpo are {' and '.join(LOSSES)}, not {' '.join(losses)}")
    elif name == "kto" and str(key.get("loss_type", "kto")) == "apo_zero_unpaired":
        key.become("train.objective", "apo_zero_unpaired")
    elif name in ("orpo", "kto", "cpo"):
        simpo = name == "cpo" and str(key.get("loss_type", "sigmoid")) == "simpo"
        key.become("train.objective", "simpo" if simpo else name)
    else:
        key.not_carried(f"{name} is not built; train.objective has causal_lm, dpo, ipo, orpo, simpo")


@rule("train.objective")
def loss_type_rule(key: Key) -> None:
    kind = key.get("trl_task")
    if kind in ("dpo", "kto", "cpo"):
        key.no_meaning("train.objective says it")
    elif str(key.value) in ("nll", "chunked_nll"):
        key.no_meaning("cross-entropy")
    else:
        key.not_carried("train.objective has causal_lm, dpo, ipo, orpo, simpo")


@rule("name")
def run_name_rule(key: Key) -> None:
    if key.get("output_dir") is not None:
        key.no_meaning("the run is named by its folder")
    else:
        put_name(key)


@rule("model.dropout")
def no_dropout_rule(key: Key) -> None:
    key.become("model.dropout", 0.0) if truth(key.value) else key.no_meaning("off")


@rule("train.recompute")
def offload_activations_rule(key: Key) -> None:
    key.become("train.recompute", "offload") if truth(key.value) else key.no_meaning("off")


@rule("train.on_oom")
def find_batch_size_rule(key: Key) -> None:
    key.become("train.on_oom", "shrink") if truth(key.value) else key.no_meaning("off")


@rule("seed")
def data_seed_rule(key: Key) -> None:
    if key.value == key.get("seed", 42):
        key.no_meaning("one seed for all randomness")
    else:
        key.not_carried("one seed for all randomness")


@rule("data.streaming")
def streaming(key: Key) -> None:
    """Data that is read while training."""
    key.become("data.streaming", True) if truth(key.value) else key.no_meaning("off")


@rule("data.validation")
def percentage_rule(key: Key) -> None:
    key.become("data.validation", number(key.value) / 100)
