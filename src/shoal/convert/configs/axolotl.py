"""Axolotl's YAML."""

from typing import Any

from shoal.convert.configs.axolotl_rules import (
    adapter_rule,
    all_linear_rule,
    betas_rule,
    chat_template_rule,
    datasets_rule,
    float32_rule,
    fp8_rule,
    half_rule,
    inputs_rule,
    logger_rule,
    offloading_rule,
    pack_rule,
    pretraining_rule,
    recompute_rule,
    rl_rule,
    special_tokens_rule,
    switch_rule,
    test_datasets_rule,
    tokens_rule,
    too_long_rule,
)
from shoal.convert.configs.deepspeed_rules import clip
from shoal.convert.configs.draft import MIN_LR
from shoal.convert.configs.fsdp import FSDP_KEYS, fsdp_words
from shoal.convert.configs.rules import Rule, System, Tree, cannot, nothing, rule, to, under, words
from shoal.convert.configs.trainer import ADAPTER
from shoal.convert.configs.trainer_rules import (
    attention,
    deepspeed_file,
    eval_strategy,
    find_batch_size_rule,
    metric_rule,
    save_strategy,
    step_count,
    steps,
    streaming,
    targets,
    warmup_ratio,
    warmup_steps,
)
from shoal.convert.configs.values import (
    count,
    number,
    on,
    put_epochs,
    put_folder,
    put_optimizer,
    put_schedule,
    text,
    texts,
    truth,
)

KEYS = {
    "base_model": to("model.from", text),
    **words("tokenizer_config", text),
    **nothing(
        "told by the model's own files",
        "model_type tokenizer_type base_model_config processor_type "
        "is_llama_derived_model is_mistral_derived_model is_qwen_derived_model is_falcon_derived_model "
        "tokenizer_use_fast tokenizer_legacy tokenizer_use_mistral_common low_cpu_mem_usage device_map "
        "type_of_model cls_model_config",
    ),
    **cannot("code of a model's repository is never run", "trust_remote_code"),
    "datasets": datasets_rule,
    "test_datasets": test_datasets_rule,
    "pretraining_dataset": pretraining_rule,
    "streaming": streaming,
    **nothing(
        "prepared data is cached by its content",
        "dataset_prepared_path dataset_processes dataset_num_proc "
        "dataset_keep_in_memory push_dataset_to_hub skip_prepare_dataset shuffle_merged_datasets dataset_shard_num "
        "dataset_shard_idx num_dataset_shards_to_save",
    ),
    "val_set_size": to("data.validation", number),
    **words("sequence_len", count),
    "sample_packing": pack_rule,
    **nothing(
        "sequences are packed or padded as data.pack says",
        "eval_sample_packing pad_to_sequence_len batch_flattening "
        "sample_packing_group_size sample_packing_bin_size sample_packing_sequentially "
        "group_by_length multipack_real_batches pad_to_multiple_of sample_packing_eff_est "
        "sample_packing_mp_start_method pretrain_multipack_buffer_size pretrain_multipack_attn "
        "pretraining_sample_concatenation streaming_multipack_buffer_size",
    ),
    "train_on_inputs": inputs_rule,
    "chat_template": chat_template_rule,
    "chat_template_jinja": to("data.chat_template", text),
    "special_tokens": special_tokens_rule,
    "tokens": tokens_rule,
    "excess_length_strategy": too_long_rule,
    **cannot("not an option of the data here", "min_sample_len eval_sequence_len dataset_exact_deduplication"),
    **cannot("write it into the data, or into a chat template", "default_system_message chat_template_kwargs"),
    "adapter": adapter_rule,
    **{name: one for name, one in ADAPTER.items() if name not in ("use_peft", "lora_modules_to_save")},
    "lora_target_modules": targets,
    "lora_target_linear": all_linear_rule,
    **words("lora_modules_to_save", texts),
    "lora_model_dir": to("adapter.from", text),
    **words("peft_use_dora peft_use_rslora", truth),
    **nothing(
        "shoal has kernels of its own",
        "lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_fan_in_fan_out lora_on_cpu "
        "qlora_sharded_model_loading flash_attn_cross_entropy flash_attn_rms_norm "
        "flash_attn_fuse_mlp flash_attn_fuse_qkv use_kernels fused_attn_kernel tiled_mlp lora_embedding_kernel "
        "tiled_mlp_num_shards tiled_mlp_use_original_mlp flash_optimum flex_attn_compile_kwargs "
        "gemma4_hybrid_attn_impl large_head_attention flash_attn_d512 sdpa_varlen",
    ),
    "rl": rl_rule,
    **words("rl_beta", number),
    "dpo_beta": to("train.preference.beta", number),
    **nothing("the reference is computed before training, or by switching the adapter off", "precompute_ref_log_probs"),
    **nothing("sequences are packed or padded as data.pack says", "dpo_padding_free dpo_use_liger_kernel"),
    **cannot(
        "not an option of these objectives here",
        "dpo_label_smoothing dpo_use_weighting dpo_loss_weights dpo_norm_loss rpo_alpha cpo_alpha",
    ),
    "simpo_gamma": to("train.preference.gamma", number),
    "orpo_alpha": to("train.preference.beta", number),
    **words("kto_desirable_weight kto_undesirable_weight", number),
    **nothing("train.objective says it", "dpo_loss_type"),
    "micro_batch_size": to("train.micro_batch", count),
    **words("gradient_accumulation_steps", count),
    **nothing("train.micro_batch is of evaluation too", "eval_batch_size"),
    "batch_size": to("train.global_batch", count),
    "num_epochs": rule("train.epochs", says="whole ones")(put_epochs),
    "max_steps": steps,
    "optimizer": rule("train.optimizer.name")(put_optimizer),
    "lr_scheduler": rule("train.schedule.name")(lambda key: put_schedule(key) and None),
    **words("learning_rate weight_decay adam_epsilon cosine_min_lr_ratio", number),
    "adam_eps": to("train.optimizer.eps", number),
    "eta_min": to(MIN_LR, number),
    **cannot(
        "experts are trained as the model's own code has them",
        "quantize_moe_experts use_scattermoe use_sonicmoe experts_implementation llama4_linearized_experts "
        "expert_parallel_size",
    ),
    **cannot("not built", "trl vllm ebft diffusion", unless=({},)),
    "adam_beta1": rule("train.optimizer.betas")(lambda key: betas_rule(key)),
    "adam_beta2": rule("train.optimizer.betas")(lambda key: betas_rule(key)),
    "warmup_steps": warmup_steps,
    "warmup_ratio": warmup_ratio,
    "max_grad_norm": clip,
    "bf16": half_rule,
    "fp16": half_rule,
    "bfloat16": half_rule,
    "float16": half_rule,
    "float32": float32_rule,
    "fp8": fp8_rule,
    **nothing("train.precision: fp8 has no options", "fp8_config fp8_enable_fsdp_float8_all_gather"),
    **nothing("matmuls in fp32 use TF32 as PyTorch does by default", "tf32"),
    "gradient_checkpointing": rule("train.recompute", says="full, or none; offload")(lambda key: recompute_rule(key)),
    **nothing("checkpointing is non-reentrant", "gradient_checkpointing_kwargs"),
    "flash_attention": switch_rule,
    "sdp_attention": switch_rule,
    "flex_attention": switch_rule,
    "eager_attention": switch_rule,
    "xformers_attention": switch_rule,
    "attn_implementation": attention,
    "torch_compile": to("train.compile", lambda value: "auto" if value == "auto" else truth(value)),
    **nothing("each block is compiled with inductor", "torch_compile_backend torch_compile_mode torch_compile_options"),
    "seed": to("seed", count),
    "output_dir": rule("run_dir", "name")(put_folder),
    "logging_steps": step_count("log.every"),
    "eval_steps": step_count("eval.every"),
    "save_steps": step_count("checkpoint.every"),
    "eval_strategy": eval_strategy,
    "save_strategy": save_strategy,
    **cannot(
        "steps are counted, and how many an epoch has is known when the data is: eval.every, checkpoint.every",
        "evals_per_epoch saves_per_epoch",
    ),
    **words("save_total_limit dataloader_num_workers early_stopping_patience", count),
    **dict.fromkeys(("wandb_project", "use_wandb", "use_tensorboard", "use_mlflow"), logger_rule),
    **nothing(
        "a name in a logger",
        "wandb_entity wandb_watch wandb_name wandb_run_id wandb_log_model wandb_mode mlflow_tracking_uri "
        "mlflow_experiment_name mlflow_run_name hf_mlflow_log_artifacts",
    ),
    **nothing(
        "shoal train --resume goes on with the newest checkpoint", "resume_from_checkpoint auto_resume_from_checkpoints"
    ),
    **nothing("a matter of the launcher", "local_rank world_size ddp ddp_timeout ddp_bucket_cap_mb device"),
    **nothing("every parameter is used, and columns that a format does not read are ignored", "remove_unused_columns"),
    **nothing(
        "every parameter is used, and columns that a format does not read are ignored", "ddp_find_unused_parameters"
    ),
    "activation_offloading": offloading_rule,
    **cannot("train.recompute: selective keeps what is dear to compute", "selective_checkpointing"),
    **cannot("parallel.offload: cpu keeps the parameters in host memory", "layer_offloading ple_cpu_offload"),
    "auto_find_batch_size": find_batch_size_rule,
    "metric_for_best_model": metric_rule,
    **cannot("a lower loss is better", "greater_is_better"),
    "evaluation_strategy": eval_strategy,
    **cannot("the end of an answer is told by the chat template", "eot_tokens", unless=([],)),
    **nothing(
        "not needed here",
        "strict debug save_safetensors eval_table_size eval_max_new_tokens early_stop "
        "load_best_model_at_end save_only_model dataloader_pin_memory dataloader_prefetch_factor hf_use_auth_token "
        "resize_token_embeddings_to_32x loss_watchdog_threshold loss_watchdog_patience include_tokens_per_second "
        "save_first_step gc_steps profiler_steps fsdp_version experimental_skip_move_to_device gc_collect_steps "
        "torch_empty_cache_steps accelerator_config dataloader_drop_last ddp_broadcast_buffers profiler_steps_start "
        "include_tkps gpu_memory_limit max_memory is_preprocess fix_untrained_tokens shrink_embeddings "
        "embeddings_skip_upcast mean_resizing_embeddings tokenizer_save_jinja_files processor_kwargs "
        "base_model_ignore_patterns peft_autocast_adapter_dtype max_prompt_len preprocess_iterable total_num_tokens "
        "total_supervised_tokens dpo_use_logits_to_keep dpo_generate_during_eval merge_lora merge_method hub_revision",
    ),
    "deepspeed": deepspeed_file,
    "fsdp": fsdp_words,
    **under("fsdp_config", FSDP_KEYS),
    "fsdp_final_state_dict_type": FSDP_KEYS["fsdp_state_dict_type"],
    **words("tensor_parallel_size context_parallel_size sequence_parallel_degree", count),
    "dp_replicate_size": to("parallel.replicate", count),
    **nothing(
        "follows from the other degrees and the number of devices", "dp_shard_size heads_k_stride ring_attn_func"
    ),
    **nothing(
        "train.loss_impl: auto never stores all logits where they are large",
        "plugins liger_rope liger_rms_norm "
        "liger_glu_activation liger_layer_norm liger_rms_norm_gated liger_fused_linear_cross_entropy "
        "liger_cross_entropy chunked_cross_entropy "
        "cut_cross_entropy chunked_cross_entropy_num_chunks",
    ),
    **cannot("nothing is uploaded: shoal export writes a folder", "hub_model_id hub_strategy push_to_hub"),
    **cannot("patterns of what to freeze are in model.freeze", "unfrozen_parameters", unless=([],)),
    **cannot(
        "not built",
        "neftune_noise_alpha relora loraplus_lr_ratio loraplus_lr_embedding qat quantization "
        "lr_quadratic_warmup cosine_constant_lr_ratio gptq loftq_config peft_layers_to_transform use_pose reward_model "
        "process_reward_model center_rewards_coefficient curriculum_sampling reinit_weights embedding_lr "
        "embedding_lr_scale lr_groups optim_args optim_target_modules lr_scheduler_kwargs lr_div_factor adam_epsilon2 "
        "adam_beta3 deepcompile sage_attention use_eaft use_onebitllms dynamic_checkpoint "
        "shuffle_before_merging_datasets do_bench_eval do_causal_lm_eval generate_samples lora_rank_pattern "
        "lora_alpha_pattern added_tokens_overrides trainer_cls rope_scaling "
        "noisy_embedding_alpha s2_attention max_packed_sequence_len",
    ),
    **nothing("adapter.quantize says it", "bnb_config_kwargs"),
    **nothing("norms are computed in fp32", "fp32_norms fp32_norm_classes"),
    **cannot("the model's own config is used", "overrides_of_model_config overrides_of_model_kwargs model_config"),
    **cannot(
        "weights that are stored in fp8 or fewer bits are not read: use a folder in bf16",
        "model_quantization_config model_quantization_config_kwargs",
    ),
    **cannot("a cached id is used as it was downloaded", "revision_of_model", unless=("main",)),
    **cannot("train.objective: classify counts the labels in the data", "num_labels"),
    **cannot("models of images are not built", "freeze_mm_modules image_size image_resize_algorithm role_boundaries"),
}

# Keys of which axolotl has many with one beginning.
FAMILIES: tuple[tuple[tuple[str, ...], Rule], ...] = (
    (
        ("use_swanlab", "swanlab_", "use_comet", "comet_", "use_trackio", "trackio_", "use_otel", "otel_"),
        cannot("log.to has tensorboard, wandb, mlflow and csv", "x")["x"],
    ),
    (("gradio_",), nothing("shoal chat talks to a checkpoint", "x")["x"]),
    (("generation_", "num_generation_"), nothing("eval.prompts are continued at every evaluation", "x")["x"]),
    (("use_ray", "ray_", "resources_per_worker"), nothing("shoal submit --to ray starts runs on Ray", "x")["x"]),
    (
        (
            *("qgalore_", "dion_", "lisa_", "jagged_restart_", "relora_", "pose_", "eaft_", "scaling_softmax"),
            *("nemo_gym_", "hatchery", "bench_", "eval_causal_lm_", "peft", "dsv4_", "nvfp4_"),
        ),
        cannot("not built", "x", unless=(False, "", 0, {}))["x"],
    ),
)


def family_rule(name: str) -> Rule | None:
    """The rule of a key by its beginning."""
    return next((one for starts, one in FAMILIES if name.startswith(starts)), None)


def defaults_rule(tree: Tree) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if tree.get("warmup_steps") is None and tree.get("warmup_ratio") is None:
        found["warmup_ratio"] = 0.03
    if not any(on(tree.get(name)) for name in ("bf16", "fp16", "bfloat16", "float16", "fp8")):
        found["bf16"] = "auto"
    if tree.get("datasets") and "completion" not in str(tree["datasets"]):  # texts are split there too
        found["excess_length_strategy"] = "drop"
    return found


AXOLOTL = System(
    "an axolotl config",
    KEYS,
    marks=frozenset(
        {"base_model", "sequence_len", "sample_packing", "micro_batch_size", "datasets", "val_set_size", "adapter"}
        | {"dataset_prepared_path", "evals_per_epoch", "saves_per_epoch", "lora_target_linear", "train_on_inputs"}
    ),
    defaults={
        "micro_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "num_epochs": 1,
        "lr_scheduler": "cosine",
        "weight_decay": 0.0,
        "adam_beta1": 0.9,
        "sequence_len": 512,
        "sample_packing": False,
        "val_set_size": 0.0,
        "train_on_inputs": False,
        "lora_dropout": 0.0,
        "seed": 42,
    },
    more_defaults=defaults_rule,
    other=family_rule,
)
