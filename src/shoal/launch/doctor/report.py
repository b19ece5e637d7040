"""`shoal doctor --report RUN`: what an issue about a run should contain, without secrets, as Markdown."""

import json
import os
import re
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path

from shoal.config.run import RunDirectory
from shoal.launch.doctor.checks import examine_node
from shoal.launch.doctor.redact import Redactor
from shoal.launch.doctor.setting import Setting
from shoal.launch.doctor.software import versions
from shoal.mistakes import UserMistake

# Lines of each log, of each traceback, and of the metrics.
LOG_LINES, TRACE_LINES, METRIC_LINES = 30, 120, 8
# Characters of a line: a progress bar or a printed batch would fill a page.
LONGEST_LINE = 400
# Logs that are shown: those that were written last. A job has one per rank.
MOST_LOGS = 4
# Texts. The event files of TensorBoard and wandb, which are in the same folder, are not.
READABLE = {".log", ".jsonl", ".txt", ".out"}
# The environment that training depends on. Everything else stays on the machine.
VARIABLES = re.compile(
    r"NCCL_|GLOO_|TORCH|PYTORCH_|CUDA|NVIDIA_|ROCR_|HIP_|OMP_|MKL_|SHOAL_|HF_|TRANSFORMERS_|TOKENIZERS_|UCX_|FI_"
    r"|(?:LOCAL_|GROUP_)?(?:RANK|WORLD_SIZE)$|MASTER_|LD_LIBRARY_PATH$|LD_PRELOAD$|PYTHONPATH$|VIRTUAL_ENV$|CONDA_PREFIX$"
    r"|SLURM_(?:JOB_ID|JOB_NUM_NODES|NNODES|NTASKS|NTASKS_PER_NODE|CPUS_PER_TASK|GPUS|GPUS_ON_NODE|PROCID|LOCALID|"
    r"MEM_PER_NODE|RESTART_COUNT|STEP_NUM_TASKS|STEP_NUM_NODES)$|OMPI_COMM_WORLD_|PMI"
)


def describe_run(folder: Path, environment: Mapping[str, str] = os.environ) -> str:
    """The report of the run in `folder`."""
    run = RunDirectory(folder)
    if not run.exists:
        raise UserMistake(f"--report: there is no run in {folder}; give the folder of a run, such as runs/NAME.")
    redact = Redactor.of_this_process(environment)
    sections = [f"## shoal report of {redact(folder.name)}", *_sections(run, redact, environment)]
    return "\n\n".join(sections)


def _sections(run: RunDirectory, redact: Redactor, environment: Mapping[str, str]) -> Iterator[str]:
    yield _section("Versions", "\n".join(f"{name} {version}" for name, version in versions().items()))
    for file in sorted(run.logs.glob("crash-*.txt"), key=_written)[-1:]:
        yield _section("Error", redact(_tail(file, TRACE_LINES)))
    yield _section("Config", redact(run.config.read_text(errors="replace")), "yaml")
    if (chosen := _chosen(run)) is not None:
        yield _section("Chosen", redact(chosen), "json")
    if run.metrics.is_file():
        yield _section(f"Last {METRIC_LINES} metrics", redact(_tail(run.metrics, METRIC_LINES)), "json")
    steps = sorted(path.name for path in run.checkpoints.glob("step-*"))
    if steps:
        whole = [name for name in steps if (run.checkpoints / name / "MANIFEST.json").is_file()]
        yield _section("Checkpoints", "\n".join(name + ("" if name in whole else " (not complete)") for name in steps))
    texts = (path for path in run.logs.rglob("*") if path.is_file() and path.suffix in READABLE)
    logs = [path for path in texts if not path.name.startswith("crash-")]
    for file in sorted(logs, key=_written)[-MOST_LOGS:]:
        if text := _tail(file, LOG_LINES):
            yield _section(f"Last lines of {redact(str(file.relative_to(run.path)))}", redact(text))
    variables = {name: value for name, value in sorted(environment.items()) if VARIABLES.match(name)}
    if variables:
        yield _section(
            "Environment", "\n".join(f"{name}={redact.variable(name, value)}" for name, value in variables.items())
        )
    found = examine_node(Setting(run.path), with_torch=False)
    yield _section("shoal doctor", redact(found.text()))


def _section(title: str, text: str, language: str = "") -> str:
    """A fenced block, whose fence the text does not contain."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"### {title}\n\n{fence}{language}\n{text.rstrip()}\n{fence}"


def _tail(file: Path, lines: int) -> str:
    """The last lines, each shortened. A carriage return begins a line anew, as in a terminal."""
    with file.open(errors="replace") as opened:
        last = deque(opened, maxlen=lines)
    kept = (line.rstrip("\n").rpartition("\r")[2] for line in last)
    return "\n".join(line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]} …" for line in kept).strip("\n")


def _chosen(run: RunDirectory) -> str | None:
    """What `auto` became, and whether the forecast said that it fits."""
    try:
        plan = json.loads(run.plan.read_text())
    except (OSError, ValueError):
        return None
    kept = {name: plan[name] for name in ("fits", "chosen", "hardware") if isinstance(plan, dict) and name in plan}
    return json.dumps(kept, indent=1) if kept else None


def _written(file: Path) -> float:
    return file.stat().st_mtime
