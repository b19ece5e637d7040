"""The network interface through which this node reaches another: what gloo has to be told where a host name resolves to
a loopback address, as on Debian. And the interfaces that the user has named."""

import array
import fcntl
import os
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress

from shoal.launch.environment import is_loopback
from shoal.mistakes import UserMistake

_ADDRESS_OF = 0x8915  # Linux: SIOCGIFADDR
# Any address that is not ours: which interface has the default route. Nothing is sent.
_ELSEWHERE = "192.0.2.1"
GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


def check_interfaces(variables: Sequence[str]) -> None:
    """A UserMistake if one of these variables names a network interface that this node does not have: gloo and NCCL
    would find that out after minutes, or wait for each other."""
    here = [name for _, name in socket.if_nameindex()]
    for variable in variables:
        wanted = os.environ.get(variable)
        if wanted and not means_any(variable, wanted, here):
            raise UserMistake(
                f"{variable} is {wanted}, but the network interfaces of {socket.gethostname()} are {', '.join(here)}; "
                f"unset {variable}, or name one of these."
            )


def means_any(variable: str, wanted: str, here: Sequence[str]) -> bool:
    """Whether the value of a variable means interfaces that are here. Gloo's is a list of names, all of which have to
    be. NCCL's is a list of prefixes, or of names after a =; after a ^ it is what is left out."""
    if variable == GLOO:
        return set(wanted.split(",")) <= set(here)
    negated, exact = wanted.startswith("^"), wanted.lstrip("^").startswith("=")
    names = tuple(name.partition(":")[0] for name in wanted.lstrip("^=").split(",") if name)
    return any((name in names if exact else name.startswith(names)) != negated for name in here)


def interface_to(address: str) -> str | None:
    """The name of the interface whose address this node has on the way to `address`, which may be its own; None if
    there is none but loopback."""
    for target in (address, _ELSEWHERE):
        with suppress(OSError):
            if (own := own_address(target)) is not None and not is_loopback(own):
                for _, name in socket.if_nameindex():
                    if own in _addresses(name):
                        return name
    return None


def own_address(target: str) -> str | None:
    """The address of this node from which it would send to `target`."""
    for family, _, _, _, found in socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM):
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(found)  # chooses a route; a datagram socket sends nothing for it
            return str(probe.getsockname()[0])
    return None


def _addresses(name: str) -> list[str]:
    found = []
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = array.array("B", struct.pack("256s", name.encode()[:15]))
        fcntl.ioctl(probe.fileno(), _ADDRESS_OF, request)
        found.append(socket.inet_ntoa(request.tobytes()[20:24]))
    with suppress(OSError), open("/proc/net/if_inet6") as table:
        for line in table:
            digits, *_, interface = line.split()
            if interface == name:
                found.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    return found
