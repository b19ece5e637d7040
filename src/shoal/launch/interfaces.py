"""The network interface through which this node reaches another: what gloo has to be told where a host name resolves to
a loopback address, as on Debian."""

import array
import fcntl
import socket
import struct
from contextlib import suppress

from shoal.launch.environment import is_loopback

_ADDRESS_OF = 0x8915  # Linux: SIOCGIFADDR
# Any address that is not ours: which interface has the default route. Nothing is sent.
_ELSEWHERE = "192.0.2.1"


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
