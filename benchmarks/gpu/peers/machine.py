"""The machine and package versions of a measurement."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata, util
from pathlib import Path
from typing import Any

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "accelerate",
    "peft",
    "liger-kernel",
    "lightning",
    "litgpt",
    "torchao",
    "bitsandbytes",
)


def describe_machine() -> dict[str, Any]:
    """The GPU is queried with nvidia-smi: torch would allocate a CUDA context, memory that the cases need."""
    gpu, memory, driver = _query_driver()
    return {
        "gpu": gpu,
        "gpu_memory": memory,
        "driver": driver,
        "cpu": f"{_cpu_name()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "script": "benchmarks/gpu/speed.py",
    }


def timestamp() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def find_missing(packages: tuple[str, ...]) -> str | None:
    """The first of the packages that is not installed."""
    return next((name for name in packages if util.find_spec(name) is None), None)


def _query_driver() -> tuple[str | None, str | None, str | None]:
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout
        name, memory, driver = answer.strip().splitlines()[0].split(", ")
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None, None, None
    return name, memory, driver


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
