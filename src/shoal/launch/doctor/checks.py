"""The table of checks of a node, and the loop over it."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from shoal.launch.doctor import disk, gpus, host, network, software
from shoal.launch.doctor.finding import Diagnosis, Finding, warning
from shoal.launch.doctor.setting import Setting


@dataclass(frozen=True)
class Check:
    """A check of a node: a function that returns what it found."""

    name: str
    run: Callable[[Setting], Finding]
    imports_torch: bool = False


# To add a check, write a function from a Setting to a Finding, and add a line. Those that wait for torch come last.
CHECKS = (
    Check("python", software.check_python),
    Check("libraries", software.check_libraries),
    Check("/dev/shm", host.check_shared_memory),
    Check("open files", host.check_open_files),
    Check("locked memory", host.check_locked_memory),
    Check("processes", host.check_processes),
    Check("cores", host.check_cores),
    Check("memory", host.check_memory),
    Check("run directory", disk.check_run_folder),
    Check("disk speed", disk.check_disk_speed),
    Check("cache", disk.check_cache),
    Check("clock", disk.check_file_clock),
    Check("network", network.check_interface),
    Check("ports", network.check_ports),
    Check("GPUs", gpus.check_gpus),
    Check("topology", gpus.check_topology),
    Check("torch", software.check_torch, imports_torch=True),
    Check("driver", gpus.check_driver, imports_torch=True),
    Check("NCCL", network.check_nccl, imports_torch=True),
    Check("peer-to-peer", gpus.check_peers, imports_torch=True),
    Check("matmul", gpus.check_matmul, imports_torch=True),
)


def examine_node(
    setting: Setting,
    *,
    with_torch: bool = True,
    show: Callable[[Finding], None] = lambda finding: None,
    say: Callable[[str], None] = lambda sentence: None,
) -> Diagnosis:
    """Run all checks of this node. `show` gets each finding at once, and `say` what is waited for."""
    findings = []
    waiting = False
    for check in CHECKS:
        if check.imports_torch and not with_torch:
            continue
        if check.imports_torch and not waiting:
            waiting = True
            say("Importing torch …")
        findings.append(run_check(check, setting))
        show(findings[-1])
    return Diagnosis(tuple(findings))


def run_check(check: Check, setting: Setting) -> Finding:
    try:
        found = check.run(setting)
    except Exception as error:  # one check that is wrong about this machine must not hide the others
        found = warning(f"this check failed with {type(error).__name__}: {error}", "please report it")
    return replace(found, check=check.name)
