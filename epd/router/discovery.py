"""Where the processes of each stage are now: names are resolved again and again, and replicas join and leave.

    tcp://prefill:7001 --resolve--> 10.0.0.4, 10.0.0.5   add both
    a moment later     --resolve--> 10.0.0.5, 10.0.0.9   add the last, retire the first
    DNS fails                                            keep what is known

A name stands for as many processes as it has addresses, as those of headless Services do. Addresses that are numbers or
sockets of this machine are added once and stay.
"""

import asyncio
import contextlib
import ipaddress
import logging
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from encoder.cluster import host_of

logger = logging.getLogger(__name__)

Resolve = Callable[[str], Awaitable[Sequence[str]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Where the processes of one stage are looked for, and who hears of them. `retire` means that no new work goes
    there; both are called with single addresses, on the loop."""

    name: str
    targets: tuple[str, ...]
    add: Callable[[str], None]
    retire: Callable[[str], None]


@dataclass(slots=True)
class _Sought:
    """One target: what it stands for by the last answer, None before the first."""

    addresses: frozenset[str] | None = None
    trouble: str = ""


@dataclass(slots=True)
class _Known:
    stage: Stage
    sought: dict[str, _Sought] = field(default_factory=dict)
    present: frozenset[str] = frozenset()


class Discovery:
    """Use as `async with discovery.running():`."""

    def __init__(self, stages: Sequence[Stage], *, period_s: float, resolve: Resolve | None = None) -> None:
        """`resolve` gives the IP addresses of a name or raises OSError."""
        self._period_s = period_s
        self._resolve = resolve_name if resolve is None else resolve
        self._first_answers = asyncio.Event()
        self._known = [_Known(stage, {target: _Sought() for target in stage.targets}) for stage in stages]

    def why_unknown(self, stage: str) -> list[str]:
        """Targets of a stage that have never been resolved, and why; for people."""
        return [
            f"{target}: {sought.trouble or 'not resolved yet'}"
            for known in self._known
            if known.stage.name == stage
            for target, sought in known.sought.items()
            if sought.addresses is None
        ]

    @asynccontextmanager
    async def running(self, *, first_s: float = 2.0) -> AsyncIterator[None]:
        """Keep the stages up to date while the block runs; it begins with what names say within `first_s`."""
        if not any(known.sought for known in self._known):
            self._first_answers.set()
        seeking = [asyncio.create_task(self._seek(known, target)) for known in self._known for target in known.sought]
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._first_answers.wait(), first_s)
            yield
        finally:
            for task in seeking:
                task.cancel()
            await asyncio.gather(*seeking, return_exceptions=True)

    async def _seek(self, known: _Known, target: str) -> None:
        if not is_name(target):
            self._found(known, target, [target])
            return
        port = target.rpartition(":")[2]
        while True:
            try:
                found = await self._resolve(host_of(target))
            except OSError as error:
                self._failed(known, target, str(error))
            else:
                self._found(known, target, [address_of(ip, port) for ip in found])
            await asyncio.sleep(self._period_s)

    def _failed(self, known: _Known, target: str, trouble: str) -> None:
        """The processes behind the name are no worse for it: what is gone shows as a broken connection."""
        sought = known.sought[target]
        if not sought.trouble:
            kept = "" if sought.addresses is None else "; the addresses known stay in use"
            logger.warning("%s cannot be resolved: %s%s", target, trouble, kept)
        sought.trouble = trouble

    def _found(self, known: _Known, target: str, addresses: Sequence[str]) -> None:
        sought = known.sought[target]
        if sought.trouble:
            logger.info("%s can be resolved again", target)
        sought.trouble, sought.addresses = "", frozenset(addresses)
        wanted = frozenset[str]().union(*(one.addresses or () for one in known.sought.values()))
        gone, new = known.present - wanted, wanted - known.present
        known.present = wanted
        for address in sorted(gone):
            logger.info("%s: %s is no longer listed", known.stage.name, address)
            known.stage.retire(address)
        for address in sorted(new):
            logger.info("%s: found %s", known.stage.name, address)
            known.stage.add(address)
        if all(sought.addresses is not None for one in self._known for sought in one.sought.values()):
            self._first_answers.set()


def is_name(address: str) -> bool:
    """Whether a ZMQ address has a host name in it, which may stand for others tomorrow."""
    if not address.startswith("tcp://"):
        return False
    try:
        ipaddress.ip_address(host_of(address))
    except ValueError:
        return True
    return False


def address_of(ip: str, port: str) -> str:
    """tcp://IP:PORT, in brackets for IPv6."""
    return f"tcp://[{ip}]:{port}" if ":" in ip else f"tcp://{ip}:{port}"


async def resolve_name(host: str) -> list[str]:
    """The IPv4 addresses of a name, or its IPv6 ones where it has no others: a process with both is still one.

    Raises OSError. On a thread of its own, since the system's resolver may take half a minute to fail.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[list[str]] = loop.create_future()

    def settle(found: list[str] | OSError) -> None:
        if answer.done():
            return
        if isinstance(found, OSError):
            answer.set_exception(found)
        else:
            answer.set_result(found)

    def look() -> None:
        found: list[str] | OSError
        try:
            entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            by_family = {
                family: [str(entry[4][0]) for entry in entries if entry[0] == family]
                for family in (socket.AF_INET, socket.AF_INET6)
            }
            found = sorted(set(by_family[socket.AF_INET] or by_family[socket.AF_INET6]))
        except OSError as error:
            found = error
        with contextlib.suppress(RuntimeError):
            # The loop may be closed by now.
            loop.call_soon_threadsafe(settle, found)

    threading.Thread(target=look, name=f"resolve {host}", daemon=True).start()
    return await answer
