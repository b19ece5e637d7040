"""torchtune's YAML."""

import re
from typing import Any

from shoal.convert.configs.rules import Key, System, Tree, cannot, nothing, rule, to, words
from shoal.convert.configs.values import (
    MLP,
    count,
    number,
    put_folder,
    put_loggers,
    put_optimizer,
    put_recompute,
    put_schedule,
    text,
    texts,
    truth,
)

# Builders of datasets: the id, and the format where the keys of its records do not tell.
DATASETS = {
    "alpaca_dataset": "tatsu-lab/alpaca",
    "alpaca_cleaned_dataset": "yahma/alpaca-cleaned",
    "slimorca_dataset": "Open-Orca/SlimOrca-Dedup",
    "samsum_dataset": "Samsung/samsum",
    "grammar_dataset": "liweili/c4_200m",
    "wikitext_dataset": "EleutherAI/wikitext_document_level",
    "cnn_dailymail_articles_dataset": "ccdv/cnn_dailymail",
    "stack_exchange_paired_dataset": "lvwerra/stack-exchange-paired",
    "hh_rlhf_helpful_dataset": "RLHFlow/HH-RLHF-Helpful-standard",
}
FORMATS = {"instruct_dataset": "completion", "chat_dataset": "chat", "text_completion_dataset": "text"} | {
    "preference_dataset": "preference"
}
ATTENTION = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "output_proj": "o_proj"}


def _component(key: Key) -> str:
    return str(key.value).rpartition(".")[2]


@rule("adapter.kind", says="the weights come from the checkpointer's folder")
def _model(key: Key) -> None:
    name = _component(key)
    if "vision" in name or "clip" in name:
        key.not_carried("models of images are not built")
    elif name.startswith("qlora_"):
        key.become("adapter.kind", "qlora")
    elif re.match(r"(lora|dora|qdora)_", name):
        key.become("adapter.kind", "qlora" if name.startswith("q") else "lora")
        if "dora" in name:
            key.become("adapter.dora", True)
    else:
        key.no_meaning("told by the files of the checkpointer's folder")


@rule("adapter.targets")
def _targets(key: Key) -> None:
    names = [ATTENTION.get(name, name) for name in texts(key.get("model.lora_attn_modules", []))]
    if truth(key.get("model.apply_lora_to_mlp", False)):
        names += MLP
    if truth(key.get("model.apply_lora_to_output", False)):
        names.append("lm_head")
    key.become("adapter.targets", names)


@rule("data.path", "data.format", says="alpaca_dataset, chat_dataset and others")
def _dataset(key: Key) -> None:
    name = _component(key)
    if name in DATASETS:
        key.become("data.path", key.get("dataset.source", DATASETS[name]))
        if name == "stack_exchange_paired_dataset":
            key.become("data.format", "preference")
            key.become("data.columns", {"prompt": "question", "chosen": "response_j", "rejected": "response_k"})
    elif name in FORMATS:
        key.become("data.format", FORMATS[name])
    else:
        key.not_carried("a dataset that shoal does not know: set data.path and data.format")


@rule("data.path", says="json, csv and others name the kind of file")
def _source(key: Key) -> None:
    if str(key.value) in ("json", "csv", "parquet", "text", "arrow"):
        key.no_meaning("data_files has the path")
    else:
        key.become("data.path", text(key.value))


@rule("data.validation", says="without dataset_val: data.validation 0")
def _held_out(key: Key) -> None:
    if key.default:
        key.become("data.validation", 0.0)
    elif key.get("dataset_val.source") is not None or key.get("dataset_val._component_") != key.get(
        "dataset._component_"
    ):
        key.not_carried("data.validation is another split of the training data, or a path")
    else:
        key.become("data.validation", text(key.value))


@rule("train.steps")
def _steps_per_epoch(key: Key) -> None:
    epochs = count(key.get("epochs", 1) or 1)
    key.become("train.steps", count(key.value) * epochs, f"× {epochs} epochs" if epochs > 1 else "")


@rule("train.precision", says="bf16 is bf16-true: weights and optimizer in bf16")
def _dtype(key: Key) -> None:
    name = str(key.value)
    if name in ("bf16", "fp32"):
        key.become("train.precision", "bf16-true" if name == "bf16" else "32-true")
    else:
        key.not_carried("train.precision has bf16-true and 32-true for torchtune's bf16 and fp32")


@rule("train.clip", says="null: no clipping", takes_null=True)
def _clip(key: Key) -> None:
    key.become("train.clip", number(key.value) if key.value else None)


@rule("train.schedule.name", "train.schedule.warmup", says="left out: constant")
def _schedule(key: Key) -> None:
    if str(key.value) == "constant":
        key.become("train.schedule.name", "constant")
        key.become("train.schedule.warmup", 0)
    else:
        put_schedule(key)


@rule("train.loss_impl")
def _loss(key: Key) -> None:
    name = _component(key)
    if "CrossEntropy" in name or name.startswith(("CEWith", "LinearCE")):
        key.no_meaning("cross-entropy; train.loss_impl: auto computes it in chunks where the logits are large")
    elif name in ("DPOLoss", "RSOLoss", "SimPOLoss", "IPOLoss"):
        known = {"DPOLoss": "dpo", "IPOLoss": "ipo", "SimPOLoss": "simpo"}
        key.become("train.objective", known[name]) if name in known else key.not_carried("not built")
    else:
        key.not_carried("not built; train.objective has causal_lm, dpo, ipo, orpo, simpo")


@rule("train.recompute")
def _offloading(key: Key) -> None:
    key.become("train.recompute", "offload") if truth(key.value) else key.no_meaning("off")


@rule("train.optimizer.betas")
def _betas(key: Key) -> None:
    key.become("train.optimizer.betas", [number(one) for one in key.value])


@rule("parallel.offload")
def _offload(key: Key) -> None:
    key.become("parallel.offload", "cpu") if truth(key.value) else key.no_meaning("off")


KEYS = {
    "output_dir": rule("run_dir", "name")(put_folder),
    **nothing(
        "told by the model's own files",
        "tokenizer._component_ tokenizer.path tokenizer.merges_file tokenizer.merges_path tokenizer.vocab_path "
        "tokenizer.special_tokens_path tokenizer.prompt_template checkpointer._component_ "
        "checkpointer.checkpoint_files "
        "checkpointer.model_type checkpointer.safe_serialization",
    ),
    "tokenizer.max_seq_len": to("data.max_length", count),
    "model._component_": _model,
    "model.lora_rank": to("adapter.rank", count),
    "model.lora_alpha": to("adapter.alpha", number),
    "model.lora_dropout": to("adapter.dropout", number),
    "model.use_dora": to("adapter.dora", truth),
    "model.quantize_base": rule("adapter.kind")(
        lambda key: key.become("adapter.kind", "qlora") if truth(key.value) else key.no_meaning("off")
    ),
    "model.lora_attn_modules": _targets,
    "model.apply_lora_to_mlp": _targets,
    "model.apply_lora_to_output": _targets,
    "checkpointer.checkpoint_dir": to("model.from", text),
    **nothing("the run's folder", "checkpointer.output_dir"),
    "checkpointer.adapter_checkpoint": to("adapter.from", text),
    **nothing(
        "shoal train --resume goes on with the newest checkpoint",
        "checkpointer.recipe_checkpoint resume_from_checkpoint",
    ),
    **nothing("shoal export --adapter writes the adapter alone", "save_adapter_weights_only"),
    "dataset._component_": _dataset,
    "dataset.source": _source,
    "dataset.data_files": to("data.path", lambda value: value if isinstance(value, list) else text(value)),
    "dataset.split": to("data.split", text),
    "dataset.name": to("data.subset", text),
    "dataset.packed": to("data.pack", truth),
    "dataset.train_on_input": to("data.train_on", lambda value: "all" if truth(value) else "answers"),
    "dataset.max_seq_len": to("data.max_length", count),
    "dataset.column_map": to("data.columns"),
    "dataset.column": to("data.columns", lambda value: {"text": text(value)}),
    "dataset.subset": to("data.subset", text),
    "dataset_val.split": _held_out,
    **nothing("as of the training data", "dataset_val._component_ dataset_val.source"),
    **nothing("train.micro_batch is of evaluation too", "batch_size_val"),
    "run_val_every_n_steps": to("eval.every", count),
    **nothing(
        "recognised by the keys of the records",
        "dataset.conversation_style dataset.conversation_column dataset.template",
    ),
    **nothing("always shuffled, in one global order", "shuffle"),
    "seed": to("seed", count),
    "batch_size": to("train.micro_batch", count, "per device"),
    **words("gradient_accumulation_steps", count),
    "epochs": to("train.epochs", count),
    "max_steps_per_epoch": _steps_per_epoch,
    "optimizer._component_": rule("train.optimizer.name")(put_optimizer),
    "optimizer.lr": to("train.lr", number),
    "optimizer.weight_decay": to("train.optimizer.weight_decay", number),
    "optimizer.betas": _betas,
    "optimizer.eps": to("train.optimizer.eps", number),
    "optimizer.momentum": to("train.optimizer.momentum", number),
    **nothing("AdamW has a fused kernel", "optimizer.fused optimizer.foreach"),
    "lr_scheduler._component_": _schedule,
    "lr_scheduler.num_warmup_steps": to("train.schedule.warmup", count),
    **cannot("the cosine has half a period", "lr_scheduler.num_cycles", unless=(0.5,)),
    "loss._component_": _loss,
    "loss.beta": to("train.preference.beta", number),
    **cannot("not built", "loss.label_smoothing"),
    **nothing("chunks are chosen by themselves", "loss.num_output_chunks"),
    "clip_grad_norm": _clip,
    "compile": to("train.compile", truth),
    "optimizer_in_bwd": cannot(
        "the optimizer runs after the backward pass; parallel.offload: optimizer saves more memory", "x"
    )["x"],
    "metric_logger._component_": rule("log.to")(put_loggers),
    **nothing(
        "metrics are in the run's folder",
        "metric_logger.log_dir metric_logger.output_dir metric_logger.project log_peak_memory_stats log_level",
    ),
    "log_every_n_steps": to("log.every", count),
    **nothing("devices are found by themselves", "device"),
    "dtype": _dtype,
    "enable_activation_checkpointing": rule("train.recompute")(put_recompute),
    "enable_activation_offloading": _offloading,
    **nothing("embedding and head are units of their own", "custom_sharded_layers memory_efficient_fsdp_wrap"),
    "fsdp_cpu_offload": _offload,
    "fsdp_reshard_after_forward": to("parallel.reshard", truth),
    "fsdp_sharding_strategy": to("parallel.sharding", lambda value: text(value).lower()),
    **words("tensor_parallel_dim context_parallel_dim", count),
    **nothing(
        "plans of tensor parallelism are built in",
        "tensor_parallel_plan tensor_parallel_plan._component_ "
        "context_parallel_rotate_method data_parallel_shard_dim enable_async_checkpointing",
    ),
    "data_parallel_replicate_dim": to("parallel.replicate", count),
    "nproc_per_node": to("hardware.devices", count),
    "nnodes": to("hardware.nodes", count),
    "torchtune_recipe": rule("parallel.strategy")(lambda key: _recipe(key)),
    "save_every_n_steps": to("checkpoint.every", count),
    **cannot("one dataset is translated: list the others in data.source", "dataset"),
    **nothing("the tokenizer's own end of sequence follows each text", "dataset.add_eos"),
    **cannot("not an option of a dataset here", "dataset.partition dataset.filter_fn"),
    **nothing(
        "models of images are not built",
        "model.decoder_trainable model.encoder_trainable model.fusion_trainable model.image_size tokenizer.image_size "
        "tokenizer.max_num_tiles dataset.image_tag dataset.image_dir",
    ),
    **cannot(
        "not built; train.objective has causal_lm, dpo, ipo, orpo, simpo",
        "ppo_epochs ppo_batch_size num_steps forward_batch_size max_generated_tokens min_response_length "
        "grpo_samples reward_functions loss.epsilon loss.kl_coeff policy_model ref_policy_checkpointer "
        "value_checkpointer reward_checkpointer",
        unless=({},),
    ),
    **cannot(
        "checkpoint.every counts steps, and how many an epoch has is known when the data is", "save_every_n_epochs"
    ),
    **cannot(
        "not built",
        "quantizer kd_ratio kd_loss teacher_model teacher_checkpointer ref_checkpointer reward_and_value_model",
        unless=({},),
    ),
    **nothing("not needed here", "collate_fn low_cpu_ram enable_kv_cache"),
}


def _recipe(key: Key) -> None:
    """The recipe of `tune run`."""
    name = str(key.value)
    if "single_device" in name:
        key.become("parallel.strategy", "single")
    elif name.startswith(("lora", "full", "qat", "knowledge")) and "dpo" not in name and "qat" not in name:
        key.become("parallel.strategy", "fsdp")
    elif "dpo" in name:
        key.become("train.objective", "dpo")
        key.become("parallel.strategy", "fsdp")
    else:
        key.not_carried("shoal has the recipes full, LoRA and DPO")


def _defaults(tree: Tree) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if not tree.get("lr_scheduler"):
        found["lr_scheduler._component_"] = "constant"
    if not tree.get("dataset_val"):
        found["dataset_val.split"] = "none"
    dataset = tree.get("dataset")
    if isinstance(dataset, dict) and "alpaca" in str(dataset.get("_component_")):  # other builders mask the prompt
        found["dataset.train_on_input"] = True
    return found


NOTHING_PROFILED = nothing("shoal bench train measures a run", "profiler")["profiler"]

TORCHTUNE = System(
    "a torchtune config",
    KEYS,
    marks=frozenset(
        {"model._component_", "tokenizer._component_", "dataset._component_", "checkpointer._component_"}
        | {"loss._component_", "metric_logger._component_", "optimizer._component_", "max_steps_per_epoch"}
    ),
    defaults={
        "gradient_accumulation_steps": 1,
        "epochs": 1,
        "clip_grad_norm": 0,
        "optimizer.betas": [0.9, 0.999],
        "optimizer.weight_decay": 0.01,
        "dataset.packed": False,
        "dtype": "bf16",
    },
    more_defaults=_defaults,
    other=lambda name: NOTHING_PROFILED if name.startswith("profiler") else None,
)
