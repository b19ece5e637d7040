"""`shoal doctor`: the checks of this node, and then those of several processes, which are started here or have been
started by torchrun or srun."""

import json
import os
from collections.abc import Callable
from dataclasses import asdict, replace

from shoal.launch.doctor.checks import examine_node
from shoal.launch.doctor.finding import Diagnosis, Finding, failure
from shoal.launch.doctor.network import reach
from shoal.launch.doctor.setting import Setting
from shoal.launch.environment import LAUNCH_FOLDER, Placement, adopt
from shoal.mistakes import RunFailed

# Seconds until the port of the first rank has to answer: the processes of a job do not start at the same time.
MEET_WITHIN = 60
# Without these the processes would only fail again.
NEEDED = {"GPUs", "torch", "driver", "libraries", "run directory"}

Show = Callable[[Finding], None]
Say = Callable[[str], None]


def examine(setting: Setting, *, show: Show, say: Say) -> Diagnosis:
    """All checks. `show` gets each finding at once, on the first rank; `say` what is waited for."""
    if (place := adopt(os.environ)) is not None:
        return _examine_as_rank(setting, place, show=show, say=say)
    found = examine_node(setting, show=show, say=say)
    failed = {one.check for one in found.findings if one.status == "failure"}
    if setting.group > 1 and not failed & NEEDED:
        say(f"Starting {setting.group} processes …")
        found = _add(found, _examine_processes(setting), show)
    return found


def _examine_processes(setting: Setting) -> list[Finding]:
    """Start processes on this node and let them examine each other."""
    from shoal.launch.join import check_processes
    from shoal.launch.processes import run_processes

    check_processes(setting.group, "--devices")
    try:
        found = run_processes("shoal.bench.doctor_worker", [_asked(setting)], setting.group)
    except RunFailed as error:
        return [_ranks_failed(str(error), "NCCL_DEBUG=INFO shows what NCCL did; the other findings may say why")]
    if found is None:
        raise RunFailed("Interrupted before all checks were done.")
    return [Finding.from_dict(one) for one in found["findings"]]


def _examine_as_rank(setting: Setting, place: Placement, *, show: Show, say: Say) -> Diagnosis:
    """On a rank: the first rank of each node examines it, and then all of them the group."""
    from shoal.bench.doctor import Asked, examine_group, gather, node_name
    from shoal.bench.doctor_worker import HANG_TIMEOUT
    from shoal.launch.join import joined_within
    from shoal.observe.progress import Reporter

    first, node = place.rank == 0, Diagnosis(())
    if not first:
        show, say = _nothing, _nothing
    if place.local_rank == 0:
        node = examine_node(setting, show=show, say=say)
    if not first and LAUNCH_FOLDER not in os.environ:
        met = reach(f"{place.master_addr}:{place.master_port}", MEET_WITHIN)
        if met.status != "ok":
            return _add(node, [replace(met, check="first rank")], show)
    if place.world_size == 1:
        return node
    try:
        with joined_within(HANG_TIMEOUT) as ranks:
            group = examine_group(Asked.from_text(_asked(setting)), ranks, Reporter(enabled=first))
            # The findings of the first rank have been shown; of the other nodes only what is not ok.
            mine = [] if first else [one for one in node.findings if one.status != "ok"]
            mine = [replace(one, found=f"{node_name()}: {one.found}") for one in mine]
            told = gather(json.dumps([asdict(one) for one in mine]), ranks)
            elsewhere = [Finding.from_dict(one) for text in told for one in json.loads(text)]
    except RuntimeError as error:  # of torch.distributed
        remedy = f"see that all {place.world_size} processes were started, and that they can reach each other's ports"
        return _add(node, [_ranks_failed(str(error).strip().splitlines()[0], remedy)], show)
    return _add(node, [*elsewhere, *group], show)


def _asked(setting: Setting) -> str:
    from shoal.bench.doctor import Asked

    hardware = None if setting.config is None else setting.config.hardware.model_dump(mode="json")
    return Asked(str(setting.folder.absolute()), hardware).to_text()


def _add(found: Diagnosis, more: list[Finding], show: Show) -> Diagnosis:
    for finding in more:
        show(finding)
    return Diagnosis((*found.findings, *more))


def _ranks_failed(sentence: str, remedy: str) -> Finding:
    return replace(failure(f"the processes could not work together: {sentence}", remedy), check="ranks")


def _nothing(_: object) -> None:
    pass
