"""scModelForge's YAML. Its data is gene expression of cells, and its `num_gpus` is a total."""

from shoal.convert.configs.draft import WORLD
from shoal.convert.configs.fsdp import FSDP_KEYS
from shoal.convert.configs.rules import Key, Rule, System, cannot, nothing, rule, to, under
from shoal.convert.configs.values import (
    count,
    number,
    precision,
    put_folder,
    put_loggers,
    put_optimizer,
    put_schedule,
    truth,
)

CELLS = "data.source cells reads .h5ad files"
ENCODER = "shoal trains encoders of the BERT family on masked genes"
FINETUNE = "set train.objective: classify, data.label and model.from by hand"
STRATEGIES = {"rank_value": "rank_value", "binned_expression": "binned", "binned": "binned"}
HUMAN = "human_protein_coding"
HUMAN_VOCABULARY = 20_480  # about 19,400 genes (HGNC), 4 special tokens, a multiple of 64


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


@rule("model.shape.family", "train.objective")
def _architecture(key: Key) -> None:
    if str(key.value) != "transformer_encoder":
        key.not_carried(f"{ENCODER}: use transformer_encoder, or set model.from or model.shape")
        return
    key.become("model.shape.family", "bert", "BERT's layers: norms after them, as in torch's encoder layer")
    if key.get("finetune") is None:
        key.become("train.objective", "masked_lm")


def _of_the_encoder(ours: str) -> Rule:
    """A size of the model, which is ours only if its architecture is."""

    @rule(ours)
    def translate(key: Key) -> None:
        if str(key.get("model.architecture", "transformer_encoder")) == "transformer_encoder":
            key.become(ours, count(key.value))
        else:
            key.not_carried(ENCODER)

    return translate


@rule("data.max_length", "model.shape.positions")
def _length(key: Key) -> None:
    key.become("data.max_length", count(key.value))
    if key.get("model.architecture") == "transformer_encoder":
        key.become("model.shape.positions", count(key.value))


@rule("data.source", says="local: .h5ad files")
def _source(key: Key) -> None:
    if str(key.value) == "local":
        key.become("data.source", "cells")
    else:
        key.not_carried(CELLS)


@rule("data.path", "data.source")
def _paths(key: Key) -> None:
    key.become("data.path", key.value)
    key.become("data.source", "cells")


@rule("data.cells.gene_vocab", says="a name needs its file: docs/cells.md")
def _vocabulary(key: Key) -> None:
    key.become("data.cells.gene_vocab", str(key.value))
    if str(key.value) == HUMAN and key.get("model.vocab_size") is None and key.get("model.architecture") is not None:
        key.become("model.shape.vocab", HUMAN_VOCABULARY, "room for its genes: raise it if the tokenizer needs more")


@rule("data.cells.tokens")
def _tokens(key: Key) -> None:
    if (ours := STRATEGIES.get(str(key.value))) is None:
        key.not_carried(f"data.cells.tokens has {', '.join(sorted(set(STRATEGIES.values())))}")
    else:
        key.become("data.cells.tokens", ours)


@rule("train.masking.mask", "train.masking.random")
def _masking(key: Key) -> None:
    random = number(key.get("tokenizer.masking.random_replace_ratio", 0.1))
    kept = number(key.get("tokenizer.masking.keep_ratio", 0.1))
    key.become("train.masking.random", random)
    key.become("train.masking.mask", round(1 - random - kept, 6), "the rest")


@rule("data.cells.target_sum")
def _normalization(key: Key) -> None:
    if key.value in (None, "none", False):
        key.become("data.cells.target_sum", 0.0)
    elif str(key.value) == "library_size":
        key.no_meaning("data.cells.target_sum is what cells are normalized to")
    else:
        key.not_carried("cells are normalized by their library size")


@rule("train.objective")
def _task(key: Key) -> None:
    if str(key.value) == "masked_gene_prediction":
        key.become("train.objective", "masked_lm")
    else:
        key.not_carried(ENCODER)


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
    "data.source": _source,
    "data.paths": _paths,
    "data.gene_vocab": _vocabulary,
    "data.max_genes": to("data.cells.max_genes", count),
    "data.preprocessing.normalize": _normalization,
    "data.preprocessing.target_sum": to("data.cells.target_sum", number),
    "data.preprocessing.hvg_selection": to("data.cells.highly_variable", count),
    "data.preprocessing.log1p": to("data.cells.log1p", truth),
    "data.num_workers": to("data.workers", count),
    "data.streaming": _streaming,
    "data.streaming_chunk_size": _streaming,
    "data.streaming_shuffle_buffer": _streaming,
    **cannot(CELLS, "census multi_species", "data", unless=({},)),
    "tokenizer.strategy": _tokens,
    "tokenizer.max_genes": to("data.cells.max_genes", count),
    "tokenizer.gene_vocab": _vocabulary,
    "tokenizer.prepend_cls": to("data.cells.cls", truth),
    "tokenizer.n_bins": to("data.cells.bins", count),
    "tokenizer.binning_method": to("data.cells.binning", str),
    "tokenizer.masking.mask_ratio": to("train.mask_ratio", number),
    "tokenizer.masking.random_replace_ratio": _masking,
    "tokenizer.masking.keep_ratio": _masking,
    "model.architecture": _architecture,
    "model.hidden_dim": _of_the_encoder("model.shape.hidden"),
    "model.num_layers": _of_the_encoder("model.shape.layers"),
    "model.num_heads": _of_the_encoder("model.shape.heads"),
    "model.ffn_dim": _of_the_encoder("model.shape.ffn"),
    "model.vocab_size": _of_the_encoder("model.shape.vocab"),
    "model.max_seq_len": _length,
    "model.dropout": to("model.dropout", number),
    "model.pretraining_task": _task,
    "model.mask_ratio": to("train.mask_ratio", number),
    "model.n_bins": to("data.cells.bins", count),
    **nothing("BERT's is gelu", "activation", "model"),
    **nothing("the head of train.objective classify reads <cls>", "pooling", "model"),
    **cannot(
        ENCODER,
        "use_expression_values gene_loss_weight expression_loss_weight decoder_dim decoder_layers decoder_heads",
        "model",
    ),
    **cannot("evaluation is the loss of held-out sequences: eval.every counts steps", "eval", unless=({},)),
    **cannot(FINETUNE, "finetune", unless=({},)),
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
