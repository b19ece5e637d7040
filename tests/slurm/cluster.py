"""A real Slurm on this machine, for the length of a test session: a controller and two nodes, on loopback only.

Every slurmd has a host name of its own (a UTS namespace) and a file of host names of its own (a mount namespace), so
that two nodes look like two machines. Munge has its own key and socket. Ports and the first job ID are drawn, so that
two test sessions at once do not meet. Nothing outside the folder of the cluster is written.
"""

import os
import random
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "unshare", "setpriv")
NODES, CPUS, GPUS = 2, 4, 2
PATIENCE = 300  # seconds; only a failure takes this long
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")

# The delay before a requeued job starts is that of cred_expire, 120 seconds unless it is set.
CONFIG = """
ClusterName=shoal
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={base}/munge.socket,cred_expire=5
CredType=cred/munge
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation={base}/state
SlurmdSpoolDir={base}/spool.%n
SlurmctldPidFile={base}/slurmctld.pid
SlurmdPidFile={base}/slurmd.%n.pid
SlurmctldLogFile={base}/slurmctld.log
SlurmdLogFile={base}/slurmd.%n.log
FirstJobId={first}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
TaskPluginParam=None
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,bf_interval=2,requeue_delay=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=60
MinJobAge=3600
GresTypes=gpu
NodeName=DEFAULT CPUs={cpus} RealMemory=8000 Gres=gpu:{gpus}
NodeName=n[{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports}]
PartitionName=debug Nodes=ALL Default=YES MaxTime=1-00:00:00 State=UP PriorityTier=10 GraceTime=120
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=100 PreemptMode=off
"""


def why_not() -> str | None:
    """Why there can be no cluster on this machine; None if there can."""
    if os.geteuid() != 0:
        return "a Slurm of one's own needs root, for namespaces and device files"
    missing = [name for name in PROGRAMS if _found(name) is None]
    if missing:
        return f"there is no {', '.join(missing)}: apt-get install slurmctld slurmd slurm-client munge"
    if subprocess.run(["unshare", "-m", "-u", "true"], capture_output=True, check=False).returncode != 0:
        return "this container may not create namespaces"
    return None


def _found(program: str) -> str | None:
    return shutil.which(program, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")


class Cluster:
    """The daemons, and what a user of the cluster does."""

    def __init__(self) -> None:
        self.base = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # short: a socket's path has 108 characters
        self.base.chmod(0o755)
        self.daemons: list[subprocess.Popen[bytes]] = []
        self.environment = {"SLURM_CONF": str(self.base / "slurm.conf")}

    def start(self) -> None:
        self._write_files()
        base = self.base
        munge = ["munged", "--force", "--foreground", f"--key-file={base}/munge.key", f"--socket={base}/munge.socket"]
        munge += [f"--pid-file={base}/munged.pid", f"--log-file={base}/munged.log", f"--seed-file={base}/munge.seed"]
        self._daemon([*munge, "--num-threads=2"])
        wait_until((base / "munge.socket").exists, "munge listens")
        self._daemon(["slurmctld", "-D", "-f", f"{base}/slurm.conf"])
        for number in range(1, NODES + 1):
            alone = f'mount --bind {base}/hosts /etc/hosts && hostname n{number} && exec "$@"'
            node = [_found("slurmd") or "", "-D", "-f", f"{base}/slurm.conf", "-N", f"n{number}"]
            self._daemon(["unshare", "-m", "-u", "sh", "-c", alone, "sh", *node])
        wait_until(lambda: self._idle_nodes() == NODES, "the nodes are idle", self.report)

    def stop(self) -> None:
        """End all jobs and daemons and delete the folder."""
        with suppress(subprocess.TimeoutExpired):
            self.run("scancel", "--user=root", "--signal=KILL", "--full", seconds=10)
            self.run("scancel", "--user=root", seconds=10)
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in self.daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        shutil.rmtree(self.base, ignore_errors=True)

    def run(self, *command: str, seconds: float = 60) -> str:
        """What one of Slurm's commands prints."""
        done = subprocess.run(
            command,
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        return done.stdout.strip() or done.stderr.strip()

    def state(self, job: str) -> str:
        return self.run("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T")

    def wait_for(self, job: str, *states: str, log: Path | None = None) -> None:
        """Until the job is in one of `states`; a job that has ended in another one fails at once."""

        def report() -> str:
            return f"{self.run('scontrol', 'show', 'job', job)}\n{log.read_text() if log and log.exists() else ''}"

        def reached() -> bool:
            state = self.state(job)
            assert state in states or state not in ENDED, f"job {job} is {state}\n{report()}"
            return state in states

        wait_until(reached, f"job {job} is {' or '.join(states)}", report)

    def report(self) -> str:
        logs = sorted(self.base.glob("*.log"))
        return "\n".join(f"== {log.name}\n{log.read_text()[-2000:]}" for log in logs)

    def _daemon(self, command: Sequence[str]) -> None:
        program = _found(command[0])
        assert program is not None
        self.daemons.append(
            subprocess.Popen(
                # Also if this process is killed.
                ["setpriv", "--pdeathsig", "TERM", program, *command[1:]],
                env=_clean(os.environ) | self.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        )

    def _idle_nodes(self) -> int:
        printed = self.run("sinfo", "--noheader", "--states=idle", "--partition=debug", "--format=%D", seconds=10)
        return int(printed) if printed.isdigit() else 0

    def _write_files(self) -> None:
        base, ports, host = self.base, _free_ports(NODES + 1), socket.gethostname().partition(".")[0]
        (base / "state").mkdir()
        (base / "munge.key").write_bytes(os.urandom(1024))
        (base / "munge.key").chmod(0o600)
        names = "".join(f"127.0.0.1 n{number}\n" for number in range(1, NODES + 1))
        (base / "hosts").write_text(Path("/etc/hosts").read_text() + names)
        first = random.SystemRandom().randrange(1000, 60_000)  # the ranks of a job meet at a port made of its ID
        ranges = {"control": ports[0], "ports": f"{ports[1]}-{ports[-1]}", "nodes": f"1-{NODES}"}
        text = CONFIG.format(base=base, host=host, first=first, cpus=CPUS, gpus=GPUS, **ranges)
        (base / "slurm.conf").write_text(text)
        devices = base / "dev"
        devices.mkdir()
        for number in range(GPUS):  # copies of /dev/null, which Slurm counts as GPUs
            os.mknod(devices / f"nvidia{number}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        (base / "gres.conf").write_text(f"NodeName=n[1-{NODES}] Name=gpu File={devices}/nvidia[0-{GPUS - 1}]\n")


def _clean(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith(("SLURM", "SBATCH"))}


def _free_ports(count: int) -> list[int]:
    """Successive ports that nobody uses on loopback, below those that the system gives to clients."""
    while True:
        first = random.SystemRandom().randrange(10_000, 14_000)
        ports = list(range(first, first + count))
        if all(_is_free(port) for port in ports):
            return ports


def _is_free(port: int) -> bool:
    with socket.socket() as one:
        try:
            one.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def wait_until(
    reached: Callable[[], bool], what: str, report: Callable[[], str] = lambda: "", seconds: float = PATIENCE
) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}\n{report()}"
        time.sleep(0.1)


def task_processes(job: str, task: int) -> list[int]:
    """The Python processes of one task of a job, on whatever node: these nodes share the process table."""
    wanted = {f"SLURM_JOB_ID={job}".encode(), f"SLURM_PROCID={task}".encode()}
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                variables = set((entry / "environ").read_bytes().split(b"\0"))
                step = any(one.startswith(b"SLURM_STEP_NUM_TASKS=") for one in variables)
                if wanted <= variables and step and b"python" in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
    return found


def job_processes(job: str) -> list[int]:
    """All processes that a job has left or still runs."""
    wanted, found = f"SLURM_JOB_ID={job}".encode(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def freeze(process: int) -> None:
    """The other ranks wait for this one without using the CPU: whatever must happen in mid-run has time to."""
    os.kill(process, signal.SIGSTOP)


def thaw(process: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGCONT)
