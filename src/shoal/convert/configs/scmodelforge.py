"""scModelForge's YAML. Its data is gene expression of cells, and its `num_gpus` is a total."""

from shoal.convert.configs.draft import WORLD
from shoal.convert.configs.fsdp import FSDP_KEYS
from shoal.convert.configs.rules import Key, System, cannot, nothing, rule, to, under
from shoal.convert.configs.values import count, number, precision, put_folder, put_loggers, put_optimizer, put_schedule

CELLS = "data.source: cells is not built yet; it waits for that source"
MASKED = "an encoder that learns masked tokens is not built yet"
ARCHITECTURES = {"transformer_encoder": "bert"}


@rule("parallel.strategy", says="an fsdp block means fsdp")
def _strategy(key: Key) -> None:
    if key.get("training.fsdp") is not None:
        key.no_meaning("the fsdp block decides")
    elif str(key.value) in ("ddp", "fsdp"):
        key.become("parallel.strategy", str(key.value))
    else:
        key.no_meaning("auto: the fastest that fits")


@rule("hardware.devices", says="of all nodes, and ours per node")
def _gpus(key: Key) -> None:
    key.become(WORLD, count(key.value), "a total there")


@rule("model.shape", says=MASKED)
def _architecture(key: Key) -> None:
    key.not_carried(f"{MASKED}: set model.from or model.shape")


@rule("data.path", says=CELLS)
def _paths(key: Key) -> None:
    key.not_carried(CELLS)


@rule("data.streaming")
def _streaming(key: Key) -> None:
    chunk, buffer = key.get("data.streaming_chunk_size"), key.get("data.streaming_shuffle_buffer")
    if not key.get("data.streaming", False):
        key.no_meaning("data.streaming is off")
    elif chunk is None and buffer is None:
        key.become("data.streaming", True)
    else:
        named = {"chunk": chunk, "shuffle_buffer": buffer}
        key.become("data.streaming", {name: count(value) for name, value in named.items() if value is not None})


@rule("train.schedule.name")
def _schedule(key: Key) -> None:
    put_schedule(key)


@rule("train.epochs", says="not where data.streaming is on")
def _epochs(key: Key) -> None:
    if key.get("data.streaming", False) and key.get("training.scheduler.total_steps") is not None:
        key.not_carried("a stream has no known length: the schedule's total_steps is train.steps")
    else:
        key.become("train.epochs", count(key.value))


@rule("train.schedule.total_steps", says="train.steps where data.streaming is on")
def _total_steps(key: Key) -> None:
    if key.get("data.streaming", False):
        key.become("train.steps", count(key.value), "the length of a run on a stream")
    else:
        key.become("train.schedule.total_steps", count(key.value))


KEYS = {
    "training.strategy": _strategy,
    "training.num_gpus": _gpus,
    "training.num_nodes": to("hardware.nodes", count),
    "training.batch_size": to("train.micro_batch", count, "per GPU"),
    "training.gradient_accumulation": to("train.grad_accum", count),
    "training.max_epochs": _epochs,
    "training.seed": to("seed", count),
    "training.precision": to("train.precision", precision),
    "training.gradient_clip": to("train.clip", number),
    "training.optimizer.name": rule("train.optimizer.name")(put_optimizer),
    "training.optimizer.lr": to("train.lr", number),
    "training.optimizer.weight_decay": to("train.optimizer.weight_decay", number),
    "training.scheduler.name": _schedule,
    "training.scheduler.warmup_steps": to("train.schedule.warmup", count),
    "training.scheduler.total_steps": _total_steps,
    **under("training.fsdp", FSDP_KEYS),
    "training.logger": rule("log.to")(put_loggers),
    **nothing("names and folders of a logger", "training.wandb_project training.run_name training.log_dir"),
    "training.log_every_n_steps": to("log.every", count),
    "training.checkpoint_dir": rule("run_dir", "name")(put_folder),
    "training.save_top_k": to("checkpoint.keep_best", count),
    "training.num_workers": to("data.workers", count),
    "training.val_split": to("data.validation", number),
    **nothing("shoal train --resume goes on with the newest checkpoint", "training.resume_from"),
    "data.source": nothing("what data.paths are", "x")["x"],
    "data.paths": _paths,
    "data.num_workers": to("data.workers", count),
    "data.streaming": _streaming,
    "data.streaming_chunk_size": _streaming,
    "data.streaming_shuffle_buffer": _streaming,
    **cannot(CELLS, "gene_vocab max_genes preprocessing census multi_species", "data", unless=({},)),
    **cannot(CELLS, "tokenizer", unless=({},)),
    "model.architecture": _architecture,
    "model.max_seq_len": to("data.max_length", count),
    "model.dropout": to("model.dropout", number),
    **cannot(
        MASKED,
        "hidden_dim num_layers num_heads ffn_dim pooling activation use_expression_values pretraining_task mask_ratio "
        "vocab_size n_bins gene_loss_weight expression_loss_weight decoder_dim decoder_layers decoder_heads",
        "model",
    ),
    **cannot("evaluation is the loss of held-out sequences: eval.every counts steps", "eval", unless=({},)),
    **cannot("fine-tuning of an encoder is not built yet", "finetune", unless=({},)),
}

SCMODELFORGE = System(
    "an scModelForge config",
    KEYS,
    marks=frozenset(
        {"training", "training.fsdp", "training.num_gpus", "training.gradient_accumulation", "training.save_top_k"}
        | {"data.gene_vocab", "tokenizer.strategy", "model.architecture", "training.batch_size", "training.precision"}
    ),
    defaults={
        "training.batch_size": 64,
        "training.gradient_accumulation": 1,
        "training.max_epochs": 10,
        "training.seed": 42,
        "training.precision": "bf16-mixed",
        "training.gradient_clip": 1.0,
        "training.optimizer.lr": 1e-4,
        "training.optimizer.weight_decay": 0.01,
        "training.scheduler.name": "cosine_warmup",
        "training.scheduler.warmup_steps": 2000,
        "training.log_every_n_steps": 50,
        "training.save_top_k": 3,
        "training.val_split": 0.05,
    },
    more_defaults=lambda tree: (
        {"training.strategy": None if "fsdp" in (tree.get("training") or {}) else "ddp"}
        | ({"training.fsdp.sharding_strategy": "FULL_SHARD"} if "fsdp" in (tree.get("training") or {}) else {})
        | ({"training.val_split": None} if (tree.get("data") or {}).get("streaming") else {})
    ),
)
