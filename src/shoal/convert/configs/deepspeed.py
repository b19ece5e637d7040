"""DeepSpeed's JSON."""

from typing import Any

from shoal.convert.configs.deepspeed_rules import (
    AUTO,
    BUILT_IN,
    DEFAULT_STEPS,
    ZERO,
    adam_lr_rule,
    autocast_rule,
    betas_rule,
    checkpointing_rule,
    clip,
    compile_off_rule,
    half_rule,
    loss_scale_rule,
    mean_rule,
    monitor_rule,
    muon_lr_rule,
    offload_rule,
    old_offload_rule,
    optimizer_rule,
    pure_bf16_rule,
    reduce_rule,
    scale_detail_rule,
    scale_power_rule,
    scale_window_rule,
    scheduler_rule,
    stage,
    tensor_parallel_rule,
    warmup_from_rule,
    warmup_type_rule,
)
from shoal.convert.configs.draft import MIN_LR
from shoal.convert.configs.rules import System, Tree, at, cannot, nothing, to, under, words
from shoal.convert.configs.values import count, number, truth

ZERO_KEYS = {
    "stage": stage,
    "offload_optimizer.device": offload_rule,
    "offload_param.device": offload_rule,
    "cpu_offload": old_offload_rule,
    "cpu_offload_param": old_offload_rule,
    "cpu_offload_params": old_offload_rule,
    **nothing("parallel.offload has the folder", "offload_optimizer.nvme_path"),
    **nothing("parameters are kept in host memory", "offload_param.nvme_path"),
    **nothing(
        "host memory is pinned where there is a GPU, and transfers overlap",
        "offload_optimizer.pin_memory offload_param.pin_memory offload_optimizer.buffer_count "
        "offload_param.buffer_count offload_optimizer.buffer_size offload_param.buffer_size "
        "offload_optimizer.fast_init offload_optimizer.pipeline_read offload_optimizer.pipeline_write "
        "offload_param.max_in_cpu cpu_offload_use_pin_memory offload_optimizer.super_offload "
        "offload_optimizer.cpuadam_cores_perc",
    ),
    **cannot("all of the optimizer state is offloaded, or none", "offload_optimizer.ratio", unless=(1, 1.0)),
    **nothing(
        BUILT_IN,
        "overlap_comm reduce_scatter allgather_partitions contiguous_gradients allgather_bucket_size "
        "reduce_bucket_size round_robin_gradients stage3_use_all_reduce_for_fetch_params "
        "use_all_reduce_for_fetch_params use_multi_rank_bucket_allreduce stage3_allgather_sequential "
        "allgather_sequential",
    ),
    **nothing(
        "parallel.prefetch counts the blocks that are all-gathered ahead",
        "stage3_prefetch_bucket_size prefetch_bucket_size stage3_max_live_parameters max_live_parameters "
        "stage3_max_reuse_distance max_reuse_distance",
    ),
    **nothing(
        "each block is a unit, small parameters included",
        "stage3_param_persistence_threshold param_persistence_threshold stage3_model_persistence_threshold "
        "model_persistence_threshold leaf_module",
    ),
    **nothing("parameters are updated in one pass over each rank's shards", "sub_group_size"),
    **nothing(
        "shoal export writes the whole model, with --dtype bf16 in 16 bits",
        "stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save "
        "gather_16bit_weights_on_model_save",
    ),
    **nothing("checkpoints are resharded when they are loaded", "load_from_fp32_weights elastic_checkpoint"),
    **nothing(
        "built in",
        "ignore_unused_parameters legacy_stage1 memory_efficient_linear zero3_init_flag compute_grad_norm "
        "parameter_alignment",
    ),
    **nothing(
        "only for DeepSpeed's own code",
        "override_module_apply log_trace_cache_warnings enable_sanity_checks pipeline_loading_checkpoint "
        "save_muon_momentum_buffer_in_memory",
    ),
    **cannot("ZenFlow is not built; parallel.offload: optimizer keeps the state in host memory", "zenflow"),
    **cannot(
        "ZeRO++ and MiCS are not built; parallel.sharding: hybrid_shard shards within a node",
        "zero_hpz_partition_size mics_shard_size mics_hierarchical_params_gather",
        unless=(1, -1, False),
    ),
    **cannot(
        "quantized communication is not built",
        "zero_quantized_weights zero_quantized_gradients zero_quantized_nontrainable_weights zeropp_loco_param",
    ),
    **cannot(
        "built for mixtures of experts only in DeepSpeed",
        "stage3_module_granularity_threshold module_granularity_threshold",
    ),
}

OPTIMIZER_KEYS = {
    "lr": to("train.lr", number),
    "betas": betas_rule,
    "eps": to("train.optimizer.eps", number),
    "weight_decay": to("train.optimizer.weight_decay", number),
    "momentum": to("train.optimizer.momentum", number),
    **nothing("AdamW has a fused kernel", "torch_adam adam_w_mode fused bias_correction foreach"),
    **nothing("optimizer state is in fp32", "fp32_optimizer_states"),
    **nothing(
        "of optimizers that compress their communication",
        "freeze_step cuda_aware comm_backend_name var_freeze_step var_update_scaler local_step_scaler "
        "local_step_clipper coeff_beta factor_max factor_min factor_threshold",
    ),
    "muon_lr": muon_lr_rule,
    "adam_lr": adam_lr_rule,
    **nothing("Newton and Schulz's iteration, as Muon's", "ns_method"),
    **cannot("train.clip is the one limit: the key gradient_clipping", "max_grad_norm"),
}

SCHEDULER_KEYS = {
    "warmup_min_lr": warmup_from_rule,
    "warmup_min_ratio": warmup_from_rule,
    "warmup_max_lr": to("train.lr", number, "the peak of the schedule"),
    "warmup_num_steps": to("train.schedule.warmup", count),
    "total_num_steps": to("train.schedule.total_steps", count),
    "warmup_type": warmup_type_rule,
    "cos_min_ratio": to("train.schedule.min_ratio", number),
    "min_lr": to(MIN_LR, number),
    **nothing("the first step", "last_batch_iteration"),
    **cannot(
        "OneCycle and LRRangeTest are not built; train.schedule.name has cosine, linear, constant and wsd",
        "cycle_min_lr cycle_max_lr decay_lr_rate cycle_first_step_size cycle_second_step_size cycle_first_stair_count "
        "cycle_second_stair_count decay_step_size cycle_momentum cycle_min_mom cycle_max_mom decay_mom_rate "
        "lr_range_test_min_lr lr_range_test_step_rate lr_range_test_step_size lr_range_test_staircase",
        unless=(),
    ),
}

KEYS = {
    **words("gradient_accumulation_steps train_micro_batch_size_per_gpu", count),
    "train_batch_size": to("train.global_batch", count),
    "gradient_clipping": clip,
    **words("steps_per_print", count),
    "communication_data_type": reduce_rule,
    **under(ZERO, ZERO_KEYS),
    **{f"{block}.enabled": half_rule for block in ("fp16", "bf16", "bfloat16")},
    "fp16.loss_scale": loss_scale_rule,
    "fp16.initial_scale_power": scale_power_rule,
    "fp16.loss_scale_window": scale_window_rule,
    **dict.fromkeys(
        ("fp16.hysteresis", "fp16.min_loss_scale", "fp16.consecutive_hysteresis", "fp16.raise_error_at_min_scale"),
        scale_detail_rule,
    ),
    "bf16.bf16_master_weights_and_grads": pure_bf16_rule,
    **nothing("bf16.bf16_master_weights_and_grads decides", "bf16.bf16_optimizer_states"),
    **cannot(
        "fp16 without master weights is not built: train.precision: 16-mixed", "fp16.fp16_master_weights_and_grads"
    ),
    "torch_autocast.enabled": autocast_rule,
    **nothing("torch_autocast.enabled and the precisions of PyTorch's autocast", "torch_autocast.dtype"),
    **cannot(
        "which operations run in low precision is PyTorch's choice", "torch_autocast.lower_precision_safe_modules"
    ),
    **nothing("decided by train.precision", "fp16.auto_cast bf16.auto_cast data_types.param_dtype"),
    **nothing("buffers are as the model has them", "data_types.buffer_dtype data_types.keep_in_fp32_modules"),
    **nothing("a step with a non-finite gradient is skipped", "bf16.check_grad_overflow bf16.check_overflow"),
    **nothing(
        "gradients are reduced and accumulated in fp32", "data_types.grad_accum_dtype bf16.immediate_grad_update"
    ),
    "optimizer.type": optimizer_rule,
    **under("optimizer.params", OPTIMIZER_KEYS),
    "scheduler.type": scheduler_rule,
    **under("scheduler.params", SCHEDULER_KEYS),
    **nothing("AdamW has a fused kernel", "optimizer.legacy_fusion"),
    "tensor_parallel.autotp_size": tensor_parallel_rule,
    "tensor_parallel.tp.tp_size": tensor_parallel_rule,
    **nothing(
        "the plan of tensor parallelism is that of the model's family",
        "tensor_parallel.dtype tensor_parallel.tp_overlap_comm tensor_parallel.tp.tp_grain_size "
        "tensor_parallel.partition_config tensor_parallel.preset_model tensor_parallel.injection_policy_tuple "
        "tensor_parallel.keep_module_on_host tensor_parallel.replace_with_kernel_inject "
        "tensor_parallel.kernel_inject tensor_parallel.vocab_parallel_lm_head "
        "tensor_parallel.vocab_parallel_ce_backend",
    ),
    "compile.deepcompile": to("train.compile", truth, "each block is compiled with inductor"),
    "compile.disable": compile_off_rule,
    "compile.enabled": to("train.compile", truth, "each block is compiled with inductor"),
    **nothing(
        "options of DeepCompile; train.compile has none",
        "compile.backend compile.kwargs compile.autoep_non_moe compile.free_activation "
        "compile.free_activation_threshold compile.offload_activation compile.offload_activation_pin_memory "
        "compile.offload_opt_states compile.offload_parameters compile.double_buffer compile.symmetric_memory "
        "compile.debug_log compile.sync_before_reduce compile.sync_after_reduce compile.sync_before_allgather "
        "compile.sync_after_allgather compile.keep_int_input_tensors compile.keep_all_input_tensors compile.passes",
    ),
    **{f"{name}.enabled": monitor_rule for name in ("tensorboard", "wandb", "csv_monitor")},
    **nothing(
        "loggers write to the folder of the run",
        "tensorboard.output_path tensorboard.job_name csv_monitor.output_path csv_monitor.job_name wandb.team "
        "wandb.group wandb.project",
    ),
    **cannot("log.to has tensorboard, wandb, mlflow and csv", "comet.enabled"),
    **nothing(
        "log.to has tensorboard, wandb, mlflow and csv",
        "comet.samples_log_interval comet.project comet.workspace comet.api_key comet.experiment_name "
        "comet.experiment_key comet.online comet.mode",
    ),
    "seed": to("seed", count),
    **under(
        "activation_checkpointing",
        dict.fromkeys(
            (
                "partition_activations",
                "cpu_checkpointing",
                "contiguous_memory_optimization",
                "number_checkpoints",
                "synchronize_checkpoint_boundary",
                "profile",
            ),
            checkpointing_rule,
        ),
    ),
    **nothing(
        "gradients are averaged over the loss tokens of all devices", "prescale_gradients gradient_predivide_factor"
    ),
    "gradient_allreduce_op": mean_rule,
    **nothing("gradients are accumulated by the loop", "managed_gradient_accumulation"),
    **nothing("context parallelism communicates in the precision of training", "seq_parallel_communication_data_type"),
    **nothing(
        "only for DeepSpeed's own code",
        "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_allow_comm_data_type_fp32 "
        "use_data_before_expert_parallelism distributed_backend disable_allgather dataloader_drop_last "
        "disable_python_gc log_level",
    ),
    **nothing("metrics.jsonl has the time of each step", "wall_clock_breakdown memory_breakdown dump_state timers"),
    **nothing("shoal bench train measures a run", "flops_profiler comms_logger autotuning"),
    **nothing("nothing to tune", "aio"),
    **nothing("checkpoints are sharded, and resharded when they are loaded", "checkpoint load_universal_checkpoint"),
    **cannot("gradients are dense", "sparse_gradients"),
    **cannot("Apex is not used; train.precision: 16-mixed or bf16-mixed", "amp.enabled"),
    **cannot(
        "not built",
        "pipeline compression_training elasticity curriculum_learning data_efficiency "
        "progressive_layer_drop eigenvalue "
        "quantize_training sparse_attention hybrid_engine expert_parallel weight_quantization graph_harvesting nebula "
        "datastates",
        unless=({}, False),
    ),
}

ADAM = {"optimizer.params.lr": 1e-3, "optimizer.params.betas": [0.9, 0.999], "optimizer.params.weight_decay": 0.0}


def defaults_rule(tree: Tree) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if at(tree, "optimizer.type") is not None:
        found |= ADAM
    if "warmup" in str(at(tree, "scheduler.type")).lower():
        found["scheduler.params.warmup_num_steps"] = DEFAULT_STEPS
    return found


DEEPSPEED = System(
    "a DeepSpeed config",
    KEYS,
    marks=frozenset(
        {
            ZERO,
            "train_micro_batch_size_per_gpu",
            "train_batch_size",
            "gradient_clipping",
            "fp16.enabled",
            "bf16.enabled",
        }
        | {"optimizer.params", "scheduler.params", "steps_per_print", "wall_clock_breakdown"}
    ),
    defaults={"gradient_clipping": 0},
    more_defaults=defaults_rule,
    auto=AUTO,
)
