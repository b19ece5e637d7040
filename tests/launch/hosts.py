"""Two hosts on one machine: network namespaces with a link between them, and torchrun in each, as forks."""

import ctypes
import importlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.launch.command import Forked, ForkedCommand, _be_program, _be_worker, _write_to, environment

NEW_NETWORK, NEW_NAME, NEW_MOUNTS = 0x40000000, 0x04000000, 0x20000  # CLONE_NEWNET, CLONE_NEWUTS, CLONE_NEWNS
PRIVATE, BIND = 1 << 18 | 1 << 14, 1 << 12  # MS_PRIVATE | MS_REC, MS_BIND
PORT = 29_411
# Seconds: how torchrun finds out that a node is gone, and how long it waits for a second one. At the start both come,
# on a busy machine late; once its workers have been started, nobody else will come, and it need not wait.
RENDEZVOUS = "join_timeout=120,last_call_timeout=60,keep_alive_interval=1,keep_alive_max_attempt=3,is_host={}"
LATER_CALL = timedelta(seconds=1)


def why_not() -> str | None:
    """Why there can be no network namespaces here; None if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need the command ip, of Debian's iproute2"
    made = subprocess.run(["ip", "netns", "add", "shoal-probe"], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", "shoal-probe"], capture_output=True)
    return f"no network namespace can be made: {made.stderr.strip()}" if made.returncode else None


class Hosts:
    """Two namespaces, a and b, of addresses 10.213.0.1 and .2."""

    def __init__(self) -> None:
        own = os.getpid()
        self.names = [f"shoal-{own}-{side}" for side in "ab"]
        self.links = [f"shl{own % 100_000}{side}" for side in "ab"]
        self.addresses = ["10.213.0.1", "10.213.0.2"]

    def make(self) -> None:
        ip("link", "add", self.links[0], "type", "veth", "peer", "name", self.links[1])
        for name, link, address in zip(self.names, self.links, self.addresses, strict=True):
            ip("netns", "add", name)
            ip("link", "set", link, "netns", name)
            ip("-n", name, "address", "add", f"{address}/24", "dev", link)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", link, "up")

    def cut(self) -> None:
        ip("-n", self.names[1], "link", "set", self.links[1], "down")

    def mend(self) -> None:
        ip("-n", self.names[1], "link", "set", self.links[1], "up")

    def remove(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def enter(self, side: int, names: Path | None = None) -> None:
        """This process is on that host from now on, whose /etc/hosts is the file `names`."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{self.names[side]}") as namespace:
            assert libc.setns(namespace.fileno(), NEW_NETWORK) == 0
        assert libc.unshare(NEW_NAME) == 0
        name = f"host-{'ab'[side]}".encode()
        assert libc.sethostname(name, len(name)) == 0
        if names is not None:
            assert libc.unshare(NEW_MOUNTS) == 0
            assert libc.mount(None, b"/", None, PRIVATE, None) == 0
            assert libc.mount(str(names).encode(), b"/etc/hosts", None, BIND, None) == 0


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    hosts = Hosts()
    try:
        hosts.make()
        yield hosts
    finally:
        hosts.remove()


class Torchrun(ForkedCommand):
    """`torchrun … -m shoal ARGUMENTS` on one of the hosts. Its workers are forks, and import nothing."""

    def __init__(
        self, folder: Path, hosts: Hosts, side: int, arguments: list[str], *, nodes: str, restarts: int
    ) -> None:
        self.hosts, self.side = hosts, side
        own = ["--nnodes", nodes, "--nproc-per-node", "1", "--max-restarts", str(restarts), "--rdzv-backend", "c10d"]
        own += ["--rdzv-endpoint", f"{hosts.addresses[0]}:{PORT}", "--rdzv-id", "hosts"]
        own += ["--rdzv-conf", RENDEZVOUS.format(int(side == 0)), "--local-addr", hosts.addresses[side]]
        super().__init__(folder, [*own, "-m", "shoal", *arguments], environment(folder, TMPDIR=str(folder)))

    def _start(self, folder: Path, arguments: list[str], env: Mapping[str, str]) -> Forked:
        importlib.import_module("tests.harness")
        importlib.import_module("torch.distributed.run")
        importlib.import_module("torch.distributed.elastic.rendezvous.c10d_rendezvous_backend")
        importlib.import_module("shoal.launch.local")
        importlib.import_module("shoal.models.emulate").slow_dtypes()
        out, err = (file.fileno() for file in self.files)
        return Forked(lambda: self._be(folder, arguments, env, out, err))

    def _be(self, folder: Path, arguments: list[str], env: Mapping[str, str], out: int, err: int) -> Any:
        from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler
        from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousTimeout
        from torch.distributed.run import main

        def start(self: Any, arguments: Any, env: Mapping[str, str]) -> Forked:
            RendezvousTimeout.last_call = LATER_CALL  # type: ignore[method-assign, assignment]
            _, *others = (one if one != "shoal" else "shoal.cli" for one in arguments)  # python -u -m shoal …
            return Forked(lambda: _be_worker(["python", *(one for one in others if one != "-u")], env))

        SubprocessHandler._popen = start  # type: ignore[method-assign, assignment]
        self.hosts.enter(self.side)
        os.chdir(folder)
        _write_to(out, err)
        _be_program(lambda: main(arguments), ["torchrun", *arguments], env)

    def crash(self, processes: list[int]) -> None:
        """The host is gone: the agent and its workers are killed at once."""
        for process in (self.process.pid, *processes):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
