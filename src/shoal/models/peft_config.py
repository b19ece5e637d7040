"""PEFT's adapter format: its config file, its names, and a run's config that follows an adapter (`adapter.from`).

Without torch, so that `shoal plan` can read it.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from shoal.config.schema import AdapterConfig, Config
from shoal.mistakes import UserMistake
from shoal.models.hub import local_folder
from shoal.models.read_config import read_json_object

CONFIG, WEIGHTS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
PREFIX = "base_model.model."
# PEFT saves the magnitudes of DoRA as a parameter, and has them as a module, as we do.
MAGNITUDE = ".lora_magnitude_vector"
# Keys of adapter_config.json that change what the adapter computes, and that shoal does not have. Those of newer
# versions of PEFT are null or empty where they are not used.
UNSUPPORTED = (
    *(
        "rank_pattern",
        "alpha_pattern",
        "layer_replication",
        "lora_bias",
        "target_parameters",
        "trainable_token_indices",
    ),
    *("use_qalora", "use_bdlora", "alora_invocation_tokens", "arrow_config", "kasa_config", "monteclora_config"),
)
# Ways to initialize an adapter that leave the base as it is; others, such as pissa, change it too.
PLAIN_STARTS = (True, False, "gaussian", "orthogonal", "eva")


def file_name(parameter: str) -> str:
    """The name in PEFT's file of a parameter of the model."""
    name = parameter.removesuffix(".weight") if parameter.endswith(f"{MAGNITUDE}.weight") else parameter
    return PREFIX + name


def parameter_name(stored: str) -> str:
    """The parameter of the model that a tensor of PEFT's file is."""
    name = stored.removeprefix(PREFIX)
    return f"{name}.weight" if name.endswith(MAGNITUDE) else name


def is_of_adapter(stored: str) -> bool:
    return ".lora_" in stored


def adapter_folder(name: str) -> Path:
    """The folder of `adapter.from`, which holds an adapter in PEFT's format."""
    if (Path(name) / "base.json").is_file():
        raise UserMistake(
            f"adapter.from: {name} is a run; shoal export {name} --adapter writes the folder to give: {name}/adapter."
        )
    folder = local_folder(name, "adapter.from", holds=CONFIG, what="PEFT adapter")
    if not (folder / WEIGHTS).is_file():
        pickled = f" ({PICKLE} is a pickle, which shoal does not read)" if (folder / PICKLE).is_file() else ""
        raise UserMistake(
            f"adapter.from: {folder} holds no {WEIGHTS}{pickled}; save it with save_pretrained of a current PEFT."
        )
    return folder


def follow_adapter(config: Config, before: AdapterConfig | None = None) -> Config:
    """`config` with the rank, alpha, targets and so on of the adapter in `adapter.from`. A key that is set and says
    something else is a UserMistake. `before`: of the run that is resumed, whose values are used without reading the
    folder."""
    adapter = config.adapter
    if adapter.from_ is None or adapter.kind == "none":
        return config
    if before is not None and before.from_ == adapter.from_:
        given = {key: getattr(adapter, key) for key in adapter.model_fields_set}
        return config.model_copy(update={"adapter": before.model_copy(update=given)})
    return config.model_copy(update={"adapter": adapter.model_copy(update=_followed(adapter))})


def _followed(adapter: AdapterConfig) -> dict[str, Any]:
    """The values that follow the files of `adapter.from_`."""
    assert adapter.from_ is not None
    folder = adapter_folder(adapter.from_)
    file = folder / CONFIG
    said = read_json_object(file, "an adapter's config")
    _refuse_unsupported(file, said)
    stored = _stored_names(folder)
    try:
        values = {
            "rank": _number(said, "r", int),
            "alpha": float(_number(said, "lora_alpha", (int, float))),
            "dora": bool(said.get("use_dora", False)),
            "rslora": bool(said.get("use_rslora", False)),
            "targets": _targets(said, stored),
            "train_also": _also(folder, said, stored),
        }
        if "dropout" not in adapter.model_fields_set:  # of training only: the same adapter with any
            values["dropout"] = float(said.get("lora_dropout", 0.0))
        AdapterConfig.model_validate({"kind": adapter.kind, **values})
    except (TypeError, ValueError):
        raise UserMistake(f"adapter.from: {file} is not the config of a LoRA adapter.") from None
    for key, (in_file, theirs) in {
        "rank": ("r", values["rank"]),
        "alpha": ("lora_alpha", values["alpha"]),
        "dora": ("use_dora", values["dora"]),
        "rslora": ("use_rslora", values["rslora"]),
        "targets": ("target_modules", said.get("target_modules")),
        "train_also": ("modules_to_save", said.get("modules_to_save")),
    }.items():
        ours = getattr(adapter, key)
        if key in adapter.model_fields_set and not _same(ours, values[key]) and not _same(ours, theirs):
            raise UserMistake(
                f"adapter.{key} is {_shown(ours)}, but {in_file} in {file} is {_shown(theirs)}; leave adapter.{key} "
                "out."
            )
    return values


def _refuse_unsupported(file: Path, said: Mapping[str, Any]) -> None:
    kind = said.get("peft_type")
    if kind != "LORA":
        raise UserMistake(f"adapter.from: {file} is an adapter of type {kind}, and shoal has LORA only.")
    for key in UNSUPPORTED:
        if said.get(key):
            raise UserMistake(
                f"adapter.from: {file} sets {key}, which shoal does not have; merge that adapter into its base with "
                "PEFT, and use the result as model.from."
            )
    if (bias := said.get("bias", "none")) != "none":
        raise UserMistake(f"adapter.from: {file} has bias {bias}, and shoal has none only; merge it with PEFT first.")
    if (start := said.get("init_lora_weights", True)) not in PLAIN_STARTS:
        raise UserMistake(
            f"adapter.from: {file} has init_lora_weights {start}, which changes the base model too; convert it to a "
            "plain LoRA adapter, with path_initial_model_for_weight_conversion of PEFT."
        )


def _stored_names(folder: Path) -> list[str]:
    try:
        with safe_open(folder / WEIGHTS, framework="np") as file:
            names = sorted(file.keys())
    except (OSError, SafetensorError) as error:
        raise UserMistake(f"{folder / WEIGHTS} is damaged: {error}") from None
    if not any(is_of_adapter(name) for name in names):
        raise UserMistake(f"adapter.from: {folder / WEIGHTS} holds no LoRA matrices.")
    if strange := next((name for name in names if not name.startswith(PREFIX)), None):
        raise UserMistake(f"adapter.from: {folder / WEIGHTS} holds {strange}, which is not a name of PEFT's format.")
    if embedded := next((name for name in names if ".lora_embedding_" in name), None):
        raise UserMistake(
            f"adapter.from: {folder / WEIGHTS} holds {embedded}: LoRA on embeddings, which shoal does not have; merge "
            "that adapter into its base with PEFT, and use the result as model.from."
        )
    return names


def _targets(said: Mapping[str, Any], stored: Iterable[str]) -> tuple[str, ...]:
    """The names that PEFT was given, if it was given a list that means the same here, or else those of the layers."""
    layers = {parameter_name(name).rpartition(".lora_")[0]: None for name in stored if is_of_adapter(name)}
    given = said.get("target_modules")
    if not isinstance(given, list) or said.get("layers_to_transform") is not None or said.get("exclude_modules"):
        return tuple(layers)
    return tuple(sorted(map(str, given)))


def _also(folder: Path, said: Mapping[str, Any], stored: Iterable[str]) -> tuple[str, ...]:
    """The parameters of the base that the file holds: those of `modules_to_save`."""
    listed = said.get("modules_to_save") or []
    found = [parameter_name(name) for name in stored if not is_of_adapter(name)]
    for name in found:
        # A module that PEFT keeps tied to a listed one is not listed.
        if not said.get("ensure_weight_tying") and not any(
            name.rpartition(".")[0].endswith(str(one)) for one in listed
        ):
            raise UserMistake(
                f"adapter.from: {folder / WEIGHTS} holds {name}, which modules_to_save in {folder / CONFIG} does not "
                "list, as after resizing the vocabulary; merge that adapter into its base with PEFT, and use the "
                "result as model.from."
            )
    return tuple(found)


def _number(said: Mapping[str, Any], key: str, kind: Any) -> Any:
    value = said.get(key)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError
    return value


def _same(ours: Any, theirs: Any) -> bool:
    """Whether two values are equal; of lists, in any order, and nothing is an empty list."""
    if isinstance(ours, tuple):
        return isinstance(theirs, list | tuple | None) and set(ours) == set(theirs or ())
    return bool(ours == theirs)


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(sorted(map(str, value)))}]"
    return {None: "null", True: "true", False: "false"}.get(value) or (
        f"{value:g}" if isinstance(value, float) else str(value)
    )
