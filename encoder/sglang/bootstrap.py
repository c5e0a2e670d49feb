"""Telling language-only servers where this encoder is: register, register again now and then, unregister at the end."""

import asyncio
import ipaddress
import logging
import socket
from typing import Final

import aiohttp

from encoder.sglang.config import SglangConfig

logger = logging.getLogger(__name__)

_MAX_ATTEMPTS: Final = 30
_PAUSE_S: Final = 5.0
_TIMEOUT_S: Final = 5.0
_FAREWELL_S: Final = 2.0
# Nothing is sent there: the system is asked which of its addresses it would send from.
_ELSEWHERE: Final = ("192.0.2.1", 9)


class Bootstrap:
    """Keeps this encoder in the lists of all `register_urls`."""

    def __init__(self, config: SglangConfig, *, pause_s: float = _PAUSE_S) -> None:
        """`pause_s` lies between two attempts, of which there are 30."""
        self._config = config
        self._pause_s = pause_s
        self._url: str | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, host: str, port: int) -> None:
        """Begin. The listener must be up: the other side sends media as soon as it knows."""
        if not self._config.register_urls or self._tasks:
            return
        self._url = self._config.advertised_url or f"http://{_reachable(host)}:{port}"
        for server in self._config.register_urls:
            self._tasks.append(asyncio.create_task(self._keep(server, self._url)))

    async def stop(self) -> None:
        """Unregister everywhere, two seconds at most."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        url, self._url = self._url, None
        if url is None:
            return
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_FAREWELL_S)) as session:
            await asyncio.gather(
                *(
                    self._ask(session, "DELETE", f"{server}/unregister_encoder_url", url)
                    for server in self._config.register_urls
                )
            )

    async def _keep(self, server: str, url: str) -> None:
        """Until cancelled."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S)) as session:
            is_known = await self._register(session, server, url)
            while self._config.renew_period_s:
                await asyncio.sleep(self._config.renew_period_s)
                reached = await self._ask(session, "POST", f"{server}/register_encoder_url", url)
                if reached and not is_known:
                    logger.info("bootstrap server %s knows of %s again", server, url)
                is_known = reached

    async def _register(self, session: aiohttp.ClientSession, server: str, url: str) -> bool:
        for attempt in range(_MAX_ATTEMPTS):
            if attempt:
                await asyncio.sleep(self._pause_s)
            if await self._ask(session, "POST", f"{server}/register_encoder_url", url):
                logger.info("bootstrap server %s knows of %s", server, url)
                return True
        logger.error("bootstrap server %s took no registration of %s in %d attempts", server, url, _MAX_ATTEMPTS)
        return False

    async def _ask(self, session: aiohttp.ClientSession, method: str, address: str, url: str) -> bool:
        try:
            async with session.request(method, address, json={"url": url}) as response:
                if response.status == 200:
                    return True
                logger.info("%s answered with status %d", address, response.status)
        except (aiohttp.ClientError, OSError) as error:
            # A TimeoutError is an OSError.
            logger.debug("%s cannot be reached: %s", address, error)
        return False


def _reachable(host: str) -> str:
    """A host that is listened on, as a URL has it."""
    if host in ("", "0.0.0.0", "::"):
        return own_address()
    return f"[{host}]" if ":" in host else host


def own_address() -> str:
    """The address that other hosts reach this one by, in brackets if it is of IPv6; the loopback without a network."""
    for family, elsewhere in ((socket.AF_INET, _ELSEWHERE), (socket.AF_INET6, ("2001:db8::1", 9))):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(elsewhere)
                address = str(probe.getsockname()[0])
        except OSError:
            continue
        return f"[{address}]" if ipaddress.ip_address(address).version == 6 else address
    return "127.0.0.1"
