"""What NVIDIA's driver reports of the GPUs of this node, without torch and without a CUDA context."""

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# Seconds. It takes less than two, also with eight GPUs; a driver that hangs never answers.
PATIENCE = 20
DRIVER = Path("/proc/driver/nvidia/version")
PCI = Path("/sys/bus/pci/devices")
NVIDIA_VENDOR = "0x10de"
FIELDS = (
    "index",
    "uuid",
    "name",
    "memory.total",
    "memory.used",
    "driver_version",
    "ecc.errors.uncorrected.volatile.total",
    "pcie.link.width.current",
    "pcie.link.width.max",
)
# Reasons for reduced clocks, by bit, that are not a normal reaction to load: the others are idleness and power limits.
SLOWDOWNS = {
    0x08: "a hardware slowdown",
    0x20: "temperature",
    0x40: "temperature (hardware)",
    0x80: "the power supply",
}


@dataclass(frozen=True)
class GpuReport:
    """One GPU. None: the driver does not report it for this model."""

    index: int
    uuid: str
    name: str
    memory_mib: float
    used_mib: float
    driver: str
    uncorrected_errors: int | None = None
    lanes: int | None = None
    most_lanes: int | None = None
    slowdown: str | None = None


@dataclass(frozen=True)
class DriverReport:
    """The GPUs that this process may use, and how each pair of them is connected."""

    gpus: tuple[GpuReport, ...] = ()
    links: Mapping[tuple[int, int], str] | None = None  # NV18, PIX, SYS, as `nvidia-smi topo -m` prints them
    error: str | None = None  # GPUs are there, but nvidia-smi does not work


def read_driver(environment: Mapping[str, str] = os.environ) -> DriverReport:
    """Ask nvidia-smi. Without a GPU of NVIDIA the report is empty."""
    try:
        printed = _ask(f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits")
    except FileNotFoundError:
        if DRIVER.exists():
            return DriverReport(error="the NVIDIA driver is loaded, but there is no nvidia-smi in PATH")
        return DriverReport(error="there is a GPU of NVIDIA, but its driver is not loaded" if _has_card() else None)
    except subprocess.TimeoutExpired:
        return DriverReport(error=f"nvidia-smi has not answered in {PATIENCE} s")
    except subprocess.CalledProcessError as error:
        said = " ".join(f"{error.stdout}{error.stderr}".split()) or f"status {error.returncode}"
        if "No devices were found" in said:
            return DriverReport()
        return DriverReport(error=f"nvidia-smi fails: {said[:300]}")
    slow = _slowdowns()
    gpus = [read_gpu(line, slow) for line in printed.splitlines() if line.count(",") == len(FIELDS) - 1]
    usable = tuple(gpu for gpu in gpus if _is_visible(gpu, environment.get("CUDA_VISIBLE_DEVICES")))
    return DriverReport(usable, _topology() if len(usable) > 1 else None)


def read_gpu(line: str, slow: Mapping[int, str]) -> GpuReport:
    """A line of nvidia-smi's CSV."""
    index, uuid, name, memory, used, driver, errors, lanes, most = (value.strip() for value in line.split(","))
    return GpuReport(
        index=int(index),
        uuid=uuid,
        name=name,
        memory_mib=_number(memory) or 0,
        used_mib=_number(used) or 0,
        driver=driver,
        uncorrected_errors=_number(errors),
        lanes=_number(lanes),
        most_lanes=_number(most),
        slowdown=slow.get(int(index)),
    )


def read_topology(printed: str) -> dict[tuple[int, int], str]:
    """The matrix of `nvidia-smi topo -m`: the link of each pair of GPUs. Network cards are left out."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in printed.splitlines()]
    header = next((words for words in lines if words[:1] == ["GPU0"] and "X" not in words), [])
    columns = [int(word[3:]) for word in header if re.fullmatch(r"GPU\d+", word)]
    found = {}
    for words in lines:
        if not words or words is header or not re.fullmatch(r"GPU\d+", words[0]):
            continue
        row = int(words[0][3:])
        for column, link in zip(columns, words[1:], strict=False):
            if row < column:
                found[row, column] = link
    return found


def _slowdowns() -> dict[int, str]:
    """GPU → why its clocks are reduced. The field has two names, by the version of the driver."""
    for field in ("clocks_event_reasons.active", "clocks_throttle_reasons.active"):
        try:
            printed = _ask(f"--query-gpu=index,{field}", "--format=csv,noheader")
        except (subprocess.SubprocessError, OSError):
            continue
        found = {}
        for line in printed.splitlines():
            index, _, bits = line.partition(",")
            if re.fullmatch(r"0x[0-9a-fA-F]+", bits.strip()):
                active = int(bits, 16)
                reasons = [reason for bit, reason in SLOWDOWNS.items() if active & bit]
                if reasons:
                    found[int(index)] = " and ".join(reasons)
        return found
    return {}


def _topology() -> dict[tuple[int, int], str] | None:
    try:
        return read_topology(_ask("topo", "-m"))
    except (subprocess.SubprocessError, OSError):
        return None


def _ask(*arguments: str) -> str:
    command = ["nvidia-smi", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE).stdout


def _is_visible(gpu: GpuReport, visible: str | None) -> bool:
    if visible is None:
        return True
    names = [name.strip() for name in visible.split(",") if name.strip()]
    return any(name == str(gpu.index) or (name.startswith("GPU-") and gpu.uuid.startswith(name)) for name in names)


def _has_card() -> bool:
    """Whether there is a display or 3D controller of NVIDIA."""
    for device in PCI.glob("*"):
        try:
            vendor, kind = (device / "vendor").read_text().strip(), (device / "class").read_text().strip()
        except OSError:
            continue
        if vendor == NVIDIA_VENDOR and kind.startswith("0x03"):
            return True
    return False


def _number(text: str) -> int | None:
    return int(float(text)) if re.fullmatch(r"\d+(\.\d+)?", text) else None
