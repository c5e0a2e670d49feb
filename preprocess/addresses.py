"""Which addresses a fetch may reach, and a resolver that hands out only those.

The check happens on resolved addresses and the connection is made to exactly the address that was checked, so a name
that answers differently the second time gains nothing.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from aiohttp.abc import AbstractResolver, ResolveResult

from preprocess.errors import MediaForbidden

Lookup = Callable[[str, int], Coroutine[Any, Any, list[str]]]
"""(host, port) to every address the name has. Raises OSError when it has none."""

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

# Where clouds keep what a machine knows of itself, keys included, outside the link-local range: Azure, Alibaba, Oracle,
# AWS and Google over IPv6. Some of these count as public, others as private; nothing opens them.
_METADATA: Final = frozenset(
    ipaddress.ip_address(text)
    for text in ("168.63.129.16", "100.100.100.200", "192.0.0.192", "fd00:ec2::254", "fd20:ce::254")
)
# Called global by some versions of `ipaddress`: protocol assignments, the retired relay of 6to4, the site-local range
# that preceded fc00::/7, and an address block for documentation.
_NOT_PUBLIC: Final = tuple(
    ipaddress.ip_network(text) for text in ("192.0.0.0/24", "192.88.99.0/24", "fec0::/10", "3fff::/20")
)
# What `allow_private_addresses` opens: this host and networks of one's own. Link-local addresses, where clouds keep
# their metadata services, multicast and the unspecified address stay closed.
_OWN_NETWORKS: Final = tuple(
    ipaddress.ip_network(text)
    for text in ("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "::1/128", "fc00::/7")
)
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")
_WEB_PORTS: Final = (80, 443)
_FIRST_USER_PORT: Final = 1024
_LOOKUP_THREADS: Final = 32


class SystemLookup:
    """The system's resolver, both address families.

    It blocks for as long as a name server takes, and nothing can stop it: it gets threads of its own, so that names
    on dead servers hold up other names at most, and not all else that the process runs on its default threads.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_LOOKUP_THREADS, thread_name_prefix="lookup")

    async def __call__(self, host: str, port: int) -> list[str]:
        """Raises OSError when the name has no address or cannot be a name."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, _system_addresses, host, port)

    def close(self) -> None:
        """Waits for nothing; lookups on their way end unheard."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _system_addresses(host: str, port: int) -> list[str]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except ValueError as error:
        # Empty and overlong labels, which Python's own encoding of names refuses in its way.
        raise OSError(f"{host[:80]!r} cannot be a name") from error
    return list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found))


def is_public(address: IpAddress) -> bool:
    """False for loopback, private, link-local, cloud metadata, multicast, reserved, and IPv6 forms wrapping one."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
        if address in _NAT64:
            inner.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        if any(wrapped is not None and not is_public(wrapped) for wrapped in inner):
            return False
        if address.ipv4_mapped is not None or address in _NAT64:
            return True
    if address in _METADATA or any(address in network for network in _NOT_PUBLIC):
        return False
    return address.is_global and not address.is_multicast and not address.is_reserved


def is_allowed(address: IpAddress, *, allow_private: bool) -> bool:
    """Public addresses, and with `allow_private` those of this host and of private networks, however wrapped."""
    if is_public(address):
        return True
    inner = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    plain = inner or address
    return allow_private and plain not in _METADATA and any(plain in network for network in _OWN_NETWORKS)


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
    """Resolver for aiohttp. One answer that is not allowed refuses the name, whatever its other answers are.

    Connections to one name that are opened at the same time share one lookup; nothing is kept after it.
    """

    def __init__(self, lookup: Lookup, *, allow_private_addresses: bool) -> None:
        self._lookup = lookup
        self._allow_private_addresses = allow_private_addresses
        self._running: dict[tuple[str, int], asyncio.Task[list[str]]] = {}

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Raises MediaForbidden, or OSError when the name does not resolve."""
        results = []
        for text in await self._addresses(host, port):
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
        """Nobody waits for the lookups on their way any more."""
        for task in self._running.values():
            task.cancel()

    async def _addresses(self, host: str, port: int) -> list[str]:
        running = self._running.get((host, port))
        if running is None:
            running = asyncio.create_task(self._lookup(host, port))
            self._running[host, port] = running
            running.add_done_callback(lambda done: self._ended((host, port), done))
        # Shielded: one connection given up must not take the answer from the others.
        return await asyncio.shield(running)

    def _ended(self, name: tuple[str, int], task: asyncio.Task[list[str]]) -> None:
        del self._running[name]
        if not task.cancelled():
            # Seen, whether or not anybody still waits for it.
            task.exception()
