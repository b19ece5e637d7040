"""LLaMA-Factory's YAML: the Trainer's arguments, with those of its own."""

from typing import Any

from shoal.convert.configs.llamafactory_rules import (
    bits_rule,
    checkpointing_rule,
    dataset_rule,
    double_rule,
    eval_dataset_rule,
    flash_rule,
    fp8_rule,
    held_out_rule,
    history_rule,
    loss_rule,
    method_rule,
    mix_rule,
    muon_rule,
    neat_rule,
    prompts_rule,
    pure_rule,
    quantizer_rule,
    stage_rule,
    targets_rule,
    template_rule,
    unsloth_rule,
)
from shoal.convert.configs.rules import System, Tree, cannot, nothing, to, words
from shoal.convert.configs.trainer import ADAPTER, ARGUMENTS, DATA_AND_MODEL, DEFAULTS, TRAINER, more_rule
from shoal.convert.configs.values import count, number, text, texts, truth

OWN = {
    "stage": stage_rule,
    "finetuning_type": method_rule,
    "pref_loss": loss_rule,
    "pref_beta": to("train.preference.beta", number),
    "simpo_gamma": to("train.preference.gamma", number),
    "kto_chosen_weight": to("train.preference.desirable_weight", number),
    "kto_rejected_weight": to("train.preference.undesirable_weight", number),
    **cannot(
        "not an option of these objectives here",
        "pref_ftx pref_bco_weight dpo_label_smoothing ld_alpha ref_model_quantization_bit",
    ),
    **cannot("the reference is the model that training starts from", "ref_model ref_model_adapters"),
    "adapter_name_or_path": to("adapter.from", text),
    "lora_target": targets_rule,
    **words("additional_target", texts),
    "quantization_bit": bits_rule,
    "quantization_method": quantizer_rule,
    "double_quantization": double_rule,
    **nothing("adapter.quantize says it", "quantization_type"),
    **nothing("weights are loaded shard by shard", "quantization_device_map low_cpu_mem_usage offload_folder"),
    "dataset": dataset_rule,
    "eval_dataset": eval_dataset_rule,
    **nothing("the names of `dataset` are looked up there", "dataset_dir"),
    "val_size": held_out_rule,
    "template": template_rule,
    "train_on_prompt": prompts_rule,
    "mask_history": history_rule,
    "mix_strategy": mix_rule,
    **cannot("set the weight of each block in data.source", "interleave_probs"),
    "neat_packing": neat_rule,
    **cannot("the file or the dataset is used as a whole; cut it before", "max_samples"),
    **cannot("write it into the data, or into a chat template", "default_system tool_format"),
    **nothing("a cache by content is always used", "preprocessing_batch_size tokenized_path data_shared_file_system"),
    **nothing("data.streaming has a buffer of its own", "buffer_size"),
    **nothing("large for the preparation of data, which no collective waits for here", "ddp_timeout"),
    **nothing("padding never counts in the loss", "ignore_pad_token_for_loss"),
    **cannot("the chat template says it", "enable_thinking preserve_thinking", unless=(True, False)),
    "flash_attn": flash_rule,
    "disable_gradient_checkpointing": checkpointing_rule,
    "use_unsloth_gc": unsloth_rule,
    **nothing("checkpointing is non-reentrant", "use_reentrant_gc"),
    "pure_bf16": pure_rule,
    "fp8": fp8_rule,
    **nothing("train.precision: fp8 has no options", "fp8_backend fp8_enable_fsdp_float8_all_gather"),
    "use_muon": muon_rule,
    "add_tokens": to("model.add_tokens", texts),
    "add_special_tokens": to("model.add_tokens", texts),
    "early_stopping_steps": to("train.early_stop.patience", count),
    **nothing(
        "shoal has kernels of its own",
        "use_unsloth enable_liger_kernel use_v1_kernels upcast_layernorm block_diag_attn",
    ),
    **nothing("told by the model's own files", "use_fast_tokenizer resize_vocab cache_dir split_special_tokens"),
    **nothing("RUN/report.html has the curves", "plot_loss compute_accuracy include_effective_tokens_per_second"),
    **nothing(
        "of generating or exporting, not of training",
        "infer_backend infer_dtype use_kv_cache max_new_tokens temperature top_p top_k do_sample num_beams "
        "predict_with_generate eval_num_beams export_dir export_size export_device export_legacy_format "
        "export_hub_model_id export_quantization_bit export_quantization_dataset print_param_status",
    ),
    **cannot(
        "models of images, video and sound are not built",
        "image_max_pixels image_min_pixels video_max_pixels video_min_pixels video_fps video_maxlen media_dir "
        "freeze_vision_tower freeze_multi_modal_projector freeze_language_model use_audio_in_video audio_sampling_rate",
    ),
    **cannot(
        "not built",
        "use_galore use_apollo use_badam use_adam_mini use_llama_pro use_dft_loss use_asft_loss asft_alpha "
        "use_eaft_loss eaft_alpha pissa_init pissa_iter pissa_convert create_new_adapter loraplus_lr_embedding "
        "mixture_of_depths shift_attn rope_scaling moe_aux_loss_coef use_mca use_megatron_bridge use_kt use_swanlab "
        "train_from_scratch oft_rank oft_block_size oft_target module_dropout reward_model reward_model_type "
        "new_special_tokens_config reward_model_adapters reward_model_quantization_bit use_hyper_parallel "
        "hyper_parallel_args",
    ),
    **cannot("model.freeze has patterns of what to freeze", "freeze_trainable_layers freeze_trainable_modules"),
    **cannot("model.freeze has patterns of what to freeze", "freeze_extra_modules"),
    **nothing("one validation set is evaluated", "eval_on_each_dataset"),
    **nothing("weights are loaded shard by shard", "device_map compute_dtype adapter_folder"),
    **nothing("ranks meet as the launcher says", "master_addr master_port"),
    **nothing("shoal train --profile", "enable_torch_profiler profile_modules"),
    **nothing("logits are in fp32 in the loss", "upcast_lmhead_output"),
    **nothing("new rows are drawn as transformers does", "init_special_tokens"),
    **nothing("models of images, video and sound are not built", "image_do_pan_and_scan crop_to_patches"),
    **nothing(
        "of generating or exporting, not of training",
        "repetition_penalty length_penalty skip_special_tokens export_quantization_nsamples export_quantization_maxlen",
    ),
    **cannot("the order of examples is random", "disable_shuffling"),
    **cannot("nothing is uploaded: shoal export writes a folder", "hf_hub_token ms_hub_token om_hub_token"),
    **nothing("shoal submit starts runs on Ray", "ray_num_workers ray_init_kwargs ray_run_name ray_storage_path"),
}

# Options of what is not built begin so.
UNBUILT = ("galore_", "apollo_", "badam_", "swanlab_", "ppo_", "kt_", "profiler_", "sglang_")
GENERATING = nothing("of generating, not of training", "x")["x"]
NOT_BUILT = cannot("not built", "x")["x"]
KEYS = {**DATA_AND_MODEL, **ADAPTER, **ARGUMENTS, **OWN}


def defaults_rule(tree: Tree) -> dict[str, Any]:
    found = more_rule(tree)
    if tree.get("eval_dataset") is not None:
        found |= {"val_size": None, "eval_strategy": None}
    elif tree.get("val_size"):
        found["eval_strategy"] = None
    if str(tree.get("finetuning_type", "lora")) == "lora":
        rank = tree.get("lora_rank", 8)
        found |= {"lora_rank": 8, "lora_target": "all", "lora_alpha": 2 * count(rank), "lora_dropout": 0.0}
        found["double_quantization"] = True if tree.get("quantization_bit") else None
    if truthful(tree, "packing") is None and not tree.get("neat_packing"):
        found["packing"] = str(tree.get("stage")) == "pt"
    return found


def truthful(tree: Tree, name: str) -> bool | None:
    return None if tree.get(name) is None else truth(tree[name])


LLAMAFACTORY = System(
    "a LLaMA-Factory config",
    KEYS,
    marks=TRAINER.marks
    | frozenset(
        {"stage", "finetuning_type", "template", "dataset", "lora_target", "plot_loss", "pref_beta", "val_size"}
        | {"quantization_bit", "disable_gradient_checkpointing", "max_samples"}
    ),
    defaults={
        **DEFAULTS,
        "finetuning_type": "lora",
        "cutoff_len": 2048,
        "val_size": 0.0,
        "disable_gradient_checkpointing": False,
    },
    more_defaults=defaults_rule,
    other=lambda name: GENERATING if name.startswith("vllm_") else NOT_BUILT if name.startswith(UNBUILT) else None,
    extends=TRAINER,
)
