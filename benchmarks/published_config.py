"""The config of a published run, as somebody would write it to ask `shoal plan --like` for its forecast.

What a config cannot say is left out: a row that needs it has no config.
"""

from typing import Any

from shoal import api
from shoal.catalogue.families import FAMILIES, Family
from shoal.catalogue.shapes import NAMED
from shoal.mistakes import UserMistake
from shoal.plan.run.run import Run
from shoal.plan.systems.like import shown_value

QUANTIZE = {None: "lora", "nf4": "qlora", "fp4": "qlora", "int8": "qlora"}
# Keys of a row whose value goes to a key of the config as it is.
SAME = {
    "paged_optimizer": "train.optimizer.paged",
    "optimizer_in_backward": "train.optimizer.in_backward",
    "optimizer_ranks": "parallel.optimizer_ranks",
    "sequence_parallel": "parallel.sequence_parallel",
    "schedule": "parallel.pp_schedule",
    "virtual_stages": "parallel.pp_stages",
    "cp_method": "parallel.cp_method",
    "reshard": "parallel.reshard",
    "offload": "parallel.offload",
    "cuda_graphs": "train.cuda_graphs",
    "host_block_ms": "hardware.host_block_ms",
}
# Keys that say nothing about the run, or that `config_of` reads; of the rest, a config can say nothing.
READ = {
    *("source", "system", "model", "gpu", "gpus", "per_node", "mesh", "sequence", "micro_batch", "accum", "precision"),
    *(
        "recompute",
        "recomputed_parts",
        "recomputed_blocks",
        "adapter",
        "compiled",
        "loss",
        "strategy",
        "network",
        "link",
    ),
    *("dropout", "attention_dropout", "attention", "clips", "momentum", "varied_lengths", "date", "unknown", "memory"),
    *("tokens_per_second_per_gpu", "not_counted", "memory_not_counted", "optimizer", "head_share", "classifier"),
    "traits",
}


def asked(line: dict[str, Any], models: dict[str, Any], system: str) -> Run:
    """The run that the command forecasts for a row with `--like SYSTEM`; a UserMistake if it cannot be asked."""
    values = config_of(line, models)
    if values is None:
        raise UserMistake("A config cannot say what this run does.")
    traits = [f"{name}={shown_value(value)}" for name, value in line.get("traits", {}).items()]
    return api.plan(_nested(values), system=system, traits=traits).choice.run


def _nested(values: dict[str, Any]) -> dict[str, Any]:
    """Values by dotted key as blocks of a config."""
    mapping: dict[str, Any] = {}
    for key, value in values.items():
        *blocks, last = key.split(".")
        inner = mapping
        for block in blocks:
            inner = inner.setdefault(block, {})
        inner[last] = value
    return mapping


def config_of(line: dict[str, Any], models: dict[str, Any]) -> dict[str, Any] | None:
    """The values of a row by dotted key; None if a config cannot say what the row does."""
    mesh, adapter = line["mesh"], line.get("adapter") or {}
    if set(line) - READ - set(SAME) or set(mesh) - {"dp_shard", "dp_replicate", "tp", "pp", "cp"}:
        return None
    if adapter and (adapter.get("quantize") not in QUANTIZE or set(adapter) - KNOWN_ADAPTER):
        return None
    ranks = mesh.get("dp_shard", 1) * mesh.get("dp_replicate", 1)
    found: dict[str, Any] = {
        "model.shape": line["model"] if line["model"] in NAMED else _explicit(models[line["model"]]),
        "model.tokenizer": "bytes",
        "hardware.gpu": line["gpu"],
        "hardware.devices": min(line["per_node"], line["gpus"]),
        "hardware.nodes": max(1, line["gpus"] // line["per_node"]),
        "data.max_length": line["sequence"],
        "data.pack": not line.get("varied_lengths", False),
        "train.global_batch": line["micro_batch"] * line["accum"] * ranks,
        "train.micro_batch": line["micro_batch"],
        "train.precision": line["precision"],
        "train.recompute": _recompute(line),
        "train.compile": line["compiled"],
        "train.loss_impl": line["loss"],
        "train.steps": 100,
        "train.optimizer.name": line.get("optimizer", "adamw"),
        "parallel.strategy": line["strategy"],
        **{f"parallel.{axis}": mesh[axis] for axis in ("tp", "pp", "cp") if axis in mesh},
        **{key: line[name] for name, key in SAME.items() if name in line},
    }
    if mesh.get("dp_replicate", 1) > 1 and line["strategy"] == "fsdp":
        found |= {"parallel.sharding": "hybrid_shard", "parallel.replicate": mesh["dp_replicate"]}
    for name in ("network", "link"):
        if name in line:
            found[f"hardware.{name}"] = _described(line[name])
    found["model.attention"] = "eager" if line.get("attention") == "scores" else "sdpa"
    if line.get("dropout") or line.get("attention_dropout"):
        found["model.dropout"] = 0.1
    if not shape_traits(found["model.shape"]).causal or "head_share" in line:
        if not (objective := _objective(line)):
            return None
        found |= objective
    if line.get("clips") is False:
        found["train.clip"] = None
    if "momentum" in line:
        found["train.optimizer.momentum"] = 0.9 if line["momentum"] else 0.0
    if adapter:
        found |= {
            "adapter.kind": QUANTIZE[adapter.get("quantize")],
            "adapter.rank": adapter["rank"],
            "adapter.targets": [one for name in adapter["targets"] for one in JOINED.get(name, [name])],
            "adapter.dropout": 0.05 if adapter.get("dropout") else 0.0,
            "adapter.dora": adapter.get("dora", False),
        }
        if adapter.get("quantize"):
            found["adapter.quantize"] = adapter["quantize"] + ("-dq" if adapter.get("double_quantized") else "")
    return found


# Labels of a sequence: a class, or the two ends of an answer, which cost next to nothing either way.
CLASSIFIED = 2.0
# Names of one matmul where our shape has several.
JOINED = {"attn": ["q_proj", "k_proj", "v_proj"]}
KNOWN_ADAPTER = {"rank", "targets", "quantize", "dropout", "dora", "double_quantized", "upcasts"}


def _objective(line: dict[str, Any]) -> dict[str, Any]:
    """The objective of an encoder by the share of tokens that have logits; empty if neither of ours has it."""
    share = 0.0 if line.get("classifier") else line.get("head_share", 1.0)
    if 0.1 < share < 0.2 or share == 1:
        return {"train.objective": "masked_lm"}
    if share * line["sequence"] <= CLASSIFIED:
        return {"train.objective": "classify", "data.label": "label", "data.pack": False}
    return {}


def _explicit(shape: dict[str, Any]) -> dict[str, Any]:
    """Sizes as a config has them: without the type of the model and its share of rotary channels, which are those of
    the family there."""
    return {key: value for key, value in shape.items() if key not in ("model_type", "rotary_share")}


def _described(link: Any) -> Any:
    """A link by its name, or as fast as the source says; over TCP with the latency of Ethernet."""
    if not isinstance(link, dict) or not link.get("tcp"):
        return link
    return {"gb_per_second": link["gb_per_second"], "latency_us": 50}


def shape_traits(shape: str | dict[str, Any]) -> Family:
    return NAMED[shape].traits if isinstance(shape, str) else FAMILIES[shape["family"]]


def _recompute(line: dict[str, Any]) -> Any:
    wanted = line["recompute"]
    if wanted == "parts":
        return {"parts": line["recomputed_parts"]}
    if "recomputed_blocks" in line:
        return {"first": line["recomputed_blocks"]}
    return {"every": wanted} if isinstance(wanted, int) else wanted
