"""Reads a command or a batch script: its options for sbatch, its variables and the commands in it. Nothing is run."""

import re
import shlex
from dataclasses import dataclass, field

_ASSIGNMENT = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)=(.*)", re.DOTALL)
_OPTION = re.compile(r"#SBATCH\s+(.*)")
_NAME = re.compile(r"\$(?:\{(\w+)(?::-([^{}]*))?\}|(\w+))")
_ARITHMETIC = re.compile(r"\$\(\(([^()]*)\)\)")
_SUBSTITUTION = re.compile(r"\$\(([^()]*)\)|`([^`]*)`")
# What a command that counts the visible GPUs mentions.
_COUNTS_GPUS = ("CUDA_VISIBLE_DEVICES", "nvidia-smi", "SLURM_GPUS", "device_count")
SETUP = ("module", "conda", "source", "spack", "ml", "mamba", "micromamba", ".", "ulimit", "cd", "eval")
QUIET = (
    "echo",
    "set",
    "date",
    "hostname",
    "mkdir",
    "printf",
    "nvidia-smi",
    "wait",
    "sleep",
    "exit",
    "trap",
    "unset",
    "pwd",
)
BLOCKS = ("if", "then", "else", "elif", "fi", "for", "while", "do", "done", "case", "esac", "{", "}")
# sbatch's short options.
SHORT = {
    "N": "nodes",
    "n": "ntasks",
    "c": "cpus-per-task",
    "p": "partition",
    "A": "account",
    "q": "qos",
    "C": "constraint",
    "t": "time",
    "J": "job-name",
    "o": "output",
    "e": "error",
    "G": "gpus",
}


@dataclass
class Script:
    """A command, or a script with several."""

    options: dict[str, str] = field(default_factory=dict)  # of sbatch, by their long names
    environment: dict[str, str] = field(default_factory=dict)
    setup: list[str] = field(default_factory=list)
    commands: list[list[str]] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)  # lines that are neither


def read_script(text: str) -> Script:
    """Read the text of a script or of one command."""
    script = Script()
    lines = re.sub(r"\\\r?\n", " ", text).splitlines()
    for line in lines:
        if match := _OPTION.match(line.strip()):
            script.options |= batch_options(match[1])
    known = _known_counts(script.options)
    for line in lines:
        stripped = line.strip()
        if stripped and not stripped.startswith("#"):
            _read_line(stripped, script, known)
    return script


def batch_options(text: str) -> dict[str, str]:
    """Options of sbatch or srun under their long names; those without a value are empty."""
    found: dict[str, str] = {}
    tokens = split(text)
    while tokens:
        token = tokens.pop(0)
        if token.startswith("--"):
            name, equals, value = token[2:].partition("=")
            if not equals and tokens and not tokens[0].startswith("-"):
                value = tokens.pop(0)
            found[name] = value
        elif re.match(r"-[A-Za-z]", token):
            value = token[2:].lstrip("=") or (tokens.pop(0) if tokens else "")
            found[SHORT.get(token[1], token[1])] = value
    return found


def split(text: str) -> list[str]:
    """The words of a line, without comments; a line with an open quote is split at spaces."""
    try:
        return shlex.split(text, comments=True)
    except ValueError:
        return text.split()


def gpus_per_node(options: dict[str, str]) -> int | None:
    """The GPUs of a node that sbatch is asked for."""
    for name in ("gpus-per-node", "gres"):
        if name in options and (match := re.fullmatch(r"(?:gpu:)?(?:[\w.-]+:)?(\d+)", options[name])):
            return int(match[1])
    tasks, each = options.get("ntasks-per-node", ""), options.get("gpus-per-task", "")
    if tasks.isdigit() and each.rpartition(":")[2].isdigit():
        return int(tasks) * int(each.rpartition(":")[2])
    total, nodes = options.get("gpus", "").rpartition(":")[2], options.get("nodes", "1")
    if total.isdigit() and nodes.isdigit() and int(total) % int(nodes) == 0:
        return int(total) // int(nodes)
    return None


def _known_counts(options: dict[str, str]) -> dict[str, str]:
    """The variables that Slurm sets, as far as the options tell."""
    found: dict[str, str] = {}
    nodes, devices = options.get("nodes", ""), gpus_per_node(options)
    if nodes.isdigit():
        found |= dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), nodes)
    if devices is not None:
        found |= dict.fromkeys(("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE", "=gpus"), str(devices))
    if "cpus-per-task" in options:
        found["SLURM_CPUS_PER_TASK"] = options["cpus-per-task"]
    return found


def _read_line(line: str, script: Script, variables: dict[str, str]) -> None:
    assigned = _ASSIGNMENT.fullmatch(line)
    if assigned and (line.startswith("export") or len(split(re.sub(r"\$\(.*\)|`.*`", "x", line))) == 1):
        name, value = assigned[1], expand(assigned[2].strip().strip("\"'"), variables)
        variables[name] = value
        if line.startswith("export"):
            script.environment[name] = value
        return
    words = split(expand(line.removesuffix(";").removesuffix("&").strip(), variables))
    while words and (match := _ASSIGNMENT.fullmatch(words[0])):  # NCCL_DEBUG=INFO litgpt …
        script.environment[match[1]] = match[2]
        words.pop(0)
    if not words or words[0] in QUIET or words[0] in BLOCKS:
        return
    if words[0] in SETUP:
        script.setup.append(line)
    else:
        # "$@" and redirections are not arguments of a config.
        words = [word for word in words if word not in ("$@", "$*", "&")]
        cut = next((at for at, word in enumerate(words) if re.match(r"(\d?>|&>|\||&&|;)", word)), len(words))
        script.commands.append(words[:cut])


def expand(text: str, variables: dict[str, str]) -> str:
    """The text with the variables that are known, and sums of them. Others stay as they are."""

    def arithmetic(match: re.Match[str]) -> str:
        inner = re.sub(r"\b[A-Za-z_]\w*\b", lambda name: variables.get(name[0], name[0]), _names(match[1], variables))
        return str(_calculate(inner)) if re.fullmatch(r"[\d\s+*/-]+", inner) else match[0]

    def substitution(match: re.Match[str]) -> str:
        counted = any(word in (match[1] or match[2] or "") for word in _COUNTS_GPUS)
        return variables.get("=gpus", match[0]) if counted else match[0]

    return _SUBSTITUTION.sub(substitution, _names(_ARITHMETIC.sub(arithmetic, text), variables))


def _names(text: str, variables: dict[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        return variables.get(match[1] or match[3], match[2] if match[2] is not None else match[0])

    # Inside $( … ) a name is the command's.
    parts = re.split(r"(\$\([^(][^)]*\))", text)
    return "".join(
        part if part.startswith("$(") and not part.startswith("$((") else _NAME.sub(value, part) for part in parts
    )


def _calculate(text: str) -> int | str:
    """Integer arithmetic as in the shell, from left to right with * and / first."""
    tokens = re.findall(r"\d+|[+*/-]", text)
    try:
        values, signs = [int(tokens[0])], []
        for sign, number in zip(tokens[1::2], map(int, tokens[2::2]), strict=True):
            if sign == "*":
                values[-1] *= number
            elif sign == "/":
                values[-1] //= number
            else:
                values.append(number)
                signs.append(sign)
        total = values[0]
        for sign, number in zip(signs, values[1:], strict=True):
            total = total + number if sign == "+" else total - number
    except (ValueError, IndexError, ZeroDivisionError):
        return f"$(({text}))"
    return total
