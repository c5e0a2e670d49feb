"""What pages of a browser may do here: those of other sites nothing, unless they are named (CORS, Fetch standard).

    Origin absent                    no page, or one of ours that reads: as ever
    Origin is this server's own      the page at /
    Origin is allowed                as ever, and the browser may show the answer to the page
    any other Origin                 reading is left to the browser to refuse; what changes or costs is refused here

A name that somebody points at this machine to make a browser talk to it (DNS rebinding) is no name of this server:
while it listens on loopback only and asks for no key, it answers to addresses, to localhost and to names that it was
told.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from urllib.parse import urlsplit

from aiohttp import web

from epd.errors import ForeignPage

_READING = frozenset({"GET", "HEAD", "OPTIONS"})
_EXPOSED = (
    "X-Request-Id, Retry-After, X-RateLimit-Limit-Requests, X-RateLimit-Remaining-Requests, X-RateLimit-Reset-Requests"
)
_MAX_AGE_S = 600


class Origins:
    """The rule of one gateway."""

    def __init__(self, allowed: tuple[str, ...], *, host: str, names: tuple[str, ...], asks_for_keys: bool) -> None:
        """`allowed` origins ("https://chat.example", or "*" for any); `host` that is listened on; further `names` of
        this server. A page that makes a browser come here has no key."""
        self._allowed = frozenset(origin.rstrip("/").lower() for origin in allowed)
        self._names = frozenset(name.lower().removesuffix(".") for name in names)
        self._minds_names = not asks_for_keys and _is_loopback(host)

    def check(self, request: web.Request) -> None:
        """Raises ForeignPage."""
        if self._minds_names and not self._is_ours(request.headers.get("Host", "")):
            raise ForeignPage(
                f"this server is not called {request.headers.get('Host', '')[:80]!r}; allowed: addresses, localhost "
                "and gateway.allowed_hosts"
            )
        origin = request.headers.get("Origin")
        if origin is None or request.method in _READING or self._is_allowed(origin) or _is_own(origin, request):
            return
        raise ForeignPage(
            f"a page of {origin[:80]!r} may not ask this server; allowed: its own page and gateway.cors_origins"
        )

    def headers(self, request: web.Request) -> Mapping[str, str]:
        """What every answer carries for the browser; none while no origin is allowed."""
        if not self._allowed:
            return {}
        origin = request.headers.get("Origin")
        if origin is None or not self._is_allowed(origin):
            return {"Vary": "Origin"}
        return {
            "Vary": "Origin",
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Expose-Headers": _EXPOSED,
        }

    def preflight(self, request: web.Request) -> web.Response | None:
        """The answer to a browser that asks whether a page may; None for any other request."""
        origin = request.headers.get("Origin")
        method = request.headers.get("Access-Control-Request-Method")
        if request.method != "OPTIONS" or origin is None or method is None or not self._is_allowed(origin):
            return None
        asked = request.headers.get("Access-Control-Request-Headers", "Authorization, Content-Type")
        headers = {
            "Access-Control-Allow-Methods": "GET, POST, DELETE",
            # Keys travel in a header that scripts set, never in cookies, so any header is as good as another.
            "Access-Control-Allow-Headers": asked,
            "Access-Control-Max-Age": str(_MAX_AGE_S),
        }
        return web.Response(status=204, headers={**headers, **self.headers(request)})

    def _is_allowed(self, origin: str) -> bool:
        return "*" in self._allowed or origin.lower() in self._allowed

    def _is_ours(self, host: str) -> bool:
        name = _name_of(host)
        if name is None or name == "localhost" or name.endswith(".localhost") or {"*", name} & self._names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _name_of(host: str) -> str | None:
    """The name in a Host header, lower case, without port; None where there is none."""
    try:
        name = urlsplit(f"//{host}").hostname
    except ValueError:
        # No name at all, so nobody's.
        return ""
    # One dot at the end says that nothing comes after it: the same name.
    return None if name is None else name.removesuffix(".")


def _is_own(origin: str, request: web.Request) -> bool:
    return origin.lower() == f"{request.scheme}://{request.headers.get('Host', '')}".lower()
