"""FSDP's options as transformers, Accelerate and axolotl write them, with and without the prefix `fsdp_`."""

from typing import Any

from shoal.config.foreign_keys import our_key
from shoal.convert.configs.rules import Key, Rule, cannot, nothing, rule
from shoal.convert.configs.values import count, put_recompute, texts, truth

LOADING = "each rank loads its own shards, and all start from equal weights"
SHARDINGS = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")
# torch's FSDP 1 without a policy wraps modules of so many parameters.
SIZE_WITHOUT_A_NUMBER = 100_000_000


def put_sharding(key: Key, name: str) -> None:
    """A sharding strategy of FSDP, by its name or its number in torch."""
    plain = str(name).lower()
    if plain.isdigit() and 1 <= int(plain) <= len(SHARDINGS):
        plain = SHARDINGS[int(plain) - 1]
    if plain not in SHARDINGS:
        key.not_carried(f"{name} is not a sharding strategy of FSDP; they are {', '.join(SHARDINGS)}")
        return
    says = "weights are resharded after the forward pass, unlike ZeRO 2" if plain.endswith("_zero2") else ""
    key.become("parallel.strategy", "fsdp")
    key.become("parallel.sharding", plain.removesuffix("_zero2"), says)


@rule("parallel.sharding")
def _sharding(key: Key) -> None:
    put_sharding(key, str(key.value))


@rule("parallel.strategy", "parallel.sharding", "parallel.offload", says="full_shard, auto_wrap, offload and others")
def fsdp_words(key: Key) -> None:
    """The value of `fsdp`: words, or true."""
    if isinstance(key.value, bool):
        key.become("parallel.strategy", "fsdp") if key.value else key.no_meaning("off")
        return
    words = [word.lower() for word in texts(key.value)]
    if not words:
        key.no_meaning("off: not FSDP")
    for word in words:
        if word in SHARDINGS:
            put_sharding(key, word)
        elif word == "offload":
            key.become("parallel.strategy", "fsdp")
            key.become("parallel.offload", "cpu")
        elif word == "auto_wrap":
            key.become("parallel.strategy", "fsdp", "each transformer layer is a unit, unless fsdp_config has a policy")
        else:
            key.not_carried(f"{word} is not an option of FSDP that shoal knows")


def _of_block(key: Key, name: str) -> Any:
    block = key.name.rpartition(".")[0]
    return next(
        (v for prefix in ("fsdp_", "") if (v := key.get(f"{block}.{prefix}{name}".lstrip("."))) is not None), None
    )


@rule("parallel.wrap.min_params", "parallel.wrap.classes", says="SIZE_BASED_WRAP, TRANSFORMER_BASED_WRAP, NO_WRAP")
def _wrap(key: Key) -> None:
    """Any of the three keys that say which modules are FSDP units."""
    policy = str(_of_block(key, "auto_wrap_policy") or "").upper()
    classes = _of_block(key, "transformer_layer_cls_to_wrap") or _of_block(key, "transformer_layer_cls")
    size = _of_block(key, "min_num_params") or 0
    about = key.last.removeprefix("fsdp_")
    if policy not in ("", "SIZE_BASED_WRAP", "TRANSFORMER_BASED_WRAP", "NO_WRAP"):
        key.not_carried(f"{policy} is not a policy of FSDP that shoal knows")
    elif policy == "NO_WRAP":
        key.not_carried("one FSDP unit for the whole model is not built; each transformer layer is one")
    elif policy == "SIZE_BASED_WRAP" or (not policy and count(size) > 0 and not classes):
        if about.startswith("transformer_layer"):
            key.no_meaning("SIZE_BASED_WRAP decides")
        else:
            key.become("parallel.wrap", {"min_params": count(size) or SIZE_WITHOUT_A_NUMBER})
    elif about == "min_num_params":
        key.no_meaning("modules are wrapped by class" if count(size) else "0: not by size")
    elif classes:
        key.become("parallel.wrap", {"classes": texts(classes)})
    else:
        key.become("parallel.wrap", "auto", "each transformer layer")


@rule("parallel.prefetch")
def _forward_prefetch(key: Key) -> None:
    if truth(key.value):
        key.become("parallel.prefetch", 1)
    else:
        key.no_meaning("off")


@rule("parallel.prefetch", says="BACKWARD_PRE is what FSDP2 does")
def _backward_prefetch(key: Key) -> None:
    if str(key.value).lower() in ("backward_pre", "1"):
        key.no_meaning("FSDP2 always all-gathers one unit ahead in the backward pass")
    else:
        key.not_carried("FSDP2 always all-gathers one unit ahead in the backward pass")


@rule("parallel.reshard", says="names of sharding strategies too")
def _reshard(key: Key) -> None:
    if str(key.value).lower() in SHARDINGS:
        put_sharding(key, str(key.value))
    elif isinstance(key.value, int) and not isinstance(key.value, bool):
        key.become("parallel.reshard", key.value)
    else:
        key.become("parallel.reshard", truth(key.value))


@rule("train.recompute")
def _offload_activations(key: Key) -> None:
    key.become("train.recompute", "offload") if truth(key.value) else key.no_meaning("off")


@rule("checkpoint.format")
def _state_dict_type(key: Key) -> None:
    kind = str(key.value).lower().removesuffix("_state_dict")
    if kind in ("full", "sharded"):
        key.become("checkpoint.format", kind)
    else:
        key.not_carried(f"checkpoints are sharded or full, not {kind}")


@rule("parallel.offload")
def _offload(key: Key) -> None:
    wanted = key.value
    if isinstance(wanted, dict):
        wanted = any(wanted.values())
    if truth(wanted):
        key.become("parallel.offload", "cpu")
    else:
        key.no_meaning("off")


def _table() -> dict[str, Rule]:
    found = {
        "sharding_strategy": _sharding,
        "auto_wrap_policy": _wrap,
        "min_num_params": _wrap,
        "transformer_layer_cls_to_wrap": _wrap,
        "transformer_layer_cls": _wrap,
        "forward_prefetch": _forward_prefetch,
        "backward_prefetch": _backward_prefetch,
        "backward_prefetch_policy": _backward_prefetch,
        "reshard_after_forward": _reshard,
        "state_dict_type": _state_dict_type,
        "final_state_dict_type": _state_dict_type,
        "offload_params": _offload,
        "cpu_offload": _offload,
        "activation_checkpointing": Rule(put_recompute, ("train.recompute",), "full, or none"),
        "activation_cpu_offload": cannot("train.recompute: offload keeps the inputs of blocks in host memory", "x")[
            "x"
        ],
        "activation_checkpointing_offload": _offload_activations,
        **nothing("train.precision decides", "mixed_precision_policy"),
        **nothing("host memory is pinned where there is a GPU", "cpu_offload_pin_memory"),
        **nothing("parallel.prefetch is the limit on all-gathers in flight", "limit_all_gathers"),
        **nothing(LOADING, "sync_module_states cpu_ram_efficient_loading"),
        **nothing("FSDP2 always keeps the original parameters", "use_orig_params"),
        **nothing("shoal uses FSDP2", "version fsdp_version"),
        **cannot("TPUs are not supported", "xla xla_fsdp_v2 xla_fsdp_grad_ckpt xla_fsdp_settings"),
        **cannot("its modules are sharded like all others; model.freeze freezes parameters", "ignored_modules"),
    }
    prefixed = {f"fsdp_{name}": one for name, one in found.items() if not name.startswith("fsdp")}
    return found | prefixed


FSDP_KEYS = _table()
assert our_key(["sharding_strategy"]) is not None, "the words are those of config/foreign_keys.py"
