"""Lightning's YAML: a config of LightningCLI, or one of Hydra that instantiates a Trainer."""

from typing import Any

from shoal.convert.configs.deepspeed_rules import betas_rule, clip
from shoal.convert.configs.lightning_rules import (
    PYTHON,
    accelerator,
    callbacks,
    deterministic,
    devices,
    evaluation_batches,
    evaluation_interval,
    loggers,
    most,
    off_unless,
    precision_rule,
    schedule,
    seed,
    strategy,
)
from shoal.convert.configs.rules import Rule, System, Tree, at, cannot, nothing, rule, to, under
from shoal.convert.configs.values import count, number, put_epochs, put_name, put_optimizer, text

TRAINER_KEYS = {
    "accelerator": accelerator,
    "strategy": strategy,
    "devices": devices,
    "num_nodes": to("hardware.nodes", count),
    "precision": precision_rule,
    "logger": loggers,
    "callbacks": callbacks,
    "max_epochs": Rule(lambda key: most.translate(key) if key.value == -1 else put_epochs(key), ("train.epochs",)),
    "max_steps": most,
    **cannot("a time limit is a matter of the scheduler: slurm.time", "max_time"),
    **nothing("a run has one length", "min_epochs min_steps"),
    "limit_train_batches": off_unless(1.0)("the data is used as a whole; cut it before"),
    "limit_val_batches": evaluation_batches,
    **nothing("shoal eval evaluates a checkpoint", "limit_test_batches limit_predict_batches"),
    "overfit_batches": off_unless(0, 0.0)("the data is used as a whole; cut it before"),
    "fast_dev_run": off_unless(False)("shoal train --dry-run checks a run without training"),
    "val_check_interval": evaluation_interval,
    "check_val_every_n_epoch": off_unless(1)("eval.every counts steps"),
    **nothing("preflight checks a run before it begins", "num_sanity_val_steps"),
    "log_every_n_steps": to("log.every", count),
    "enable_checkpointing": off_unless(True)("a run always saves: set checkpoint.every to a number not reached"),
    "accumulate_grad_batches": to("train.grad_accum", count),
    "gradient_clip_val": clip,
    "gradient_clip_algorithm": off_unless("norm")("train.clip is the largest norm"),
    "deterministic": deterministic,
    "default_root_dir": to("run_dir", text),
    **nothing("shoal train --profile", "profiler"),
    "detect_anomaly": off_unless(False)("a non-finite loss stops or skips a step: train.on_nan"),
    "plugins": off_unless([], ())("not built"),
    "sync_batchnorm": off_unless(False)("transformers have no batch norm"),
    **nothing("progress and logs are in RUN/logs", "enable_progress_bar enable_model_summary barebones"),
    **nothing(
        "built in",
        "benchmark inference_mode use_distributed_sampler reload_dataloaders_every_n_epochs enable_autolog_hparams "
        "model_registry _target_ _convert_ _recursive_",
    ),
}

OPTIMIZER = {
    "lr": to("train.lr", number),
    "betas": betas_rule,
    "eps": to("train.optimizer.eps", number),
    "weight_decay": to("train.optimizer.weight_decay", number),
    "momentum": to("train.optimizer.momentum", number),
    **nothing("AdamW has a fused kernel", "fused foreach maximize capturable differentiable amsgrad"),
    **nothing("built in", "_partial_"),
}

KEYS = {
    **under("trainer", TRAINER_KEYS),
    "seed_everything": seed,
    "seed": to("seed", count),
    "callbacks": callbacks,
    "logger": loggers,
    "optimizer.class_path": rule("train.optimizer.name")(put_optimizer),
    **under("optimizer.init_args", OPTIMIZER),
    "lr_scheduler.class_path": schedule,
    **nothing("shoal train --resume goes on with the newest checkpoint", "ckpt_path"),
    "task_name": rule("name")(put_name),
    **nothing(
        "Hydra's and the template's own",
        "defaults hydra tags train test paths extras optimized_metric _target_ root_dir data_dir log_dir output_dir "
        "work_dir",
    ),
}

# What the arguments of a LightningModule or a data module are most often called.
OF_THE_MODEL = {
    "model_name_or_path": to("model.from", text),
    "pretrained_model_name_or_path": to("model.from", text),
    "learning_rate": to("train.lr", number),
    "lr": to("train.lr", number),
    "weight_decay": to("train.optimizer.weight_decay", number),
    "warmup_steps": to("train.schedule.warmup", count),
    "optimizer._target_": rule("train.optimizer.name")(put_optimizer),
    **{f"optimizer.{name}": one for name, one in OPTIMIZER.items()},
}
OF_THE_DATA = {
    "batch_size": to("train.micro_batch", count, "per device"),
    "train_batch_size": to("train.micro_batch", count, "per device"),
    "max_length": to("data.max_length", count),
    "max_seq_length": to("data.max_length", count),
    "block_size": to("data.max_length", count),
    "num_workers": to("data.workers", count),
}
SCHEDULE = cannot("set train.schedule", "x", unless=())["x"]
CODE = cannot(PYTHON, "x", unless=())["x"]


def of_python_rule(name: str) -> Rule | None:
    """An argument of the user's own classes: those that are named as everywhere are carried."""
    block, _, rest = name.partition(".")
    if name.startswith("lr_scheduler.init_args."):
        return SCHEDULE
    if block not in ("model", "data") or not rest or rest.removeprefix("init_args.") in ("init_args", "optimizer"):
        return None
    last = rest.removeprefix("init_args.")
    return {**OF_THE_MODEL, **OF_THE_DATA}.get(last, CODE)


def lightning_tree(tree: Tree) -> Tree:
    """A file of Hydra's group `trainer` as one with that block; others as they are."""
    target = str(tree.get("_target_", ""))
    if target.endswith(".Trainer") and ("lightning" in target or target.startswith("pl.")):
        return {"trainer": {key: value for key, value in tree.items() if key != "_target_"}}
    return tree


def _defaults(tree: Tree) -> dict[str, Any]:
    # A file that is one of several, or that names a script's arguments, says nothing of the others.
    if at(tree, "trainer") is None:
        return {}
    found = {"trainer.precision": "32-true", "trainer.gradient_clip_val": 0, "trainer.log_every_n_steps": 50}
    if at(tree, "optimizer.class_path") is not None and at(tree, "lr_scheduler") is None:
        found["lr_scheduler.class_path"] = "constant"
    return found


LIGHTNING = System(
    "a Lightning config",
    KEYS,
    marks=frozenset(
        f"trainer.{name}"
        for name in (
            *("accelerator", "devices", "num_nodes", "max_epochs", "accumulate_grad_batches", "gradient_clip_val"),
            *(
                "limit_val_batches",
                "val_check_interval",
                "check_val_every_n_epoch",
                "num_sanity_val_steps",
                "precision",
            ),
        )
    )
    | {"seed_everything"},
    more_defaults=_defaults,
    other=of_python_rule,
)
