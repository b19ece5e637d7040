"""Which system a file or a command belongs to."""

import json
import re
from pathlib import Path
from typing import Any

from shoal.config.locate import parse_document
from shoal.config.schema import every_key
from shoal.convert.configs.accelerate import ACCELERATE
from shoal.convert.configs.axolotl import AXOLOTL
from shoal.convert.configs.commands import KNOWN, litgpt_tree, looks_like_a_command, read_command
from shoal.convert.configs.deepspeed import DEEPSPEED
from shoal.convert.configs.hydra import HYDRA
from shoal.convert.configs.lightning import LIGHTNING, lightning_tree
from shoal.convert.configs.litgpt import LITGPT
from shoal.convert.configs.litgpt_rules import COMMAND
from shoal.convert.configs.llamafactory import LLAMAFACTORY
from shoal.convert.configs.rules import Source, System, Tree, at, keys_in
from shoal.convert.configs.scmodelforge import SCMODELFORGE
from shoal.convert.configs.shell import read_script
from shoal.convert.configs.torchtune import TORCHTUNE
from shoal.convert.configs.trainer import TRAINER, TRL
from shoal.mistakes import UserMistake

# In the order in which values are given: DeepSpeed's own file is what DeepSpeed runs with.
SYSTEMS: tuple[System, ...] = (
    *(ACCELERATE, TRAINER, TRL, LLAMAFACTORY, HYDRA, LITGPT, LIGHTNING, SCMODELFORGE, AXOLOTL, TORCHTUNE, DEEPSPEED),
)
BY_FILE = tuple(system for system in SYSTEMS if system is not TRL)
SUFFIXES = (".json", ".yaml", ".yml")
SCRIPTS = (".sh", ".sbatch", ".slurm")
LARGEST = 10_000_000  # bytes of a config
_OURS = frozenset(key for key, _ in every_key() if "." in key)
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")


def is_config(path: Path) -> bool:
    """Whether a path is to be read as a config or a script, and not as weights."""
    if not path.is_file() or path.suffix in (".pth", ".pt", ".bin", ".ckpt", ".safetensors", ".gguf"):
        return False
    if path.name in ("pytorch_model.bin.index.json", "latest"):
        return False
    return path.suffix in (*SUFFIXES, *SCRIPTS, ".txt", "") and path.stat().st_size <= LARGEST


def read_source(path: Path) -> list[Source]:
    """The sources in a file: a config of one system, or a script with commands."""
    try:
        text = path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError) as error:
        raise UserMistake(f"{path} is not a text file in UTF-8 ({type(error).__name__}).") from None
    if path.suffix not in SUFFIXES and looks_like_a_command(read_script(text)):
        return read_command(text, str(path), path.parent)
    if path.suffix in SCRIPTS:
        raise UserMistake(f"{path} is a script without a command that shoal translates: {KNOWN}.")
    tree = lightning_tree(_parse(path, text))
    system = _system_of(path, tree)
    if system is TORCHTUNE and not {"dataset", "optimizer", "loss", "batch_size"} & tree.keys():
        raise UserMistake(
            f"{path} is a torchtune config of evaluating, generating or quantizing, not of training: shoal eval, "
            "shoal generate, shoal export."
        )
    if system is LITGPT:
        tree = {COMMAND: _litgpt_command(tree), **litgpt_tree(tree)}
    return [Source(str(path), system, tree, str(path.parent))]


def _parse(path: Path, text: str) -> Tree:
    if path.suffix == ".json":
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UserMistake(f"{path} is not valid JSON: {error}.") from None
    else:
        value = parse_document(text, str(path)).value
    if not isinstance(value, dict) or not value:
        raise UserMistake(f"{path} holds no keys with values, and no command that shoal translates.")
    return _resolved(_nested(value))


def _nested(tree: Tree) -> Tree:
    """`trainer.dist: …` as a key inside `trainer`, as in Hydra's overrides."""
    found: Tree = {}
    for key, value in tree.items():
        inner = _nested(value) if isinstance(value, dict) else value
        *blocks, last = (
            str(key).split(".") if re.fullmatch(r"[A-Za-z_][\w-]*(\.[A-Za-z_][\w-]*)+", str(key)) else [str(key)]
        )
        below = found
        for block in blocks:
            below = below.setdefault(block, {})
            if not isinstance(below, dict):
                raise UserMistake(f"The key {key} is inside {block}, which is a value.")
        below[last] = (
            {**below[last], **inner} if isinstance(below.get(last), dict) and isinstance(inner, dict) else inner
        )
    return found


def _resolved(tree: Tree) -> Tree:
    """References to other keys of the same file (`${output_dir}`) replaced; others stay."""

    def resolve(value: Any, depth: int = 0) -> Any:
        if isinstance(value, dict):
            return {key: resolve(inner, depth) for key, inner in value.items()}
        if isinstance(value, list):
            return [resolve(inner, depth) for inner in value]
        if not isinstance(value, str) or depth > 5:
            return value
        whole = _REFERENCE.fullmatch(value)
        if whole is not None:
            found = at(tree, whole[1])
            return value if found is None else resolve(found, depth + 1)

        def replaced(match: re.Match[str]) -> str:
            found = at(tree, match[1])
            return match[0] if found is None or isinstance(found, dict | list) else str(resolve(found, depth + 1))

        return _REFERENCE.sub(replaced, value)

    resolved: Tree = resolve(tree)
    return resolved


def _system_of(path: Path, tree: Tree) -> System:
    keys = keys_in(tree)
    if {"model_class", "train_dataset"} <= keys:
        raise UserMistake(
            f"{path} is of the new version of LLaMA-Factory (USE_V1=1), which shoal does not read; it reads files with "
            "stage, finetuning_type and dataset."
        )
    # First by the keys that no other system has, then by all.
    scores = {system.name: (len(_own_marks(system) & keys), len(system.marks & keys)) for system in BY_FILE}
    system, other = sorted(BY_FILE, key=lambda one: scores[one.name], reverse=True)[:2]
    best, own = scores[system.name][1], scores[system.name][0]
    if best == 0:
        if {"n_layer", "n_embd"} <= keys:
            raise UserMistake(f"{path} describes the model of a LitGPT checkpoint: import its folder, {path.parent}.")
        if _OURS & keys or {"model", "data"} <= keys:
            raise UserMistake(
                f"{path} looks like a config of shoal itself: shoal train {path}, or shoal config show {path}."
            )
        looked = "; ".join(f"{one.name} ({', '.join(sorted(one.marks)[:3])}, …)" for one in BY_FILE)
        raise UserMistake(
            f"{path} is not a config that shoal recognises. It looked for the keys of {looked}. A command is given as "
            "shoal import -- litgpt finetune_lora …"
        )
    if own and scores[other.name][0] == own and other.extends is not system:
        ours, theirs = sorted(_own_marks(system) & keys), sorted(_own_marks(other) & keys)
        raise UserMistake(
            f"{path} is a mixture: {', '.join(ours)} belongs to {system.name}, and "
            f"{', '.join(theirs)} to {other.name}; "
            "give a file of each."
        )
    return system


def _own_marks(system: System) -> frozenset[str]:
    """The marks that are no key, and no block, of another system."""
    others = [one for one in BY_FILE if one is not system and one.extends is not system and one is not system.extends]
    taken = {".".join(key.split(".")[:length]) for one in others for key in one.keys for length in range(1, 5)}
    return frozenset(system.marks - taken)


def _litgpt_command(tree: Tree) -> str:
    """Which command takes this file."""
    if any(key.startswith("lora_") for key in tree):
        return "finetune_lora"
    return "pretrain" if "model_name" in tree or "initial_checkpoint_dir" in tree else "finetune_full"
