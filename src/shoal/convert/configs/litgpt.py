"""LitGPT's commands (`litgpt finetune_lora …`) and the YAML files that they take and write."""

from typing import Any

from shoal.convert.configs.litgpt_rules import (
    COMMAND,
    betas_rule,
    checkpoint_rule,
    clip_rule,
    command_rule,
    compiler_rule,
    devices_rule,
    min_lr_rule,
    model_name,
    module_rule,
    optimizer_rule,
    path_rule,
    precision_rule,
    prompt_style_rule,
    quantize_rule,
    schedule_rule,
    shape_rule,
    split_rule,
    strategy_rule,
    targets_rule,
    warmup_fraction_rule,
)
from shoal.convert.configs.rules import System, Tree, cannot, nothing, rule, to, words
from shoal.convert.configs.values import (
    count,
    number,
    put_folder,
    put_loggers,
    text,
    truth,
)

OPTIMIZER = ("optimizer", "optimizer.init_args")

KEYS = {
    COMMAND: command_rule,
    "checkpoint_dir": checkpoint_rule,
    "model_name": shape_rule,
    "initial_checkpoint_dir": checkpoint_rule,
    "tokenizer_dir": to("model.tokenizer", model_name),
    **cannot("set model.shape to its sizes", "model_config", unless=({},)),
    "out_dir": rule("run_dir", "name")(put_folder),
    "precision": precision_rule,
    "quantize": quantize_rule,
    "devices": devices_rule,
    "num_nodes": to("hardware.nodes", count),
    **nothing("shoal train --resume goes on with the newest checkpoint", "resume"),
    **words("lora_r", count),
    **words("lora_alpha lora_dropout", number),
    **{f"lora_{name}": targets_rule for name in ("query", "key", "value", "projection", "mlp", "head")},
    "data.class_path": module_rule,
    "data.init_args.json_path": path_rule,
    "data.init_args.train_data_path": path_rule,
    "data.init_args.data_path": path_rule,
    "data.init_args.val_data_path": to("data.validation", text),
    "data.init_args.val_split_fraction": split_rule,
    "data.init_args.mask_prompt": to("data.train_on", lambda value: "answers" if truth(value) else "all"),
    "data.init_args.prompt_style": prompt_style_rule,
    "data.init_args.num_workers": to("data.workers", count),
    **nothing("one seed for all randomness", "data.init_args.seed"),
    **nothing(
        "data is where data.path says",
        "data.init_args.download_dir data.init_args.file_name data.init_args.ignore_index",
    ),
    "train.global_batch_size": to("train.global_batch", count),
    "train.micro_batch_size": to("train.micro_batch", count),
    "train.lr_warmup_steps": to("train.schedule.warmup", count),
    "train.lr_warmup_fraction": warmup_fraction_rule,
    "train.epochs": to("train.epochs", count),
    "train.max_steps": to("train.steps", count),
    "train.max_tokens": to("train.tokens", count, "loss tokens"),
    "train.max_seq_length": to("data.max_length", count),
    "train.max_norm": clip_rule,
    "train.min_lr": min_lr_rule,
    "train.save_interval": to("checkpoint.every", count),
    "train.log_interval": to("log.every", count),
    "train.learning_rate": to("train.lr", number),
    "train.weight_decay": to("train.optimizer.weight_decay", number),
    "train.beta1": betas_rule,
    "train.beta2": betas_rule,
    **cannot("the model's config says whether they are tied", "train.tie_embeddings"),
    **cannot("a time limit is a matter of the scheduler: slurm.time", "train.max_time"),
    "eval.interval": to("eval.every", count),
    "eval.max_iters": to("eval.batches", count),
    **nothing("shoal generate writes samples from a checkpoint", "eval.max_new_tokens eval.evaluate_example"),
    **nothing("the last step is evaluated", "eval.final_validation eval.initial_validation"),
    "optimizer": optimizer_rule,
    "optimizer.class_path": optimizer_rule,
    **{f"{block}.lr": to("train.lr", number) for block in OPTIMIZER},
    **{f"{block}.weight_decay": to("train.optimizer.weight_decay", number) for block in OPTIMIZER},
    **{f"{block}.betas": betas_rule for block in OPTIMIZER},
    **{f"{block}.eps": to("train.optimizer.eps", number) for block in OPTIMIZER},
    **{f"{block}.momentum": to("train.optimizer.momentum", number) for block in OPTIMIZER},
    **nothing("AdamW has a fused kernel", "optimizer.fused optimizer.init_args.fused"),
    "logger_name": rule("log.to")(put_loggers),
    **nothing(
        "names in a logger",
        "log.project log.run log.group log.teamspace log.metadata log.log_model log.save_logs log.checkpoint_name",
    ),
    "seed": to("seed", count),
    **nothing("shoal download asks for a token", "access_token"),
    "compiler": compiler_rule,
    "strategy": strategy_rule,
    **nothing("shoal bench train measures a run", "profile"),
}

FINETUNED = {
    "train.global_batch_size": 16,
    "train.micro_batch_size": 1,
    "train.lr_warmup_steps": 100,
    "train.epochs": 5,
    "train.max_norm": 0,
    "eval.max_iters": 100,
    "seed": 1337,
}
PRETRAINED = {
    "train.global_batch_size": 512,
    "train.micro_batch_size": 4,
    "train.lr_warmup_steps": 2000,
    "train.max_norm": 1.0,
    "train.min_lr": 4e-5,
    "train.max_tokens": 3_000_000_000_000,
    "eval.max_iters": 100,
    "seed": 42,
}


def defaults_rule(tree: Tree) -> dict[str, Any]:
    """What LitGPT 0.5 does where a key is left out."""
    command = tree.get(COMMAND)
    train = tree.get("train") or {}
    found: dict[str, Any] = {
        "train.save_interval": 1000,
        "train.log_interval": 1,
        "optimizer.init_args.lr": None if "learning_rate" in train or "lr" in (tree.get("optimizer") or {}) else 1e-3,
        "optimizer.init_args.weight_decay": None if "weight_decay" in train else 0.01,
        "optimizer.init_args.betas": None if "beta1" in train else [0.9, 0.999],
        "schedule": "cosine",
    }
    if command == "pretrain":
        length = any(train.get(name) is not None for name in ("max_tokens", "max_steps", "epochs"))
        found |= PRETRAINED | {"devices": "auto"} | ({"train.max_tokens": None} if length else {})
    else:
        found |= FINETUNED | {"devices": 1, "eval.interval": 100 if command == "finetune_lora" else 600}
        if train.get("max_steps") is not None:
            found["train.epochs"] = None
        found["data.init_args.mask_prompt"] = False
        found["data.class_path"] = "litgpt.data.Alpaca"
        if (tree.get("data") or {}).get("class_path", "").endswith("JSON"):
            found["data.init_args.val_split_fraction"] = 0.05
        if command in ("finetune_lora", "finetune"):
            found |= {"lora_r": 8, "lora_alpha": 16, "lora_dropout": 0.05, "lora_query": True}
    if train.get("lr_warmup_fraction") is not None:
        found["train.lr_warmup_steps"] = None
    return found


LITGPT = System(
    "a LitGPT config",
    {**KEYS, "schedule": schedule_rule},
    marks=frozenset(
        {
            COMMAND,
            "train.global_batch_size",
            "train.micro_batch_size",
            "data.class_path",
            "data.init_args",
            "lora_query",
        }
        | {
            "train.lr_warmup_steps",
            "out_dir",
            "logger_name",
            "train.max_seq_length",
            "checkpoint_dir",
            "optimizer.class_path",
        }
    ),
    more_defaults=defaults_rule,
)
