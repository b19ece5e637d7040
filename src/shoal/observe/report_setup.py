"""What was trained on what: the model, the data, the devices and the settings of a run."""

from typing import Any

from shoal.observe import figures
from shoal.observe.html import Child, Html, definitions, join, section
from shoal.observe.run_reader import RunRecord, look_up, number


def setup(run: RunRecord) -> Html:
    """What was trained on what."""
    chosen, data = (run.planned(name) or {} for name in ("chosen", "data"))
    accumulation = number(look_up(chosen, "grad_accum_steps"))
    batch = [
        f"{figures.count(number(look_up(chosen, 'global_batch')))} {'samples' if run.custom else 'sequences'}"
        if chosen
        else None,
        f"micro-batch {look_up(chosen, 'micro_batch')}" if chosen else None,
        figures.counted(int(accumulation), "gradient accumulation step") if accumulation else None,
    ]
    schedule, optimizer = run.get("train", "schedule") or {}, run.get("train", "optimizer") or {}
    language: list[tuple[str, Child]] = [
        ("Adapter", _adapter(run)),
        ("Objective", objective(run)),
        ("Data", _data_name(run)),
        ("Tokens of the data", _data_size(data)),
        ("Sequence length", figures.count(number(run.get("data", "max_length"))) if run.config else None),
    ]
    updates: list[tuple[str, Child]] = [
        ("Optimizer", _listed(look_up(optimizer, "name"), _named("weight decay", look_up(optimizer, "weight_decay")))),
        (
            "Learning rate",
            _listed(run.get("train", "lr"), look_up(schedule, "name"), _named("warmup", look_up(schedule, "warmup"))),
        ),
    ]
    facts: list[tuple[str, Child]] = [
        ("Model", model_name(run)),
        ("Parameters", figures.count(number(run.plan.get("parameters"))) if run.plan.get("parameters") else None),
        *([("Objective", objective(run))] if run.custom else language),
        ("Batch", _listed(*batch)),
        *([] if run.custom else updates),
        ("Precision", run.get("train", "precision")),
        ("Strategy", _strategy(chosen)),
        ("Activation checkpointing", _text(look_up(chosen, "recompute"))),
        ("Devices", devices(run)),
        ("Versions", _versions(run)),
        ("Seed", _text(run.get("seed"))),
    ]
    return section("setup", "What was trained on what", definitions(facts))


def objective(run: RunRecord) -> str | None:
    """What is learnt."""
    return "custom loop" if run.custom else _text(run.get("train", "objective"))


def model_name(run: RunRecord) -> str:
    """The weights or the shape that the run starts from."""
    shape = run.get("model", "shape")
    if isinstance(start := run.get("model", "from"), str):
        return start
    if isinstance(shape, dict):
        return f"{shape.get('family', 'model')}, hidden {shape.get('hidden')}, {shape.get('layers')} layers"
    return str(shape) if shape else ""


def _adapter(run: RunRecord) -> str | None:
    kind = run.get("adapter", "kind")
    return (
        None
        if kind in (None, "none")
        else f"{kind}, rank {run.get('adapter', 'rank')}, alpha {run.get('adapter', 'alpha')}"
    )


def _data_name(run: RunRecord) -> str | None:
    source = run.get("data", "source")
    if isinstance(source, list):
        return ", ".join(str(look_up(one, "path") or look_up(one, "source")) for one in source)
    return join([str(one) for one in (source, run.get("data", "path")) if one], ": ") or None


def _data_size(data: Any) -> str | None:
    tokens, sequences, share = (number(look_up(data, name)) for name in ("tokens", "sequences", "loss_token_share"))
    if tokens is None:
        return None
    parts = [figures.count(tokens), f"in {figures.count(sequences)} sequences" if sequences else None]
    if share is not None and share < 1:
        parts.append(f"of which {figures.percent(share)} are loss tokens")
    return " ".join(part for part in parts if part)


def _strategy(chosen: Any) -> str | None:
    mesh = look_up(chosen, "mesh")
    axes = [f"{name} {size}" for name, size in mesh.items() if size != 1] if isinstance(mesh, dict) else []
    name = look_up(chosen, "strategy")
    return None if name is None else f"{name} ({', '.join(axes)})" if axes else str(name)


def devices(run: RunRecord) -> str | None:
    """'8 × NVIDIA H100'."""
    world, device = number(run.planned("chosen", "world_size")), run.planned("machine", "device")
    return None if world is None or device is None else f"{world:.0f} × {device}"


def _versions(run: RunRecord) -> str | None:
    found = run.planned("versions")
    return ", ".join(f"{name} {version}" for name, version in found.items()) if isinstance(found, dict) else None


def _listed(*parts: object) -> str:
    return ", ".join(str(part) for part in parts if part is not None)


def _named(name: str, value: object) -> str | None:
    return None if value is None else f"{name} {value}"


def _text(value: object) -> str | None:
    return None if value is None else str(value)
