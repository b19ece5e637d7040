"""Network interfaces, ports and NCCL's settings."""

import fcntl
import os
import socket
import struct
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shoal.launch.doctor.finding import Finding, failure, ok, warning, worst
from shoal.launch.doctor.setting import Setting
from shoal.launch.interfaces import GLOO, NCCL, means_any

INTERFACES = Path("/sys/class/net")
INFINIBAND = Path("/sys/class/infiniband")
# Requests of Linux: the flags and the IPv4 address of an interface.
GET_FLAGS, GET_ADDRESS, IS_UP, IS_LOOPBACK = 0x8913, 0x8915, 0x1, 0x8
# What NCCL leaves out if it may choose.
NOT_CHOSEN = ("lo", "docker", "virbr")
# Seconds for a name to be resolved, and for a port to answer.
RESOLVE, CONNECT = 3.0, 5.0
# Settings that make collectives slow, for a while or by mistake.
SLOW = {
    "NCCL_P2P_DISABLE": "GPUs do not access each other's memory",
    "NCCL_SHM_DISABLE": "processes of a node use the network",
    "NCCL_IB_DISABLE": "InfiniBand is not used",
    "NCCL_DEBUG": "NCCL prints",
    "TORCH_DISTRIBUTED_DEBUG": "collectives are checked",
    "CUDA_LAUNCH_BLOCKING": "every kernel is waited for",
}


@dataclass(frozen=True)
class Interface:
    """A network interface that is up."""

    name: str
    address: str | None  # IPv4
    loopback: bool
    gbit: float | None  # per second, if the driver tells it


def interfaces() -> list[Interface]:
    """The interfaces that are up."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                flags = struct.unpack("H", fcntl.ioctl(asked, GET_FLAGS, request)[16:18])[0]
            except OSError:
                continue
            if not flags & IS_UP:
                continue
            try:
                address = socket.inet_ntoa(fcntl.ioctl(asked, GET_ADDRESS, request)[20:24])
            except OSError:
                address = None
            found.append(Interface(name, address, bool(flags & IS_LOOPBACK), _gbit(name)))
    return found


def check_interface(setting: Setting) -> Finding:
    """Which interface ranks on several nodes would use."""
    here = interfaces()
    others = [one for one in here if not one.loopback and one.address is not None]
    shown = ", ".join(f"{one.name} {one.address}{_speed(one)}" for one in others) or "only loopback"
    for name in (GLOO, NCCL):
        wanted = os.environ.get(name)
        if wanted and not means_any(name, wanted, [one.name for one in here]):
            return failure(
                f"{name} is {wanted}, but the interfaces that are up are {', '.join(one.name for one in here)}",
                f"unset {name}, or name one of these",
            )
    if not any(one.loopback for one in here):
        return failure(f"the loopback interface is down; {shown}", "ip link set lo up")
    if setting.nodes == 1:
        return ok(f"{shown}; one node uses loopback")
    if not others:
        return failure("only loopback, but the run has several nodes", "have a network interface configured")
    name, address = socket.gethostname(), resolve(socket.gethostname())
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return ok(f"{shown}; GLOO_SOCKET_IFNAME is {os.environ['GLOO_SOCKET_IFNAME']}")
    best = next((one for one in others if not one.name.startswith(NOT_CHOSEN)), others[0])
    remedy = f"export GLOO_SOCKET_IFNAME={best.name} NCCL_SOCKET_IFNAME={best.name} on every node"
    if address is None:
        return failure(f"{shown}; the name of this node, {name}, has no address", remedy)
    if address.startswith("127."):
        # shoal finds another by itself; other programs on this node may not.
        return warning(f"{shown}; {name} is {address} here, which the other nodes cannot reach", remedy)
    if len(others) > 1 and "NCCL_SOCKET_IFNAME" not in os.environ:
        return warning(f"{shown}; {name} is {address}, and NCCL may choose another", remedy)
    return ok(f"{shown}; {name} is {address}")


def check_ports(setting: Setting) -> Finding:
    """Ports of this node can be opened and reached, and those that were asked for answer."""
    findings = [_reach_own("127.0.0.1")]
    if setting.nodes > 1:
        findings += [_reach_own(one.address) for one in interfaces() if one.address and not one.loopback]
    findings += [reach(address) for address in setting.addresses]
    found = worst(findings)
    return found if found.status != "ok" else ok("; ".join(one.found for one in findings))


def check_nccl(setting: Setting) -> Finding:
    """Its version, InfiniBand, and settings that make it slow."""
    version = setting.torch.nccl
    links = active_infiniband()
    found = "not in this build of torch; collectives use Gloo" if version is None else version
    if links:
        found += f"; InfiniBand: {', '.join(f'{name} {rate}' for name, rate in links.items())}"
    slow = {name: what for name, what in SLOW.items() if os.environ.get(name, "0").lower() not in ("0", "", "off")}
    if slow:
        listed = ", ".join(f"{name}={os.environ[name]} ({what})" for name, what in slow.items())
        return warning(f"{found}; {listed}", f"unset {' '.join(slow)}, unless you are looking for an error")
    return ok(found)


def reach(address: str, seconds: float = CONNECT) -> Finding:
    """Connect to HOST:PORT. While nothing listens there, try again until `seconds` have passed."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    began = time.monotonic()
    if resolve(host) is None:
        return failure(f"{host} has no address", "check the name, DNS and /etc/hosts")
    error: OSError | None = None
    while (left := seconds - (time.monotonic() - began)) > 0:
        try:
            with socket.create_connection((host, int(port)), timeout=left):
                return ok(f"{address} answers in {(time.monotonic() - began) * 1e3:.0f} ms")
        except OSError as refused:
            error = refused
            time.sleep(min(0.2, max(0.0, left)))
    why = "nothing listens there" if isinstance(error, ConnectionRefusedError) else "no answer"
    return failure(
        f"{address} cannot be reached: {why} ({time.monotonic() - began:.0f} s)",
        "start what should listen there first; open the port in the firewall; see that the interface is the right one",
    )


def resolve(host: str, seconds: float = RESOLVE) -> str | None:
    """The address of a name; None: none, or not in time. A resolver may take minutes, so a thread asks it."""
    found: list[str] = []

    def ask() -> None:
        with suppress(OSError, UnicodeError):
            found.append(str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None


def active_infiniband() -> Mapping[str, str]:
    """Device → rate, of the InfiniBand ports that are active."""
    found = {}
    for port in sorted(INFINIBAND.glob("*/ports/*")):
        try:
            if "ACTIVE" in (port / "state").read_text():
                found[port.parent.parent.name] = (port / "rate").read_text().split("(")[0].strip()
        except OSError:
            continue
    return found


def _reach_own(address: str) -> Finding:
    try:
        with socket.socket() as server:
            server.bind((address, 0))
            server.listen(1)
            with socket.create_connection(server.getsockname(), timeout=CONNECT):
                return ok(f"this node reaches itself at {address}")
    except OSError as error:
        return failure(
            f"this node cannot reach itself at {address}: {error.strerror or error}",
            "allow connections from the node to itself in its firewall; ip link set lo up",
        )


def _gbit(name: str) -> float | None:
    try:
        megabit = int((INTERFACES / name / "speed").read_text())
    except (OSError, ValueError):
        return None
    return megabit / 1000 if megabit > 0 else None


def _speed(interface: Interface) -> str:
    return "" if interface.gbit is None else f" ({interface.gbit:g} Gbit/s)"
