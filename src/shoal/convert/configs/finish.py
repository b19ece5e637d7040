"""What follows from all sources together: the batch, the devices, the schedule; and what our config refuses."""

from collections.abc import Iterator

from pydantic import ValidationError

from shoal.config.combinations import find_combinations
from shoal.config.explain import problems
from shoal.config.locate import KeyPath, Origins
from shoal.config.schema import Config
from shoal.config.shorthand import expand_tree
from shoal.config.unbuilt import find_unbuilt
from shoal.config.words import dotted
from shoal.convert.configs.draft import MIN_LR, WORLD, Draft

MOST_ROUNDS = 20


def finish(draft: Draft) -> None:
    """Turn facts into keys, and take back what the config refuses."""
    _devices(draft)
    _length(draft)
    _batch(draft)
    _lowest_rate(draft)
    _adapter(draft)
    _single(draft)
    for _ in range(MOST_ROUNDS):
        refused = list(_refused(draft))
        if not refused:
            return
        for path, sentence in refused:
            _take_back(draft, path, sentence)
    raise AssertionError(f"the translation does not become valid: {refused}")


def _devices(draft: Draft) -> None:
    world = draft.get(WORLD)
    if world is None:
        return
    nodes, devices = draft.get("hardware.nodes", 1), draft.get("hardware.devices")
    if isinstance(devices, int):
        if devices * nodes != world:
            given = draft.values[WORLD]
            draft.contradictions.append(
                f"{given.source} has {given.key}: {given.value} in all, and hardware.devices {devices} × nodes {nodes} "
                f"is {devices * nodes}; the latter is used."
            )
        draft.turn(WORLD, "hardware.devices", devices)
    elif world % nodes:
        draft.drop(WORLD, f"{world} devices cannot be divided over {nodes} nodes: set hardware.devices")
    else:
        draft.turn(WORLD, "hardware.devices", world // nodes, f"{world} / {nodes} nodes" if nodes > 1 else "")


def _length(draft: Draft) -> None:
    """Steps go before tokens, and tokens before epochs, as in the systems that have several."""
    given = [key for key in ("train.steps", "train.tokens", "train.epochs") if key in draft.values]
    # What was given goes before a default.
    given.sort(key=lambda key: draft.values[key].default)
    for key in given[1:]:
        draft.drop(key, f"{given[0]} decides the length of the run")


def _batch(draft: Draft) -> None:
    micro, accum, batch = (draft.get(f"train.{key}") for key in ("micro_batch", "grad_accum", "global_batch"))
    devices, nodes = draft.get("hardware.devices"), draft.get("hardware.nodes", 1)
    if draft.get("parallel.strategy") == "single":
        devices = 1
    replicas = None
    if isinstance(devices, int):
        inside = 1
        for key in ("tp", "pp", "cp"):
            inside *= int(draft.get(f"parallel.{key}", 1))
        replicas = devices * nodes // inside if devices * nodes % inside == 0 else None
    keys = [f"train.{key}" for key in ("micro_batch", "grad_accum", "global_batch")]
    given = [draft.values[key].default for key in keys if key in draft.values]
    if given == [False, False, True]:
        draft.drop("train.global_batch", "the batch per device and the accumulation are given")
        batch = None
    if batch is not None:
        if replicas is not None and micro is not None and batch % (micro * replicas):
            draft.remarks.append(
                f"train.global_batch {batch} is not a multiple of train.micro_batch {micro} × {replicas} data-parallel "
                "devices: shoal plan names the nearest that are."
            )
        if accum is None:
            return
        if replicas is not None and micro is None and batch % (accum * replicas) == 0:
            micro = batch // (accum * replicas)
            draft.turn("train.grad_accum", "train.micro_batch", micro, f"{batch} / {accum} / {replicas} devices")
            return
        if replicas is not None and micro is not None:
            if micro * accum * replicas == batch:
                draft.turn("train.grad_accum", "train.global_batch", batch, f"{micro} × {accum} × {replicas} devices")
                return
            draft.contradictions.append(
                f"A batch of {batch} is not {micro} per device × {accum} accumulation steps × {replicas} devices = "
                f"{micro * accum * replicas}; train.global_batch {batch} is used."
            )
        draft.drop("train.grad_accum", f"follows from train.global_batch {batch}, train.micro_batch and the devices")
    elif micro is None:
        if accum is not None:
            if draft.values["train.grad_accum"].default:
                draft.drop("train.grad_accum", "the batch per device is not known")
            else:
                draft.drop(
                    "train.grad_accum",
                    f"needs the batch per device, which is not given: set train.micro_batch and "
                    f"train.grad_accum: {accum}",
                )
    elif replicas is None:
        draft.values.setdefault("train.grad_accum", draft.values["train.micro_batch"].with_value(1))
    else:
        total = micro * (accum or 1) * replicas
        says = f"{micro} per device × {accum or 1} × {replicas} devices"
        if accum is None:
            draft.values["train.global_batch"] = draft.values["train.micro_batch"].with_value(total)
            draft.remarks.append(f"train.global_batch is {total}: {says}.")
        else:
            draft.turn("train.grad_accum", "train.global_batch", total, says)


def _lowest_rate(draft: Draft) -> None:
    lowest, rate = draft.get(MIN_LR), draft.get("train.lr")
    if lowest is None:
        return
    if rate is None or lowest > rate:
        draft.drop(MIN_LR, "train.schedule.min_ratio is a share of the learning rate, which is not given or smaller")
    else:
        draft.values.pop("train.schedule.min_ratio", None)
        draft.turn(MIN_LR, "train.schedule.min_ratio", round(lowest / rate, 6), f"{lowest:g} / {rate:g}")


def _adapter(draft: Draft) -> None:
    """Options of an adapter without one would be refused or without effect."""
    if draft.get("adapter.kind", "none") == "none":
        told = "adapter.kind" in draft.values
        why = (
            "no adapter is trained"
            if told
            else "nothing says that an adapter is trained; if one is, set adapter.kind too"
        )
        for key in [key for key in draft.values if key.startswith("adapter.") and key != "adapter.kind"]:
            draft.drop(key, why)
    elif draft.get("adapter.kind") == "lora" and "adapter.quantize" in draft.values:
        draft.drop("adapter.quantize", "adapter.kind is lora, on weights that are not quantized")


def _single(draft: Draft) -> None:
    """One device needs no strategy; several do not go with `single`."""
    devices = draft.get("hardware.devices")
    many = isinstance(devices, int) and devices * draft.get("hardware.nodes", 1) > 1
    if draft.get("parallel.strategy") == "single" and many:
        draft.drop("parallel.strategy", f"{devices} devices per node need another strategy: auto is used")


def _refused(draft: Draft) -> Iterator[tuple[KeyPath, str]]:
    """The keys that our config refuses, each with a sentence."""
    tree = expand_tree(draft.tree())
    try:
        config = Config.model_validate(tree, context={"needs_model": False})
    except ValidationError as error:
        yield from problems(error, tree, Origins())
        return
    yield from find_unbuilt(config)
    yield from ((tuple(key.split(".")), sentence) for key, sentence in find_combinations(config))


def _take_back(draft: Draft, path: KeyPath, sentence: str) -> None:
    key = dotted(tuple(part for part in path if not isinstance(part, int)))
    sentence = sentence.rstrip(".")
    inside = [one for one in draft.values if one == key or one.startswith(f"{key}.")]
    # A default of ours may not go with what was translated: then it is the key that the sentence names.
    named = [one for one in draft.values if f"{one} " in f"{sentence} "]
    while not inside and not named and key:
        key = key.rpartition(".")[0]
        inside = [one for one in draft.values if one == key or one.startswith(f"{key}.")]
    if not inside and not named:
        raise AssertionError(f"the translation has a mistake that belongs to no key: {sentence}")
    for one in inside or named[:1]:
        draft.drop(one, sentence)
