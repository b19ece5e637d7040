"""What other tools call our keys: Hugging Face Trainer, Accelerate, axolotl, LitGPT, Lightning, torchtune, torchtitan,
DeepSpeed, Hydra. Nothing in the spelling would lead from one to the other."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class OurKey:
    """The key that does what another tool's key does, and how: `key` and `says` make a sentence."""

    key: str
    says: str

    def __str__(self) -> str:
        return f"{self.key} {self.says}"


# Our key, the rest of the sentence about it, and the names of others. A name with a dot counts in that block only.
WORDS: tuple[tuple[str, str, str], ...] = (
    (
        "train.grad_accum",
        "sets the gradient accumulation steps; or train.global_batch sets the sequences per optimizer step, over all "
        "devices",
        "gradient_accumulation_steps gradient_accumulation_iters accumulate_grad_batches grad_accum_steps",
    ),
    (
        "train.global_batch",
        "sets the sequences per optimizer step over all devices, and train.micro_batch those per device and forward "
        "pass",
        "batch_size train_batch_size global_batch_size global_train_batch_size effective_batch_size total_batch_size "
        "num_tokens_per_train_step",
    ),
    (
        "train.micro_batch",
        "sets the sequences per device and forward pass",
        "per_device_train_batch_size per_device_batch_size micro_batch_size train_micro_batch_size_per_gpu "
        "local_batch_size device_batch_size device_train_microbatch_size batch_size_per_device "
        "num_tokens_per_microbatch_per_dp_rank",
    ),
    (
        "train.micro_batch",
        "sets the sequences per device and forward pass, of evaluation too",
        "per_device_eval_batch_size eval_batch_size val_batch_size",
    ),
    ("train.epochs", "sets the number of epochs", "num_train_epochs num_epochs max_epochs n_epochs total_epochs"),
    (
        "train.steps",
        "sets the number of optimizer steps",
        "max_steps train_steps training_steps num_train_steps num_training_steps max_train_steps total_steps max_iters "
        "train_iters",
    ),
    ("train.tokens", "sets the length of the run in loss tokens", "max_tokens num_tokens total_tokens train_tokens"),
    ("train.lr", "sets the peak learning rate", "learning_rate max_lr peak_lr base_lr max_learning_rate"),
    (
        "train.schedule.warmup",
        "takes the warmup steps, or their share of all steps as a number with a decimal point",
        "warmup_steps lr_warmup_steps num_warmup_steps warmup_iters lr_warmup_iters warmup_ratio lr_warmup_fraction "
        "warmup_fraction",
    ),
    (
        "train.schedule.name",
        "takes cosine, linear, constant or wsd",
        "lr_scheduler_type lr_scheduler scheduler lr_schedule scheduler_type lr_decay_style decay_type",
    ),
    (
        "train.schedule.min_ratio",
        "takes the last learning rate as a share of train.lr",
        "min_lr min_lr_factor min_lr_ratio min_lr_rate cosine_min_lr_ratio lr_min eta_min min_learning_rate",
    ),
    ("train.schedule.decay", "takes the share of all steps in which wsd decays", "decay_ratio num_decay_steps"),
    ("train.optimizer.weight_decay", "sets the weight decay", "weight_decay wd"),
    (
        "train.optimizer.betas",
        "takes both in a list, as in [0.9, 0.95]",
        "adam_beta1 adam_beta2 beta1 beta2 adam_betas optim_beta1 optim_beta2",
    ),
    ("train.optimizer.eps", "sets the optimizer's epsilon", "adam_epsilon adam_eps epsilon optim_eps"),
    (
        "train.optimizer.rounding",
        "takes nearest or stochastic, for precision bf16-true",
        "stochastic_rounding bf16_stochastic_round use_stochastic_rounding stochastic_round",
    ),
    ("train.optimizer", "takes adamw, adamw8bit, lion, sgd or muon", "optim optimizer optimizer_type optimizer_name"),
    (
        "train.clip",
        "sets the largest gradient norm",
        "max_grad_norm gradient_clip_val gradient_clipping gradient_clip_norm grad_clip clip_grad clip_grad_norm "
        "grad_norm_clip max_norm",
    ),
    (
        "train.precision",
        "takes bf16-mixed, bf16-true, 16-mixed, 32-true, fp8 or auto",
        "bf16 fp16 fp8 mixed_precision mixed_precision_param amp use_amp autocast dtype torch_dtype param_dtype "
        "enable_fp8 float8",
    ),
    ("train.precision", "16-mixed scales the loss by itself", "loss_scale initial_scale_power loss_scale_window"),
    (
        "train.reduce_dtype",
        "sets the dtype in which gradients are reduced",
        "mixed_precision_reduce communication_data_type grad_reduce_dtype",
    ),
    (
        "train.recompute",
        "sets activation checkpointing: none, cheap, selective, full, offload or auto",
        "gradient_checkpointing activation_checkpointing activation_checkpoint enable_activation_checkpointing "
        "fsdp_activation_checkpointing recompute_granularity selective_ac_option ac_mode ac_freq",
    ),
    (
        "train.compile",
        "takes true, false or auto, and compiles block by block",
        "torch_compile compile_model use_compile model_compile",
    ),
    (
        "train.objective",
        "chooses between causal_lm, masked_lm, classify, dpo, ipo, orpo, simpo and apo_zero_unpaired",
        "rl rlhf rl_type dpo_loss_type",
    ),
    (
        "train.mask_ratio",
        "is the share of tokens that masked_lm predicts",
        "mlm_probability mask_prob masking_ratio mlm_ratio",
    ),
    (
        "data.label",
        "names the field with the class of an example",
        "label_column label_column_name label_field cell_type_key label_key",
    ),
    (
        "train.preference.beta",
        "sets the scale of the rewards in preference tuning",
        "beta rl_beta dpo_beta orpo_alpha kto_beta",
    ),
    (
        "train.preference.desirable_weight",
        "weighs the losses of desirable answers",
        "desirable_weight kto_desirable_weight",
    ),
    (
        "train.preference.undesirable_weight",
        "weighs the losses of undesirable answers",
        "undesirable_weight kto_undesirable_weight",
    ),
    ("train.preference.gamma", "sets the margin of simpo", "gamma simpo_gamma"),
    (
        "train.loss_impl",
        "takes chunked or fused, which never store all logits, plain or auto",
        "use_liger_kernel use_liger liger_fused_linear_cross_entropy lm_head_chunk_size loss loss_fn loss_type",
    ),
    (
        "train.early_stop.patience",
        "takes the evaluations without a better loss before training stops",
        "early_stopping_patience early_stopping",
    ),
    (
        "train.hang_timeout",
        "takes the seconds without progress after which a run counts as hung",
        "ddp_timeout train_timeout_seconds nccl_timeout",
    ),
    (
        "checkpoint.every",
        "takes the optimizer steps between checkpoints",
        "save_steps save_every save_interval save_freq save_strategy checkpoint_interval checkpoint_every "
        "every_n_train_steps checkpoint.interval",
    ),
    ("checkpoint.keep", "sets how many of the newest are kept", "save_total_limit keep_latest_k max_to_keep"),
    ("checkpoint.keep_best", "sets how many of the best are kept", "save_top_k"),
    ("checkpoint.metric", "takes eval_loss or loss", "metric_for_best_model monitor"),
    ("checkpoint.async", "takes true or false", "async_mode async_checkpoint enable_async_checkpointing"),
    ("checkpoint.format", "takes sharded or full", "state_dict_type fsdp_state_dict_type save_sharded"),
    (
        "eval.every",
        "takes the optimizer steps between evaluations",
        "eval_steps eval_interval eval_freq eval_every val_check_interval eval_strategy evaluation_strategy "
        "eval.interval",
    ),
    ("eval.batches", "takes the most batches in one evaluation", "limit_val_batches eval_iters eval.max_iters"),
    (
        "log.every",
        "takes the optimizer steps between log lines",
        "logging_steps log_every_n_steps log_interval log_freq log_every print_freq steps_per_print",
    ),
    (
        "log.to",
        "takes a list of loggers, as in [tensorboard, csv]",
        "report_to logger logger_name loggers enable_tensorboard enable_wandb use_wandb wandb tensorboard "
        "use_tensorboard",
    ),
    ("log.wandb.project", "names the project, with log.to: [wandb]", "wandb_project"),
    ("log.wandb.entity", "names the user or team, with log.to: [wandb]", "wandb_entity"),
    ("log.level", "sets the least level of what is printed and logged", "log_level logging_level"),
    (
        "run_dir",
        "sets the folder for runs; checkpoints and logs of a run are in RUN_DIR/NAME",
        "output_dir out_dir save_dir dump_folder default_root_dir logging_dir",
    ),
    ("name", "names the run, whose folder is RUN_DIR/NAME", "run_name experiment_name exp_name"),
    (
        "name",
        "names the run, and shoal train --resume goes on from its newest checkpoint",
        "resume_from_checkpoint resume auto_resume auto_resume_from_checkpoints",
    ),
    (
        "include",
        "takes the YAML files that this one builds on, as in [base.yaml]; shoal import CONFIG.yaml translates a config "
        "of Hydra",
        "defaults",
    ),
    ("seed", "sets the seed of all randomness", "random_seed manual_seed data_seed seed_everything"),
    (
        "model.from",
        "takes a folder or a cached Hugging Face id",
        "base_model model_name_or_path model_name model_id pretrained_model_name_or_path checkpoint_dir pretrained "
        "initial_checkpoint_dir initial_load_path hf_assets_path",
    ),
    ("model.shape", "takes a named shape or explicit sizes", "flavor model_config base_model_config"),
    (
        "model.tokenizer",
        "takes a folder or a cached Hugging Face id",
        "tokenizer_path tokenizer_name tokenizer_name_or_path tokenizer_dir tokenizer_config",
    ),
    (
        "model.attention",
        "takes auto, sdpa, flex, flash or eager",
        "attn_implementation flash_attention flash_attn use_flash_attention use_flash_attention_2 sdp_attention "
        "flex_attention attention_backend attn_type",
    ),
    (
        "data.path",
        "takes a file, folder or pattern, and data.source the kind of file",
        "dataset datasets dataset_path dataset_name data_path data_files data_dir train_file train_files train_data "
        "train_dataset",
    ),
    ("data.format", "takes auto, alpaca, chat, completion or text", "dataset_type dataset_format prompt_style"),
    (
        "data.max_length",
        "sets the tokens per sequence",
        "sequence_len sequence_length seq_len seq_length max_seq_length max_seq_len block_size model_max_length "
        "context_length max_context_length cutoff_len",
    ),
    ("data.pack", "takes auto, true or false", "sample_packing packing packed pack_sequences"),
    (
        "data.train_on",
        "takes answers, or all where the tokens of the prompt count in the loss",
        "train_on_inputs train_on_input mask_prompt train_on_prompt completion_only_loss assistant_only_loss",
    ),
    (
        "data.validation",
        "takes a share of the data or a path",
        "val_set_size val_size test_size val_split_fraction val_split validation_split eval_dataset eval_file "
        "validation_file val_file test_datasets",
    ),
    (
        "data.workers",
        "sets the threads per device that prepare batches",
        "dataloader_num_workers num_workers num_data_workers",
    ),
    ("data.streaming.shuffle_buffer", "takes the examples to shuffle among", "shuffle_buffer_size"),
    ("adapter.kind", "takes none, lora or qlora", "peft use_peft peft_config peft_type lora use_lora finetuning_type"),
    (
        "adapter.from",
        "takes the folder of a PEFT adapter to start from",
        "lora_model_dir adapter_name_or_path adapter_path resume_from_adapter lora_weights lora_path",
    ),
    ("adapter.rank", "sets the rank of the adapter", "lora_r lora_rank"),
    ("adapter.alpha", "sets LoRA's alpha", "lora_alpha"),
    ("adapter.dropout", "sets LoRA's dropout", "lora_dropout"),
    (
        "adapter.targets",
        "takes a list of linear layers, or auto for all of those in the blocks",
        "lora_target_modules target_modules lora_target_linear lora_attn_modules lora_modules lora_target",
    ),
    (
        "adapter.train_also",
        "takes patterns of parameters",
        "modules_to_save lora_modules_to_save additional_target",
    ),
    (
        "adapter.quantize",
        "takes nf4 or nf4-dq, with adapter.kind qlora; int8 and fp4 in shoal plan alone",
        "load_in_4bit load_in_8bit quantize quantization quantization_bit quantization_config bnb_4bit_quant_type",
    ),
    ("adapter.dora", "takes true or false", "use_dora peft_use_dora lora_use_dora"),
    ("adapter.rslora", "takes true or false", "use_rslora peft_use_rslora"),
    (
        "hardware.devices",
        "takes the devices per node, and hardware.nodes the nodes",
        "devices num_gpus n_gpu n_gpus gpus num_devices num_gpus_per_node gpus_per_node nproc_per_node num_processes "
        "world_size",
    ),
    ("hardware.devices", "counts the devices, GPUs where there are any", "accelerator device device_type use_cpu"),
    ("slurm.time", "takes the time limit, in Slurm's notation", "timeout_min slurm_time walltime slurm.timeout"),
    ("slurm.signal", "takes the seconds before the time limit at which the run saves", "signal_delay_s"),
    ("slurm.partition", "takes the partition", "slurm_partition slurm.queue"),
    ("slurm.account", "takes the account", "slurm_account"),
    ("slurm.qos", "takes the quality of service", "slurm_qos"),
    ("slurm.constraint", "takes the features of the nodes", "slurm_constraint slurm.constraints"),
    ("slurm.mem", "takes the memory per node", "mem_gb slurm_mem slurm.memory"),
    ("slurm.cpus_per_task", "takes the CPU cores per device", "slurm_cpus_per_task slurm.cpus slurm.cpus_per_gpu"),
    ("slurm.setup", "takes shell lines that run before training", "slurm_setup slurm.setup_commands slurm.modules"),
    ("slurm.extra", "takes options of sbatch", "slurm_additional_parameters additional_parameters sbatch_args"),
    ("slurm.container", "takes the image", "container_image slurm.image"),
    (
        "hardware.devices",
        "takes the devices per node, each with a task of its own",
        "tasks_per_node ntasks_per_node slurm.gres",
    ),
    ("hardware.nodes", "takes the nodes, and hardware.devices the devices per node", "num_nodes nnodes num_machines"),
    (
        "parallel.strategy",
        "takes zero1, zero2 or zero3 for the stages of ZeRO",
        "deepspeed deepspeed_config zero_optimization zero_stage stage",
    ),
    (
        "parallel.strategy",
        "takes auto, single, ddp, fsdp, zero1, zero2 or zero3, and parallel.sharding what fsdp shards",
        "strategy fsdp fsdp_config fsdp_version use_fsdp ddp distributed_type distributed_backend",
    ),
    (
        "parallel.sharding",
        "takes full_shard, shard_grad_op, hybrid_shard or no_shard",
        "sharding_strategy fsdp_sharding_strategy",
    ),
    (
        "parallel.replicate",
        "sets the replicas under hybrid_shard, and the devices of a shard group follow from it",
        "data_parallel_replicate_degree data_parallel_shard_degree dp_replicate dp_shard dp_replicate_size "
        "dp_shard_size data_parallel_size data_parallel_degree dp_size",
    ),
    (
        "parallel.wrap.min_params",
        "wraps every module with at least so many parameters",
        "fsdp_min_num_params min_num_params",
    ),
    (
        "parallel.wrap.classes",
        "takes a list of the classes to wrap",
        "auto_wrap_policy fsdp_auto_wrap_policy fsdp_transformer_layer_cls_to_wrap transformer_layer_cls_to_wrap "
        "custom_sharded_layers",
    ),
    (
        "parallel.reshard",
        "takes auto, true, false or a number of devices",
        "reshard_after_forward fsdp_reshard_after_forward",
    ),
    (
        "parallel.prefetch",
        "sets the blocks all-gathered ahead of use",
        "forward_prefetch backward_prefetch fsdp_forward_prefetch fsdp_backward_prefetch limit_all_gathers",
    ),
    (
        "parallel.offload",
        "takes none, cpu (all that is sharded) or optimizer (its state)",
        "cpu_offload enable_cpu_offload fsdp_cpu_offload fsdp_offload_params offload_params offload_param "
        "offload_optimizer",
    ),
    ("parallel.compress", "takes none, bf16, fp16 or powersgd", "ddp_comm_hook comm_hook gradient_compression"),
    (
        "parallel.tp",
        "sets the tensor parallel degree",
        "tensor_parallel_size tensor_parallel_degree tensor_parallel tensor_model_parallel_size tensor_parallel_dim "
        "tp_size tp_degree",
    ),
    (
        "parallel.pp",
        "sets the pipeline parallel degree",
        "pipeline_parallel_size pipeline_parallel_degree pipeline_parallel pipeline_model_parallel_size pp_size "
        "pp_degree",
    ),
    ("parallel.pp_schedule", "takes 1f1b, interleaved or zero-bubble", "pipeline_parallel_schedule"),
    (
        "parallel.cp",
        "sets the context parallel degree",
        "context_parallel_size context_parallel_degree context_parallel context_parallel_dim sequence_parallel_degree "
        "sequence_parallel_size cp_size cp_degree",
    ),
    ("parallel.cp_method", "takes gather or ulysses", "context_parallel_rotate_method"),
    (
        "parallel.strategy",
        "fsdp shards the experts of a mixture; expert parallelism is neither built nor forecast",
        "ep ep_size ep_degree expert_parallel expert_parallel_size expert_parallel_degree expert_model_parallel_size",
    ),
)

FOREIGN_KEYS: dict[str, OurKey] = {name: OurKey(key, says) for key, says, names in WORDS for name in names.split()}


def our_key(path: Sequence[str | int]) -> OurKey | None:
    """The key of ours that does what another tool's key at `path` does: by its name, whatever block it stands in."""
    parts = [part.lower().replace("-", "_") for key in path for part in str(key).split(".")]
    return FOREIGN_KEYS.get(".".join(parts[-2:])) or FOREIGN_KEYS.get(parts[-1])
