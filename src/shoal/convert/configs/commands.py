"""A command line as sources: the launchers around it, and the system whose command it is."""

import re
from pathlib import Path, PurePath
from typing import Any

from shoal.config.locate import parse_document
from shoal.convert.configs.axolotl import AXOLOTL
from shoal.convert.configs.hydra import HYDRA
from shoal.convert.configs.launchers import LAUNCHER
from shoal.convert.configs.litgpt import LITGPT
from shoal.convert.configs.litgpt_rules import COMMAND
from shoal.convert.configs.llamafactory import LLAMAFACTORY
from shoal.convert.configs.llamafactory import OWN as OF_LLAMAFACTORY
from shoal.convert.configs.rules import MISSING_FILE, Source, Tree
from shoal.convert.configs.scmodelforge import SCMODELFORGE
from shoal.convert.configs.shell import Script, batch_options, read_script
from shoal.convert.configs.torchtune import TORCHTUNE
from shoal.convert.configs.trainer import SCRIPT, TRAINER, TRL
from shoal.mistakes import UserMistake

LAUNCHERS = (
    "torchrun",
    "accelerate",
    "deepspeed",
    "srun",
    "mpirun",
    "python",
    "python3",
    "exec",
    "time",
    "nohup",
    "uv",
)
TASKS = ("sft", "dpo", "orpo", "kto", "cpo", "reward", "grpo", "rloo", "ppo")
COMMANDS = ("litgpt", "trl", "axolotl", "tune", "scmodelforge", "llamafactory-cli", "lmf")
# Options without a value; all others of a launcher have one.
WITHOUT_VALUE = {
    "torchrun": ("standalone", "no_python", "run_path", "m", "module"),
    "accelerate": (
        "multi_gpu",
        "use_fsdp",
        "use_deepspeed",
        "cpu",
        "tpu",
        "m",
        "module",
        "quiet",
        "debug",
        "same_network",
        "no_python",
        "use_megatron_lm",
        "use_parallelism_config",
        "use_xpu",
        "mps",
    ),
    "deepspeed": (
        "no_python",
        "module",
        "m",
        "no_local_rank",
        "force_multi",
        "save_pid",
        "bind_cores_to_rank",
        "no_ssh",
    ),
}
KNOWN = (
    "litgpt, trl, axolotl, tune, llamafactory-cli, scmodelforge, torchrun, accelerate launch, deepspeed, srun, "
    "python SCRIPT.py"
)
# ms-swift's flags: many have the names of the Trainer's or of LLaMA-Factory's, and none the defaults.
OF_SWIFT = frozenset({"sft_type", "train_type", "tuner_type", "tuner_backend", "template_type", "model_id_or_path"})
_DEEPSPEED_FLAGS = (
    "zero_stage",
    "offload_optimizer_device",
    "offload_param_device",
    "deepspeed_config_file",
    "gradient_clipping",
    "zero3_init_flag",
    "zero3_save_16bit_model",
)


class NotTranslated(UserMistake):
    """A command of another kind, beside which a script may have one that is translated."""


def value_of(text: str) -> Any:
    """A word of a command as YAML reads it; text that is not YAML stays text."""
    try:
        return parse_document(text, "the command", with_lines=False).value
    except UserMistake:
        return text


def read_flags(words: list[str]) -> tuple[list[str], Tree]:
    """The words before the first flag, and the flags by name; one without a value is true."""
    positional: list[str] = []
    flags: Tree = {}
    name = ""
    for word in words:
        flag = re.fullmatch(r"--?([A-Za-z][\w.-]*)(?:=(.*))?", word, re.DOTALL)
        if flag is not None:
            name = flag[1].replace("-", "_")
            _put(flags, name, True if flag[2] is None else value_of(flag[2]))
            if flag[2] is not None:
                name = ""
        elif name:
            before = _get(flags, name)
            value = value_of(word)
            _put(flags, name, value if before is True else [*(before if isinstance(before, list) else [before]), value])
        else:
            positional.append(word)
    for switched in [one for one in flags if one.startswith("no_") and flags[one] is True]:
        flags[switched.removeprefix("no_")] = not flags.pop(switched)
    return positional, flags


def _put(tree: Tree, name: str, value: Any) -> None:
    *blocks, last = name.split(".")
    for block in blocks:
        inner = tree.setdefault(block, {})
        if not isinstance(inner, dict):
            # LitGPT: --data JSON --data.json_path FILE, --optimizer AdamW --optimizer.lr 1e-4
            inner = tree[block] = {"class_path": inner}
        tree = inner
    if isinstance(tree.get(last), dict) and not isinstance(value, dict):
        tree[last]["class_path"] = value
    else:
        tree[last] = value


def _get(tree: Tree, name: str) -> Any:
    found: Any = tree
    for part in name.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found.get("class_path", found) if isinstance(found, dict) else found


def read_command(text: str, name: str, folder: Path) -> list[Source]:
    """The sources in a command line or a script."""
    script = read_script(text)
    launcher: Tree = {}
    if script.options:
        launcher["sbatch"] = dict(script.options)
    if script.environment:
        launcher["env"] = dict(script.environment)
    if script.setup:
        launcher["setup"] = script.setup
    found: list[Source] = []
    other: dict[str, UserMistake] = {}
    for command in script.commands:
        try:
            found += _one_command(command, name, folder, launcher)
        except NotTranslated as mistake:
            other.setdefault(" ".join(command[:2]), mistake)
    if other and not found and not launcher.keys() - {"env", "setup"}:
        raise next(iter(other.values()))
    if other:
        launcher["commands"] = list(other)
    if launcher:
        found.insert(0, Source(name, LAUNCHER, launcher, str(folder)))
    return found


def looks_like_a_command(script: Script) -> bool:
    """Whether a text is a batch script or a command that we know."""
    return bool(script.options) or any(_starts(command) for command in script.commands)


def _starts(command: list[str]) -> bool:
    first = PurePath(command[0]).name if command else ""
    return first in (*LAUNCHERS, *COMMANDS, "shoal") or first.endswith(".py")


def _one_command(words: list[str], name: str, folder: Path, launcher: Tree) -> list[Source]:
    words = list(words)
    while words:
        first = PurePath(words[0]).name
        if first in ("exec", "time", "nohup", "env") or re.fullmatch(r"[A-Za-z_]\w*=\S*", words[0]):
            words.pop(0)
        elif first in ("uv", "poetry", "pdm") and words[1:2] == ["run"]:
            words = words[2:]
        elif first == "srun" or first in ("mpirun", "mpiexec"):
            words, options = _srun(words[1:])
            launcher["srun"] = options or True
        elif first == "torchrun" or (
            first.startswith("python")
            and words[1:3] in (["-m", "torch.distributed.run"], ["-m", "torch.distributed.launch"])
        ):
            words = _launched(words[1 if first == "torchrun" else 3 :], "torchrun", launcher)
        elif first == "accelerate" and words[1:2] == ["launch"]:
            words = _launched(words[2:], "accelerate", launcher)
        elif first == "deepspeed":
            words = _launched(words[1:], "deepspeed", launcher)
        elif first.startswith("python") and len(words) > 1:
            words = words[2:] if words[1] == "-m" else words[1:]
        else:
            return _system(words, name, folder, launcher)
    return []


def _srun(words: list[str]) -> tuple[list[str], str]:
    at = 0
    while at < len(words) and words[at].startswith("-"):
        takes = "=" not in words[at] and (
            re.fullmatch(r"-[A-Za-z]", words[at]) or words[at] in ("--ntasks", "--nodes", "--gpus")
        )
        at += 2 if takes else 1
    return words[at:], " ".join(words[:at]) if batch_options(" ".join(words[:at])) else ""


def _launched(words: list[str], launcher: str, tree: Tree) -> list[str]:
    """Read a launcher's own options; returns the command that it starts."""
    block = tree.setdefault(launcher, {})
    while words and words[0].startswith("-"):
        option, equals, value = words.pop(0).lstrip("-").replace("-", "_", 9).partition("=")
        if equals:
            read = value_of(value)
        elif option in WITHOUT_VALUE[launcher] or not words:
            read = True
        else:
            read = value_of(words.pop(0))
        if option in ("m", "module", "no_python"):
            continue
        option = {"config": "config_file"}.get(option, option) if launcher == "accelerate" else option
        if launcher == "accelerate" and option.startswith(("fsdp_", "parallelism_config_")):
            name = "fsdp_config" if option.startswith("fsdp_") else "parallelism_config"
            block.setdefault(name, {})[option] = read
        elif launcher == "accelerate" and option in _DEEPSPEED_FLAGS:
            block.setdefault("deepspeed_config", {})[option] = read
        else:
            block[option] = read
    if not block:
        del tree[launcher]
    return words


def _system(words: list[str], name: str, folder: Path, launcher: Tree) -> list[Source]:
    """The system whose command this is, with the files that it names before it."""
    first, rest = words[0], words[1:]
    program = PurePath(first).name.removesuffix(".py")
    where = str(folder)
    if first == "shoal":
        raise UserMistake(f"{name} is a command of shoal already.")
    if program == "litgpt" and rest:
        return [Source(name, LITGPT, _litgpt(rest, folder), where)]
    if program == "trl" or first.startswith(("trl.", "trl/scripts/")) or program in TASKS:
        task = program if program in TASKS else first.rpartition(".")[2] if first.startswith("trl.") else rest.pop(0)
        _, flags = read_flags(rest)
        config = flags.pop("config", None)
        found = _from_file(config, folder) if config else {}
        return [Source(name, TRL, {**found, **flags, "trl_task": task}, where)]
    if program == "axolotl" or first.startswith("axolotl.cli"):
        files, flags = read_flags([word for word in rest if word not in ("train", "preprocess")])
        return [Source(name, AXOLOTL, {**_from_file(files[0] if files else None, folder), **flags}, where)]
    if program in ("llamafactory-cli", "lmf"):
        positional, flags = read_flags([word for word in rest if word != "train"])
        given: Tree = {}
        for word in positional:
            option, equals, value = word.partition("=")
            given |= {option: value_of(value)} if equals else _from_file(word, folder)
        return [Source(name, LLAMAFACTORY, {**given, **flags}, where)]
    if program == "tune":
        return [Source(name, TORCHTUNE, _tune(rest, folder, launcher), where)]
    if program == "scmodelforge":
        _, flags = read_flags([word for word in rest if word not in ("train", "finetune")])
        return [Source(name, SCMODELFORGE, _from_file(flags.pop("config", None), folder) | flags, where)]
    if not first.endswith(".py") and "." not in first:
        if not (launcher.get("sbatch") or launcher.get("torchrun") or launcher.get("accelerate")):
            raise NotTranslated(f"{name} starts {first}, which is not a command that shoal translates: {KNOWN}.")
        return []
    return _script(rest, name, folder)


def _script(words: list[str], name: str, folder: Path) -> list[Source]:
    """A script of the user, by its flags: those of the Trainer, Hydra's overrides, or a file of arguments."""
    positional, flags = read_flags(words)
    overrides: Tree = {}
    for word in [one for one in positional if "=" in one]:
        key, _, value = word.partition("=")
        _put(overrides, key.lstrip("+~"), value_of(value))
    found: list[Source] = []
    if overrides:
        found.append(Source(name, HYDRA, overrides, str(folder)))
    for file in [one for one in positional if one.endswith((".json", ".yaml", ".yml"))]:
        flags = _from_file(file, folder) | flags
    trains = len(TRAINER.marks & flags.keys()) >= 2 and "output_dir" in flags and not OF_SWIFT & flags.keys()
    if flags:
        factory = trains and len(OF_LLAMAFACTORY.keys() & flags.keys()) >= 2
        system = LLAMAFACTORY if factory else TRAINER if trains else SCRIPT
        found.append(Source(name, system, flags, str(folder)))
    return found


def _litgpt(words: list[str], folder: Path) -> Tree:
    command, rest = words[0], words[1:]
    if command == "finetune" and rest[:1] in (["lora"], ["full"]):
        command, rest = f"finetune_{rest[0]}", rest[1:]
    positional, flags = read_flags(rest)
    tree = _merged(_from_file(flags.pop("config", None), folder), flags)
    if positional:
        tree["model_name" if command == "pretrain" else "checkpoint_dir"] = positional[0]
    return {COMMAND: command, **litgpt_tree(tree)}


def litgpt_tree(tree: Tree) -> Tree:
    """The data module and the optimizer in the form of LitGPT's YAML: a class, and its arguments."""
    tree = dict(tree)
    if isinstance(tree.get("data"), str):
        tree["data"] = {"class_path": tree["data"]}
    if isinstance(data := tree.get("data"), dict):
        given = {key: value for key, value in data.items() if key not in ("class_path", "init_args")}
        tree["data"] = {key: data[key] for key in ("class_path",) if key in data}
        tree["data"]["init_args"] = {**(data.get("init_args") or {}), **given}
    return tree


def _tune(words: list[str], folder: Path, launcher: Tree) -> Tree:
    words = words[1:] if words[:1] == ["run"] else words
    rest = _launched(words, "torchrun", launcher)
    recipe = rest[0] if rest else ""
    positional, flags = read_flags(rest[1:])
    values = flags.pop("config", None)
    config = values[0] if isinstance(values, list) else values
    positional += [str(one) for one in values[1:]] if isinstance(values, list) else []
    tree = _from_file(config, folder) if config else {}
    for word in positional:
        key, _, value = word.partition("=")
        _put(tree, key, value_of(value))
    return {"torchtune_recipe": recipe, **tree, **flags}


def _from_file(name: Any, folder: Path) -> Tree:
    """The keys of a file that a command names; without it, the command alone is translated and says so."""
    if name is None:
        return {}
    path = folder / str(name)
    if not path.is_file():
        return {MISSING_FILE: str(name)}
    value = parse_document(path.read_text(encoding="utf-8"), str(path)).value
    if not isinstance(value, dict):
        raise UserMistake(f"{path} holds no keys with values.")
    return value


def _merged(below: Tree, above: Tree) -> Tree:
    found = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(found.get(key), dict)
        found[key] = _merged(found[key], value) if both else value
    return found
