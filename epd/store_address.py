"""Addresses of stores, read without asking anybody: what is allowed, and which of two name the same server.

    local, local:/DIR
    redis[s]://[[USER]:PASSWORD@]HOST[:PORT][/DB]   unix://[[USER]:PASSWORD@]/SOCKET[?db=DB]   several parted by commas
    mooncake://MASTER:PORT[?OPTION=VALUE&...]

No message here quotes an address: it may hold a password.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Final
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

__all__ = ["MOONCAKE_OPTIONS", "REDIS_FORMS", "check_store", "mooncake_parts", "redis_name", "redis_nodes"]

REDIS_FORMS: Final = "redis[s]://[[USER]:PASSWORD@]HOST[:PORT][/DB] or unix://[[USER]:PASSWORD@]/SOCKET[?db=DB]"
MOONCAKE_OPTIONS: Final = ("host", "protocol", "devices", "replicas", "lend_bytes")
_FORMS: Final = (
    f"local, local:/DIR, {REDIS_FORMS} (several parted by commas), mooncake://MASTER:PORT[?OPTION=VALUE], or nothing"
)
# Those of redis-py that mean something as words of an address.
_TLS_OPTIONS: Final = (
    "ssl_ca_certs",
    "ssl_ca_path",
    "ssl_ca_data",
    "ssl_certfile",
    "ssl_keyfile",
    "ssl_password",
    "ssl_cert_reqs",
    "ssl_check_hostname",
    "ssl_ciphers",
)
_TLS_VALUES: Final = {
    "ssl_cert_reqs": ("none", "optional", "required"),
    "ssl_check_hostname": ("true", "false"),
}
_PORTS: Final = "1 to 65535"
_REDIS_PORT: Final = 6379
_REDIS_START: Final = re.compile(r"(rediss?|unix)://")
_NEXT_NODE: Final = re.compile(r",(?=(?:rediss?|unix)://)")
# What no address has, and what would end a line of the log.
_NO_TEXT: Final = re.compile(r"[\x00-\x1f\x7f]")
_HOST: Final = re.compile(r"[^\s,%?#@/]+|[0-9a-f:.]+(%\w+)?")


def check_store(store: str) -> None:
    """Raises ValueError, saying what is wrong and what is allowed, for what names no store; "" names none."""
    try:
        if store in ("", "local"):
            return
        if _NO_TEXT.search(store):
            raise ValueError("it holds a control character")
        if store.startswith("local:/"):
            return
        if _REDIS_START.match(store):
            redis_nodes(store)
            return
        if store.startswith("mooncake://"):
            mooncake_parts(store)
            return
    except ValueError as error:
        raise ValueError(f"{error}; allowed: {_FORMS}") from None
    raise ValueError(f"allowed: {_FORMS}")


def redis_nodes(store: str) -> list[str]:
    """Addresses of the servers. Raises ValueError, also for one that is named twice."""
    parts = _NEXT_NODE.split(store)
    names = [redis_name(part) for part in parts]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(f"it names {twice[0]} twice")
    return parts


def redis_name(url: str) -> str:
    """What is left of a Redis server's address without passwords and options, defaults filled in. Raises ValueError."""
    parts = _split(url)
    if parts.fragment:
        raise ValueError("the address of a Redis server holds a #; write %23 for it in a password")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    if parts.scheme == "unix":
        if parts.hostname or not parts.path.strip("/"):
            raise ValueError("the address of a Redis server's socket has no path: unix:///SOCKET")
        database = _database(options.pop("db", "0"))
        _check_options(options, ("db",), "of a Redis server's socket")
        return f"unix://{unquote(parts.path)}?db={database}"
    if parts.scheme not in ("redis", "rediss"):
        raise ValueError("it names no Redis server")
    host = _host(parts)
    port = _port(parts) or _REDIS_PORT
    database = _database(parts.path.strip("/") or "0")
    _check_options(options, _TLS_OPTIONS if parts.scheme == "rediss" else (), f"of {parts.scheme}://")
    for name, allowed in _TLS_VALUES.items():
        if options.get(name, allowed[0]).lower() not in allowed:
            raise ValueError(f"{name} of a Redis server's address has a strange value, and not {_listed(allowed)}")
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{port}/{database}"


def mooncake_parts(url: str) -> tuple[str, int, dict[str, str]]:
    """Host and port of a Mooncake master, and the options. Raises ValueError."""
    parts = _split(url)
    if parts.scheme != "mooncake" or parts.path.strip("/") or parts.fragment:
        raise ValueError("the address of a Mooncake store is mooncake://MASTER:PORT[?OPTION=VALUE]")
    host, port = _host(parts), _port(parts)
    if port is None:
        raise ValueError(f"the address of a Mooncake store has no port, of {_PORTS}")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    _check_options(options, MOONCAKE_OPTIONS, "of a Mooncake store")
    protocol = options.get("protocol", "tcp")
    if protocol not in ("tcp", "rdma"):
        raise ValueError(f"protocol of a Mooncake store is {protocol!r}, and not tcp or rdma")
    for name, least in (("replicas", 1), ("lend_bytes", 0)):
        text = options.get(name, str(least))
        if not (_is_number(text) and int(text) >= least):
            raise ValueError(f"{name} of a Mooncake store is {text!r}; it must be a whole number from {least} on")
    return host, port, options


def _split(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError:
        raise ValueError("an address has a [ or ] that belongs to no IPv6 address") from None


def _host(parts: SplitResult) -> str:
    host = parts.hostname or ""
    if "@" in parts.path and "@" not in parts.netloc:
        raise ValueError(f"an address {parts.scheme}:// has a / in its password; write %2F")
    if not host:
        raise ValueError(f"an address {parts.scheme}:// names no host")
    if _HOST.fullmatch(host) is None:
        raise ValueError(f"an address {parts.scheme}:// names a strange host")
    return host


def _port(parts: SplitResult) -> int | None:
    """None where none is named."""
    try:
        port = parts.port
    except ValueError:
        port = 0
    if port == 0:
        # What stands there may be a piece of a password that holds a slash.
        text = parts.netloc.rpartition(":")[2]
        shown = f" is {text}" if _is_number(text) else ""
        raise ValueError(f"the port of an address {parts.scheme}://{shown or ' is no number'}, but ports are {_PORTS}")
    return port


def _database(text: str) -> int:
    if not _is_number(text):
        raise ValueError("the database in a Redis server's address is no whole number")
    return int(text)


def _check_options(options: dict[str, str], allowed: tuple[str, ...], of_what: str) -> None:
    unknown = sorted(options.keys() - {*allowed})
    if unknown:
        # Its name alone: what is unknown may be a piece of a password.
        name = unknown[0] if re.fullmatch(r"[a-z_]{1,32}", unknown[0]) else "with a strange name"
        raise ValueError(f"an address {of_what} has the option {name}; options it may have: {_listed(allowed)}")


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names) or "none"


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 18
