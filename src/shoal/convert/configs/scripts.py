"""Flags that training scripts have beside the Trainer's: those of DeepSpeed-Chat, and of many others."""

from shoal.convert.configs.deepspeed_rules import put_offload, stage
from shoal.convert.configs.rules import Key, cannot, nothing, rule, to
from shoal.convert.configs.trl import mixture_rule
from shoal.convert.configs.values import count, put_warmup_steps, text, truth


@rule("data.path", "data.source", says="several: a list in data.source")
def _paths(key: Key) -> None:
    if isinstance(key.value, list) and len(key.value) > 1:
        several = [{"path": text(one)} for one in key.value]
        mixture_rule.translate(Key(key.source, key.name, several, key.draft, above=key.above))
    else:
        key.become("data.path", text(key.value[0] if isinstance(key.value, list) else key.value))


@rule("adapter.rank", "adapter.kind", says="0: no adapter")
def _rank(key: Key) -> None:
    if count(key.value) == 0:
        key.no_meaning("0: no adapter")
    else:
        key.become("adapter.kind", "lora")
        key.become("adapter.rank", count(key.value))


@rule("parallel.offload", says="the optimizer, and with ZeRO-3 the parameters")
def _offload(key: Key) -> None:
    if truth(key.value):
        put_offload(key, "cpu", "cpu" if str(key.get("zero_stage", 0)) == "3" else None, None)
    else:
        key.no_meaning("off")


OF_SCRIPTS = {
    "data_path": _paths,
    "max_seq_len": to("data.max_length", count),
    "num_warmup_steps": rule("train.schedule.warmup")(put_warmup_steps),
    "zero_stage": stage,
    "offload": _offload,
    "lora_dim": _rank,
    **cannot("stages of one dataset are not told apart: cut it before", "data_split"),
    **nothing("prepared data is cached by its content", "data_output_path"),
}
