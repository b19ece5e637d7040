"""Exports the adapter of a run as a folder in PEFT's format: `PeftModel.from_pretrained(base, folder)` loads it."""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from shoal.checkpoint.choose import choose_checkpoint
from shoal.checkpoint.layout import SliceReader
from shoal.checkpoint.state import MODEL
from shoal.config.load import load_config
from shoal.config.run import RunDirectory
from shoal.config.schema import AdapterConfig, Config
from shoal.convert.shards import DTYPES, check_dtype, check_output, temporary_folder
from shoal.files import write_atomically
from shoal.mistakes import UserMistake
from shoal.models.adapters import adapted_layers, adapter_parameters
from shoal.models.base import Base, find_base, prepare_adapted
from shoal.models.hub import is_folder
from shoal.models.peft_config import CONFIG, WEIGHTS, file_name
from shoal.models.prepare import PreparedModel
from shoal.models.read_weights import locate_weights
from shoal.models.stored import Stored
from shoal.models.tensor_slices import whole

# Of the files of a run's model, those that describe the base and not its tokenizer.
OF_THE_BASE = ("config.json", "generation_config.json")

# PEFT's, by the end of the name of the transformers class; masked language models have none.
TASK_TYPES = {"SequenceClassification": "SEQ_CLS", "MaskedLM": None}


def export_adapter(
    run: Path,
    output: Path,
    *,
    step: int | None = None,
    dtype: str | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> Path:
    """Export the adapter of a run's checkpoint (the newest, or that of `step`), with the run's tokenizer."""
    check_dtype(dtype, "export")
    directory, config = adapter_run(run)
    reader = SliceReader(choose_checkpoint(run, step).path)
    base = find_base(directory, config)
    if base.folder is None:
        raise UserMistake(
            f"The base of {run} was drawn from the seed, so there is none for PEFT to load; use shoal merge {run}."
        )
    check_output(output)
    prepared = prepare_adapted(directory, config, base)
    anatomy = prepared.anatomy
    saved = modules_to_save(prepared)
    tensors = _tensors(prepared, base, reader, saved)
    if dtype is not None:
        tensors = {name: one.to(DTYPES[dtype]) for name, one in tensors.items()}
    tokenizer = [path for path in directory.model.iterdir() if path.name not in OF_THE_BASE]
    with temporary_folder(output, tokenizer) as part:
        described = adapter_config(
            prepared.model,
            config.adapter,
            saved,
            _base_name(config, base),
            tied=anatomy.tied and anatomy.embedding in saved,
        )
        write_atomically(part / CONFIG, json.dumps(described, indent=2, sort_keys=True) + "\n")
        try:
            save_file(tensors, part / WEIGHTS, metadata={"format": "pt"})
        except (OSError, SafetensorError) as error:
            raise UserMistake(f"{part / WEIGHTS} cannot be written: {error}.") from None
        report(f"{WEIGHTS}: {len(tensors)} tensors")
    return output


def adapter_run(run: Path) -> tuple[RunDirectory, Config]:
    """The run in this folder and its config; a UserMistake if it did not train an adapter."""
    directory = RunDirectory(run)
    if not directory.exists:
        raise UserMistake(f"{run} is not a run: it has no config.yaml; give the folder of one, such as runs/NAME.")
    config = load_config(directory.config)
    if config.adapter.kind == "none":
        raise UserMistake(f"{run} has no adapter: it trained the model itself; use shoal export {run} --to hf.")
    return directory, config


def adapter_config(
    model: nn.Module, adapter: AdapterConfig, saved: Sequence[str], base: str, *, tied: bool
) -> dict[str, Any]:
    """The contents of PEFT's adapter_config.json. `tied`: a tied weight is among those of `saved`."""
    layers = adapted_layers(model)
    alpha = adapter.alpha
    tying = {"ensure_weight_tying": True} if tied else {}
    return {
        "peft_type": "LORA",
        "task_type": TASK_TYPES.get(type(model).__name__.partition("For")[2], "CAUSAL_LM"),
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": adapter.rank,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "lora_dropout": adapter.dropout,
        "target_modules": target_modules(model, layers),
        "modules_to_save": list(saved) or None,
        "use_rslora": adapter.rslora,
        "use_dora": adapter.dora,
        "fan_in_fan_out": any(not isinstance(layer, nn.Linear) for layer in layers.values()),
        "bias": "none",
        "init_lora_weights": True,
        "rank_pattern": {},
        "alpha_pattern": {},
        "layers_to_transform": None,
        "layers_pattern": None,
        "auto_mapping": None,
        "revision": None,
        **tying,
    }


def target_modules(model: nn.Module, layers: Iterable[str]) -> list[str]:
    """The adapted layers by their last names, as people write them, if PEFT then finds these layers and no others."""
    wanted = set(layers)
    endings = sorted({name.rpartition(".")[2] for name in wanted})
    found = {name for name, _ in model.named_modules() if name.rpartition(".")[2] in endings}
    return endings if found == wanted else sorted(wanted)


def modules_to_save(prepared: PreparedModel) -> list[str]:
    """The modules with parameters of `adapter.train_also`. A tied weight is in two, and PEFT has to replace both."""
    model, adapters = prepared.model, adapter_parameters(prepared.model)
    trained = {id(one) for name, one in model.named_parameters() if one.requires_grad and name not in adapters}
    names = dict.fromkeys(
        name.rpartition(".")[0] for name, one in model.named_parameters(remove_duplicate=False) if id(one) in trained
    )
    if prepared.anatomy.classifies:  # PEFT saves the head as a whole
        inside = f"{prepared.anatomy.backbone}."
        names = dict.fromkeys(name if name.startswith(inside) else name.partition(".")[0] for name in names)
    for name in names:
        if all(id(one) in trained for one in model.get_submodule(name).parameters()):
            continue
        if any(True for _ in model.get_submodule(name).children()):
            raise UserMistake(
                f"adapter.train_also trains a parameter of {name}, which has other layers inside, and PEFT saves whole "
                "modules only; use shoal merge."
            )
    return list(names)


def _tensors(prepared: PreparedModel, base: Base, reader: SliceReader, saved: list[str]) -> dict[str, Tensor]:
    """The tensors of the file. A saved module is complete, and with a grown vocabulary the file has its new rows."""
    model, anatomy = prepared.model, prepared.anatomy
    assert base.folder is not None
    names = list(adapter_parameters(model))
    names += [f"{module}.{name}" for module in saved for name, _ in model.get_submodule(module).named_parameters()]
    if prepared.new_rows:
        modules = (anatomy.embedding,) if anatomy.tied else (anatomy.embedding, anatomy.head)
        names += [f"{module}.weight" for module in modules]
    first = {id(one): name for name, one in model.named_parameters()}
    known = dict(model.named_parameters(remove_duplicate=False))
    trained, frozen = reader.shapes(MODEL), locate_weights(model, Path(base.folder), new_rows=prepared.new_rows)
    found: dict[str, Tensor] = {}
    for name in dict.fromkeys(names):
        listed = first[id(known[name])]
        tensor = reader.read_whole(MODEL + listed) if listed in trained else _read(frozen[listed])
        found[file_name(name)] = tensor.clone()  # a tied weight is written twice
    return found


def _read(stored: Stored) -> Tensor:
    return stored.read(whole(stored.shape))


def _base_name(config: Config, base: Base) -> str:
    """What PEFT loads the base by: an id of the hub as it is, or a folder wherever PEFT is started."""
    name = config.model.from_
    assert name is not None
    assert base.folder is not None
    return base.folder if is_folder(name) else name
