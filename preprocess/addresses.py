"""Which addresses a fetch may reach, and a resolver that hands out only those.

The check happens on resolved addresses and the connection is made to exactly the address that was checked, so a name
that answers differently the second time gains nothing.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable
from typing import Final

from aiohttp.abc import AbstractResolver, ResolveResult

from preprocess.errors import MediaForbidden

Lookup = Callable[[str, int], Awaitable[list[str]]]
"""(host, port) to every address the name has. Raises OSError when it has none."""

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

# What `allow_private_addresses` opens: this host and networks of one's own. Link-local addresses, where clouds keep
# their metadata services, multicast and the unspecified address stay closed.
_OWN_NETWORKS: Final = tuple(
    ipaddress.ip_network(text)
    for text in ("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "::1/128", "fc00::/7")
)
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")
_WEB_PORTS: Final = (80, 443)
_FIRST_USER_PORT: Final = 1024


async def system_lookup(host: str, port: int) -> list[str]:
    """The system's resolver, both address families."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found))


def is_public(address: IpAddress) -> bool:
    """False for loopback, private, link-local (cloud metadata), multicast, reserved, and IPv6 forms wrapping one."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
        if address in _NAT64:
            inner.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        if any(wrapped is not None and not is_public(wrapped) for wrapped in inner):
            return False
        if address.ipv4_mapped is not None or address in _NAT64:
            return True
    return address.is_global and not address.is_multicast and not address.is_reserved


def is_allowed(address: IpAddress, *, allow_private: bool) -> bool:
    """Public addresses, and with `allow_private` those of this host and of private networks, however wrapped."""
    if is_public(address):
        return True
    inner = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return allow_private and any((inner or address) in network for network in _OWN_NETWORKS)


def check_endpoint(host: str, port: int, *, allow_private: bool = False) -> None:
    """Refuses a URL's host and port as far as that is possible without resolving.

    Raises MediaForbidden for literal addresses that are not allowed, for the old numeric spellings (`2130706433`,
    `127.1`, `0x7f.1`) that some libraries resolve and others do not and, unless private addresses are allowed, for
    ports below 1024 other than 80 and 443.
    """
    if not allow_private and port not in _WEB_PORTS and port < _FIRST_USER_PORT:
        raise MediaForbidden(f"port {port} of {host} is not allowed; allowed are 80, 443 and {_FIRST_USER_PORT} up")
    try:
        literal = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        last_label = host.rstrip(".").rpartition(".")[2].lower()
        if last_label.isdigit() or last_label.startswith("0x"):
            raise MediaForbidden(f"{host} is a numeric host that is not an ordinary address") from None
        return
    _check(host, literal, allow_private=allow_private)


def _check(host: str, address: IpAddress, *, allow_private: bool) -> None:
    if not is_allowed(address, allow_private=allow_private):
        # The address stays out of the message: it would map the inside of the network for the asker.
        why = "neither public nor on a private network" if allow_private else "not public"
        raise MediaForbidden(f"{host} is at an address that is {why}; such addresses are not allowed")


class CheckedResolver(AbstractResolver):
    """Resolver for aiohttp. One answer that is not public refuses the name, whatever its other answers are."""

    def __init__(self, lookup: Lookup, *, allow_private_addresses: bool) -> None:
        self._lookup = lookup
        self._allow_private_addresses = allow_private_addresses

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Raises MediaForbidden, or OSError when the name does not resolve."""
        results = []
        for text in await self._lookup(host, port):
            address = ipaddress.ip_address(text.partition("%")[0])
            _check(host, address, allow_private=self._allow_private_addresses)
            results.append(
                ResolveResult(
                    hostname=host,
                    host=text,
                    port=port,
                    family=socket.AF_INET if address.version == 4 else socket.AF_INET6,
                    proto=socket.IPPROTO_TCP,
                    flags=socket.AI_NUMERICHOST,
                )
            )
        return results

    async def close(self) -> None:
        """Nothing is held."""
