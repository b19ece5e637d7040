"""Where the ranks of one launch meet before they have a process group: a TCP store of rank 0, or of torchrun's agent.

Ranks agree there that they are of one launch and one attempt, and say in a sentence who is missing or has failed.
"""

import errno
import json
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from shoal.launch.environment import Placement, default_port, is_loopback
from shoal.launch.interfaces import interface_to
from shoal.mistakes import RunFailed, UserMistake

# Set by the user: seconds to wait for rank 0 to be reachable.
JOIN_TIMEOUT = "SHOAL_JOIN_TIMEOUT"
DEFAULT_TIMEOUT = 300.0
# Rank 0 takes the first of these ports that is free, and the others find it there.
CANDIDATES = 8
POLL = 0.05
# Seconds in which a store answers.
ANSWER_WITHIN = 3.0
# In the store of torchrun's agent, which outlives its attempts: this job has begun its run.
BEGUN = "shoal/begun"
# What gloo says of a peer that has died, and where it names it.
_LOST = re.compile(r"closed by peer|reset by peer|Broken pipe")
_PEER = re.compile(r"\[([0-9a-fA-F.:]+)\]:\d+")


@dataclass(frozen=True)
class Member:
    """What a rank says of itself."""

    rank: int
    host: str
    device: str = ""  # identifies the GPU; empty on a CPU
    address: str = ""  # from which it reaches rank 0


def has_agent_store() -> bool:
    """Whether torchrun's agent has a store for its ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


class Meeting:
    """A connection to the store of this launch. `attempt` tells restarts of the same launch apart."""

    def __init__(self, place: Placement, attempt: int) -> None:
        self.place = place
        self.attempt = attempt
        self.timeout = float(os.environ.get(JOIN_TIMEOUT, DEFAULT_TIMEOUT))
        self.of_agent = has_agent_store()
        self.port = place.master_port
        self.store = self._connect_to_agent() if self.of_agent else self._open()
        # Of this attempt: of an agent's store, once ranks have agreed on a name.
        self.members: list[Member] = []  # once all have joined
        self._keys = None if self.of_agent else PrefixStore(f"shoal/{attempt}", self.store)
        if place.several_nodes and (name := interface_to(place.master_addr)) is not None:
            # Otherwise gloo takes the address of the host name, which is often a loopback address.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)

    @property
    def begun(self) -> bool:
        """Whether an earlier attempt of this job has begun the run, as far as the store knows: torchrun counts no
        restart where a node has joined or another node has failed."""
        return self.of_agent and bool(self.store.check([BEGUN]))

    def begin(self) -> None:
        """On rank 0: the run exists now."""
        if self.of_agent:
            self.store.set(BEGUN, "1")

    def gather(self, member: Member, patience: float) -> Store:
        """Wait until all ranks have joined: the store for their process group. `members` are then known."""
        deadline = time.monotonic() + patience
        try:
            keys = self._keys = self._keys or PrefixStore(f"shoal/{self._agree(deadline, patience)}", self.store)
            keys.set(f"member/{member.rank}", json.dumps(vars(member)))
            waited_for = list(range(self.place.world_size))
            while waited_for := [one for one in waited_for if not keys.check([f"member/{one}"])]:
                self._wait_for(waited_for, deadline, patience)
            self.members = [Member(**json.loads(keys.get(f"member/{one}"))) for one in range(self.place.world_size)]
        except (RuntimeError, ValueError) as error:  # of the store
            raise RunFailed(
                f"Rank {member.rank} lost its connection to rank 0 at {self.place.master_addr}, port {self.port}, "
                f"before all ranks had joined; the output of rank 0 says why ({_reason(error)})."
            ) from None
        return PrefixStore("group", keys)

    def explain_loss(self, error: Exception) -> RunFailed | None:
        """A sentence for a lost connection that names the rank at its other end; None for any other error."""
        peer = _PEER.search(str(error)) if _LOST.search(str(error)) else None
        others = [one for one in self.members if one.rank != self.place.rank]
        peers = [one for one in others if peer is not None and one.address == peer[1]]
        if not peers:
            return None
        ranks = ", ".join(str(one.rank) for one in peers)
        which = f"Rank {ranks}" if len(peers) == 1 else f"One of the ranks {ranks}"
        return RunFailed(
            f"{which} on {peers[0].host} is gone: rank {self.place.rank} on {socket.gethostname()} lost its connection "
            f"to {peers[0].address}."
        )

    def fail(self, sentence: str) -> None:
        """Tell the ranks that wait for this one."""
        if self._keys is None:  # torchrun restarts or ends all of them
            return
        with suppress(Exception):  # rank 0 may be gone
            self._keys.set("failed", f"Rank {self.place.rank} failed before all ranks had joined: {sentence}")
            if self.place.rank == 0:
                time.sleep(10 * POLL)  # the store ends with this process

    def _wait_for(self, missing: Sequence[int], deadline: float, patience: float) -> None:
        """Wait a moment, unless a rank has failed or is too late."""
        if self._keys is not None and self._keys.check(["failed"]):
            raise RunFailed(self._keys.get("failed").decode())
        if time.monotonic() > deadline:
            names = ", ".join(map(str, missing[:8])) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
            raise RunFailed(
                f"Waited {patience:.0f} s, but of {self.place.world_size} ranks only "
                f"{self.place.world_size - len(missing)} have joined; missing: rank {names}."
            )
        time.sleep(POLL)

    def _agree(self, deadline: float, patience: float) -> str:
        """A name for this attempt that no earlier one had: the store of an agent still holds their keys, and nodes
        disagree on the number of restarts. Rank 0 makes it and answers every rank that asks, also dead ones."""
        own, store = uuid.uuid4().hex, self.store
        if self.place.rank:
            store.set(f"shoal/question/{store.add('shoal/questions', 1)}", own)
            while not store.check([f"shoal/answer/{own}"]):
                self._wait_for([0], deadline, patience)
            name = store.get(f"shoal/answer/{own}").decode()
            store.set(f"shoal/{name}/agreed/{self.place.rank}", "1")
            return name
        answered, waited_for = 0, list(range(1, self.place.world_size))
        while waited_for := [one for one in waited_for if not store.check([f"shoal/{own}/agreed/{one}"])]:
            while answered < store.add("shoal/questions", 0):
                answered += 1
                if _appears(store, f"shoal/question/{answered}"):  # or its rank died between two keys
                    store.set(f"shoal/answer/{store.get(f'shoal/question/{answered}').decode()}", own)
            self._wait_for(waited_for, deadline, patience)
        return own

    def _connect_to_agent(self) -> TCPStore:
        try:
            return TCPStore(
                self.place.master_addr,
                self.place.master_port,
                self.place.world_size,
                is_master=False,
                timeout=timedelta(seconds=self.timeout),
            )
        except (RuntimeError, ValueError) as error:
            raise self._unreachable(str(error).partition("\n")[0]) from None

    def _open(self) -> TCPStore:
        return self._serve() if self.place.rank == 0 else self._find()

    def _ports(self) -> Iterator[int]:
        yield self.place.master_port
        for number in range(1, CANDIDATES):
            yield default_port(f"{self.place.launch} {number}")

    @property
    def _name(self) -> str:
        return f"{self.place.launch} attempt {self.attempt}"

    def _serve(self) -> TCPStore:
        """Listen on the first port that is free."""
        for port in self._ports():
            try:
                listening = _listen(self.place.master_addr, port, several_nodes=self.place.several_nodes)
            except OSError as error:
                if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                    raise UserMistake(
                        f"Rank 0 cannot listen at MASTER_ADDR {self.place.master_addr}: {_reason(error)}."
                    ) from None
                continue
            self.port = port
            store = TCPStore(
                self.place.master_addr,
                port,
                self.place.world_size,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=self.timeout),
                master_listen_fd=listening.detach(),
            )
            store.set("shoal/launch", self._name)
            return store
        raise UserMistake(
            f"The ports {', '.join(map(str, self._ports()))} of {self.place.master_addr}, at which ranks could meet, "
            "are all in use; set MASTER_PORT to a free one."
        )

    def _find(self) -> TCPStore:
        """Connect to the store of rank 0, on whichever port it is."""
        began, why = time.monotonic(), ""
        while True:
            for port in self._ports():
                try:
                    # The store's own connection would wait for its whole timeout.
                    with socket.create_connection((self.place.master_addr, port), timeout=5):
                        pass
                    store = self._client(port)
                except (OSError, RuntimeError) as error:
                    why = why if port != self.place.master_port else _reason(error)
                    continue
                if store is not None:
                    self.port = port
                    return store
            if time.monotonic() - began > self.timeout:
                raise self._unreachable(why)
            time.sleep(0.2)

    def _client(self, port: int) -> TCPStore | None:
        """A connection to the store at `port`, if it is of this launch and attempt."""
        found: list[TCPStore] = []

        def connect() -> None:
            with suppress(RuntimeError):
                store = TCPStore(
                    self.place.master_addr,
                    port,
                    self.place.world_size,
                    is_master=False,
                    wait_for_workers=False,
                    timeout=timedelta(seconds=self.timeout),
                )
                if _appears(store, "shoal/launch") and store.get("shoal/launch").decode() == self._name:
                    found.append(store)

        # The store waits forever for an answer of a program that is no store.
        thread = threading.Thread(target=connect, daemon=True)
        thread.start()
        thread.join(ANSWER_WITHIN)
        return found[0] if found else None

    def _unreachable(self, why: str) -> UserMistake:
        return UserMistake(
            f"Rank {self.place.rank} on {socket.gethostname()} could not reach rank 0 at {self.place.master_addr}, "
            f"port {self.place.master_port}, within {self.timeout:.0f} s ({why or 'another program answers there'}); "
            "check MASTER_ADDR, and that rank 0 runs and no firewall is between them."
        )


def check_devices(members: list[Member]) -> None:
    """A UserMistake if two ranks use the same GPU: each may see one, and not know of the other."""
    users: dict[tuple[str, str], int] = {}
    for one in members:
        if not one.device:
            continue
        if (other := users.setdefault((one.host, one.device), one.rank)) != one.rank:
            raise UserMistake(
                f"Ranks {other} and {one.rank} on {one.host} both use the GPU {one.device}; start one process per GPU, "
                "or give each its own with CUDA_VISIBLE_DEVICES."
            )


def _appears(store: Store, key: str, within: float = 2.0) -> bool:
    deadline = time.monotonic() + within
    while not store.check([key]):
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL)
    return True


def _listen(address: str, port: int, *, several_nodes: bool) -> socket.socket:
    """A listening socket at this address alone, unless it is that of a service in front of this node, or a name that
    only this node takes for loopback, as Debian's /etc/hosts says of a node's own name."""
    family, _, _, _, found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    single = is_loopback(address) and is_loopback(str(found[0]))
    everywhere = "" if family == socket.AF_INET else "::"
    renamed = several_nodes and is_loopback(str(found[0])) and not single
    for host in (everywhere,) if renamed else (str(found[0]), everywhere):
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, port))
        except OSError as error:
            listening.close()
            if error.errno == errno.EADDRNOTAVAIL and host and not single:
                continue
            raise
        listening.listen(1024)
        return listening
    raise AssertionError


def _reason(error: Exception) -> str:
    if isinstance(error, socket.gaierror):
        return "the name cannot be resolved"
    return (getattr(error, "strerror", None) or str(error).partition("\n")[0]).strip()
