"""DeepSpeed's JSON."""

from typing import Any

from shoal.convert.configs.deepspeed_rules import (
    AUTO,
    BUILT_IN,
    DEFAULT_STEPS,
    ZERO,
    betas_rule,
    checkpointing_rule,
    clip,
    half_rule,
    loss_scale_rule,
    monitor_rule,
    offload_rule,
    old_offload_rule,
    optimizer_rule,
    reduce_rule,
    scale_detail_rule,
    scale_power_rule,
    scale_window_rule,
    scheduler_rule,
    stage,
    warmup_from_rule,
    warmup_type_rule,
)
from shoal.convert.configs.draft import MIN_LR
from shoal.convert.configs.rules import System, Tree, at, cannot, nothing, to, under, words
from shoal.convert.configs.values import count, number

ZERO_KEYS = {
    "stage": stage,
    "offload_optimizer.device": offload_rule,
    "offload_param.device": offload_rule,
    "cpu_offload": old_offload_rule,
    "cpu_offload_params": old_offload_rule,
    **nothing("parallel.offload has the folder", "offload_optimizer.nvme_path"),
    **nothing("parameters are kept in host memory", "offload_param.nvme_path"),
    **nothing(
        "host memory is pinned where there is a GPU, and transfers overlap",
        "offload_optimizer.pin_memory offload_param.pin_memory offload_optimizer.buffer_count "
        "offload_param.buffer_count offload_optimizer.buffer_size offload_param.buffer_size "
        "offload_optimizer.fast_init offload_optimizer.pipeline_read offload_optimizer.pipeline_write "
        "offload_param.max_in_cpu cpu_offload_use_pin_memory",
    ),
    **cannot("all of the optimizer state is offloaded, or none", "offload_optimizer.ratio", unless=(1, 1.0)),
    **nothing(
        BUILT_IN,
        "overlap_comm reduce_scatter allgather_partitions contiguous_gradients allgather_bucket_size "
        "reduce_bucket_size round_robin_gradients stage3_use_all_reduce_for_fetch_params",
    ),
    **nothing(
        "parallel.prefetch counts the blocks that are all-gathered ahead",
        "stage3_prefetch_bucket_size prefetch_bucket_size stage3_max_live_parameters max_live_parameters "
        "stage3_max_reuse_distance max_reuse_distance",
    ),
    **nothing("each block is a unit, small parameters included", "stage3_param_persistence_threshold"),
    **nothing("each block is a unit, small parameters included", "param_persistence_threshold"),
    **nothing("parameters are updated in one pass over each rank's shards", "sub_group_size"),
    **nothing(
        "shoal export writes the whole model, with --dtype bf16 in 16 bits",
        "stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save "
        "gather_16bit_weights_on_model_save",
    ),
    **nothing("checkpoints are resharded when they are loaded", "load_from_fp32_weights elastic_checkpoint"),
    **nothing("built in", "ignore_unused_parameters legacy_stage1 memory_efficient_linear zero3_init_flag"),
    **cannot(
        "ZeRO++ and MiCS are not built; parallel.sharding: hybrid_shard shards within a node",
        "zero_hpz_partition_size mics_shard_size mics_hierarchical_params_gather",
        unless=(1, -1, False),
    ),
    **cannot(
        "quantized communication is not built",
        "zero_quantized_weights zero_quantized_gradients zero_quantized_nontrainable_weights",
    ),
    **cannot("built for mixtures of experts only in DeepSpeed", "stage3_module_granularity_threshold"),
}

OPTIMIZER_KEYS = {
    "lr": to("train.lr", number),
    "betas": betas_rule,
    "eps": to("train.optimizer.eps", number),
    "weight_decay": to("train.optimizer.weight_decay", number),
    "momentum": to("train.optimizer.momentum", number),
    **nothing("AdamW has a fused kernel", "torch_adam adam_w_mode fused bias_correction freeze_step cuda_aware"),
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
    **nothing("decided by train.precision", "fp16.auto_cast bf16.auto_cast"),
    **nothing(
        "gradients are reduced and accumulated in fp32", "data_types.grad_accum_dtype bf16.immediate_grad_update"
    ),
    "optimizer.type": optimizer_rule,
    **under("optimizer.params", OPTIMIZER_KEYS),
    "scheduler.type": scheduler_rule,
    **under("scheduler.params", SCHEDULER_KEYS),
    "tensor_parallel.autotp_size": to("parallel.tp", count),
    **{f"{name}.enabled": monitor_rule for name in ("tensorboard", "wandb", "csv_monitor")},
    **nothing(
        "loggers write to the folder of the run",
        "tensorboard.output_path tensorboard.job_name csv_monitor.output_path csv_monitor.job_name wandb.team "
        "wandb.group wandb.project",
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
    **nothing(
        "only for DeepSpeed's own code",
        "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_allow_comm_data_type_fp32 "
        "use_data_before_expert_parallelism distributed_backend disable_allgather dataloader_drop_last",
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
        "quantize_training sparse_attention hybrid_engine",
        unless=({}, False),
    ),
}

ADAM = {"optimizer.params.lr": 1e-3, "optimizer.params.betas": [0.9, 0.999], "optimizer.params.weight_decay": 0.0}


def defaults_rule(tree: Tree) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if at(tree, "optimizer.type") is not None:
        found |= ADAM
    if at(tree, "scheduler.type") is not None:
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
