"""The arguments of transformers' Trainer, with those of its scripts and of TRL's, from a file or a command."""

from typing import Any

from shoal.convert.configs.deepspeed_rules import clip
from shoal.convert.configs.draft import MIN_LR
from shoal.convert.configs.fsdp import FSDP_KEYS, fsdp_words
from shoal.convert.configs.rules import (
    System,
    Tree,
    cannot,
    nothing,
    rule,
    to,
    under,
    words,
)
from shoal.convert.configs.scripts import OF_SCRIPTS
from shoal.convert.configs.trainer_rules import (
    LAUNCHED,
    answers_only,
    attention,
    beta_rule,
    data_seed_rule,
    dataset,
    deepspeed_file,
    dtype_rule,
    eval_strategy,
    find_batch_size_rule,
    four_bit,
    half,
    loss_type_rule,
    metric_rule,
    no_dropout_rule,
    offload_activations_rule,
    percentage_rule,
    rank_of_a_script,
    run_name_rule,
    save_strategy,
    schedule,
    step_count,
    steps,
    streaming,
    targets,
    task,
    test_split_rule,
    text_field_rule,
    use_peft_rule,
    warmup_ratio,
    warmup_steps,
)
from shoal.convert.configs.trl import OF_TRL
from shoal.convert.configs.values import (
    count,
    number,
    on,
    put_epochs,
    put_folder,
    put_loggers,
    put_optimizer,
    put_recompute,
    text,
    texts,
    truth,
)

DATA_AND_MODEL = {
    **words("model_name_or_path model_id tokenizer_name", text),
    "torch_dtype": dtype_rule,
    "dtype": dtype_rule,
    "attn_implementation": attention,
    **nothing("auto uses PyTorch's flash attention", "use_flash_attention_2 use_flash_attn"),
    **cannot("code of a model's repository is never run", "trust_remote_code"),
    **cannot("a cached id is used as it was downloaded", "model_revision", unless=("main",)),
    "dataset_name": dataset,
    "train_file": to("data.path", text),
    "validation_file": to("data.validation", text),
    "validation_split_percentage": percentage_rule,
    "dataset_config": to("data.subset", text),
    "dataset_config_name": to("data.subset", text),
    "dataset_train_split": to("data.split", text),
    "dataset_test_split": test_split_rule,
    "dataset_text_field": text_field_rule,
    "dataset_streaming": streaming,
    "streaming": streaming,
    **words("max_seq_length block_size model_max_length cutoff_len", count),
    "max_length": to("data.max_length", count),
    "packing": to("data.pack", truth),
    "completion_only_loss": answers_only,
    "assistant_only_loss": answers_only,
    **nothing("a cache by content is always used", "overwrite_cache preprocessing_num_workers dataset_num_proc"),
    **nothing("packed sequences do not attend to each other", "padding_free eval_packing"),
    **nothing("sequences have one length or are padded to a multiple", "pad_to_max_length pad_to_multiple_of"),
    **cannot("data.max_length is of prompt and answer together", "max_prompt_length max_completion_length"),
    **cannot("the file or the dataset is used as a whole; cut it before", "max_train_samples max_eval_samples"),
}

ADAPTER = {
    "use_peft": use_peft_rule,
    "load_in_4bit": four_bit,
    **cannot("frozen weights are in 4 bits (adapter.kind: qlora) or in 16", "load_in_8bit"),
    **nothing("adapter.quantize says it", "bnb_4bit_quant_type use_bnb_nested_quant bnb_4bit_use_double_quant"),
    **nothing("weights are quantized shard by shard", "bnb_4bit_quant_storage bnb_4bit_compute_dtype"),
    **words("lora_r lora_rank", count),
    **words("lora_alpha lora_dropout", number),
    "lora_target_modules": targets,
    **words("lora_modules_to_save", texts),
    **words("use_rslora use_dora", truth),
    **nothing("a causal language model", "lora_task_type"),
    **cannot("only linear layers get an adapter", "lora_target_parameters"),
}

PREFERENCE = {
    "trl_task": task,
    "loss_type": loss_type_rule,
    "beta": to("train.preference.beta", number),
    "simpo_gamma": to("train.preference.gamma", number),
    "desirable_weight": to("train.preference.desirable_weight", number),
    "undesirable_weight": to("train.preference.undesirable_weight", number),
    "disable_dropout": no_dropout_rule,
    **nothing("the reference is computed before training, or by switching the adapter off", "precompute_ref_log_probs"),
    **nothing("train.micro_batch is of the reference too", "precompute_ref_batch_size"),
    **cannot("not an option of these objectives here", "label_smoothing loss_weights ld_alpha use_weighting cpo_alpha"),
    **cannot("the reference is the model that training starts from", "ref_model_name_or_path sync_ref_model"),
    **nothing(
        "not used: sync_ref_model", "ref_model_mixup_alpha ref_model_sync_steps discopop_tau f_alpha_divergence_coef"
    ),
    **nothing("the reverse KL", "f_divergence_type"),
}

ARGUMENTS = {
    "output_dir": rule("run_dir", "name", says="runs are in RUN_DIR/NAME")(put_folder),
    "run_name": run_name_rule,
    **words("per_device_train_batch_size gradient_accumulation_steps dataloader_num_workers save_total_limit", count),
    **nothing("train.micro_batch is of evaluation too", "per_device_eval_batch_size"),
    "num_train_epochs": rule("train.epochs", says="whole ones")(put_epochs),
    "max_steps": steps,
    **words("learning_rate weight_decay adam_epsilon", number),
    "adam_beta1": beta_rule,
    "adam_beta2": beta_rule,
    "optim": rule("train.optimizer.name")(put_optimizer),
    "lr_scheduler_type": schedule,
    "lr_scheduler_kwargs.min_lr": to(MIN_LR, number),
    "lr_scheduler_kwargs.min_lr_rate": to("train.schedule.min_ratio", number),
    **cannot("train.schedule.decay is a share of the run", "lr_scheduler_kwargs.num_decay_steps"),
    "warmup_steps": warmup_steps,
    "warmup_ratio": warmup_ratio,
    "max_grad_norm": clip,
    "bf16": half,
    "fp16": half,
    # transformers 5 calls it activation checkpointing, and removes the other name in 6.
    "activation_checkpointing": rule("train.recompute", says="full, or none")(put_recompute),
    "gradient_checkpointing": rule("train.recompute", says="full, or none")(put_recompute),
    **nothing("checkpointing is non-reentrant", "gradient_checkpointing_kwargs activation_checkpointing_kwargs"),
    **nothing("a run that gets TERM always finishes its step and saves", "enable_jit_checkpoint"),
    "activation_offloading": offload_activations_rule,
    "torch_compile": to("train.compile", truth),
    **nothing("each block is compiled with inductor", "torch_compile_backend torch_compile_mode torch_compile_options"),
    **nothing(
        "train.loss_impl: auto never stores all logits where they are large", "use_liger_kernel liger_kernel_config"
    ),
    "seed": to("seed", count),
    "data_seed": data_seed_rule,
    "full_determinism": to("train.deterministic", truth),
    "auto_find_batch_size": find_batch_size_rule,
    "eval_strategy": eval_strategy,
    "evaluation_strategy": eval_strategy,
    "eval_steps": step_count("eval.every"),
    "save_strategy": save_strategy,
    "save_steps": step_count("checkpoint.every"),
    "metric_for_best_model": metric_rule,
    **nothing(
        "the best checkpoints are kept (checkpoint.keep_best); shoal export --step exports one",
        "load_best_model_at_end",
    ),
    **cannot("a lower loss is better", "greater_is_better"),
    **nothing("steps are counted", "logging_strategy logging_first_step"),
    "logging_steps": step_count("log.every"),
    "report_to": rule("log.to")(put_loggers),
    "ddp_timeout": to("train.hang_timeout", number),
    "fsdp": fsdp_words,
    **under("fsdp_config", FSDP_KEYS),
    "fsdp_min_num_params": FSDP_KEYS["fsdp_min_num_params"],
    "fsdp_transformer_layer_cls_to_wrap": FSDP_KEYS["fsdp_transformer_layer_cls_to_wrap"],
    "deepspeed": deepspeed_file,
    **nothing("shoal train --resume goes on with the newest checkpoint", "resume_from_checkpoint"),
    **nothing("shoal train --overwrite replaces a run", "overwrite_output_dir"),
    **nothing(
        "a checkpoint is whole",
        "save_safetensors save_only_model save_on_each_node restore_callback_states_from_checkpoint",
    ),
    **nothing(
        "batches are prepared by threads, in one global order",
        "dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor dataloader_drop_last "
        "dataloader_in_order dataloader_multiprocessing_context split_batches dispatch_batches accelerator_config "
        "train_sampling_strategy length_column_name ignore_data_skip shuffle_dataset",
    ),
    **nothing("built in", "average_tokens_across_devices remove_unused_columns label_names prediction_loss_only"),
    **nothing(
        "every parameter is used, and buffers are equal",
        "ddp_find_unused_parameters ddp_broadcast_buffers ddp_static_graph",
    ),
    **nothing("buckets are of the size of a block", "ddp_bucket_cap_mb"),
    **nothing(LAUNCHED, "local_rank ddp_backend use_cpu no_cuda use_mps_device log_on_each_node node_rank"),
    **nothing(
        "what a script does",
        "do_train do_eval do_predict eval_on_start eval_delay eval_accumulation_steps "
        "eval_do_concat_batches eval_use_gather_object batch_eval_metrics include_for_metrics "
        "include_inputs_for_metrics",
    ),
    **nothing(
        "progress and logs are in RUN/logs",
        "log_level log_level_replica disable_tqdm logging_dir debug skip_memory_metrics"
        " logging_nan_inf_filter include_num_input_tokens_seen include_tokens_per_second verbose",
    ),
    **nothing("matmuls in fp32 use TF32 as PyTorch does by default", "tf32"),
    **nothing("evaluated in the precision of training", "bf16_full_eval fp16_full_eval"),
    **nothing("CUDA memory is kept", "torch_empty_cache_steps use_cache"),
    **nothing("train.precision has one implementation", "half_precision_backend fp16_opt_level fp16_backend"),
    **nothing("a name in a logger", "project trackio_space_id trackio_bucket_id trackio_static_space_id"),
    **cannot(
        "nothing is uploaded: shoal export writes a folder",
        "push_to_hub hub_model_id hub_strategy hub_token hub_private_repo hub_always_push hub_revision "
        "hub_model_revision",
    ),
    **cannot(
        "not built", "neftune_noise_alpha label_smoothing_factor optim_args optim_target_modules loraplus_lr_ratio"
    ),
    **cannot("the order of examples is random", "group_by_length"),
    **cannot("use tp, cp and replicate of parallel", "parallelism_config", unless=({},)),
}

KEYS = {**DATA_AND_MODEL, **OF_SCRIPTS, **OF_TRL, **ADAPTER, **PREFERENCE, **ARGUMENTS}

DEFAULTS = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3,
    "learning_rate": 5e-5,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "eval_strategy": "no",
    "save_steps": 500,
    "seed": 42,
}


def more_rule(tree: Tree) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if "evaluation_strategy" in tree or "eval_strategy" in tree or "validation_file" in tree:
        found["eval_strategy"] = None
    if not any(on(tree.get(name)) for name in ("bf16", "fp16")):
        found["fp16"] = False
    if str(tree.get("eval_strategy", tree.get("evaluation_strategy"))) == "steps":
        found["eval_steps"] = tree.get("logging_steps", 500)
    if on(tree.get("use_peft", False)):
        found |= {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "lora_target_modules": ["q_proj", "v_proj"]}
    return found


TRAINER = System(
    "arguments of the Hugging Face Trainer",
    KEYS,
    marks=frozenset(
        {
            "per_device_train_batch_size",
            "num_train_epochs",
            "lr_scheduler_type",
            "save_total_limit",
            "fsdp",
            "fsdp_config",
        }
        | {
            "output_dir",
            "gradient_checkpointing",
            "logging_steps",
            "save_strategy",
            "optim",
            "max_grad_norm",
            "report_to",
        }
        | {"model_name_or_path", "dataset_name", "learning_rate", "warmup_ratio", "trl_task", "use_peft"}
    ),
    defaults=DEFAULTS,
    more_defaults=more_rule,
)

TRL_DEFAULTS = {
    **DEFAULTS,
    "learning_rate": 2e-5,
    "max_length": 1024,
    "packing": False,
    "packing_strategy": "bfd",
    "gradient_checkpointing": True,
    "bf16": True,
    "logging_steps": 10,
    "assistant_only_loss": False,
}


def of_trl_rule(tree: Tree) -> dict[str, Any]:
    found = more_rule(tree) | ({"learning_rate": 1e-6} if tree.get("trl_task") == "dpo" else {})
    if tree.get("trl_task") != "sft":
        found |= {"assistant_only_loss": None, "packing": None, "packing_strategy": None}
    if on(tree.get("fp16")):
        found["bf16"] = None
    return found | {"fp16": None}


TRL = System("a command of TRL", KEYS, marks=frozenset({"trl_task"}), defaults=TRL_DEFAULTS, more_defaults=of_trl_rule)

# The same flags in a script that we do not know: nothing is said of its defaults.
SCRIPT = System(
    "flags of a training script",
    {
        **KEYS,
        **words("batch_size_per_device", count),
        "deepspeed_config": deepspeed_file,
        "epochs": to("train.epochs", count),
        "lr": to("train.lr", number),
        "lora_r": rank_of_a_script,
        "lora_rank": rank_of_a_script,
    },
    marks=frozenset(),
)
