"""The two calls of the dialect, checked: bodies of JSON to frozen values. Keys that are not known are left aside."""

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from encoder.sglang.config import SglangConfig
from encoder.sglang.errors import BadRequest, DialectError
from encoder.sglang.items import Item, modality_of, read_items
from encoder.sglang.message import PartId

MAX_ID_CHARS: Final = 1024
_MAX_RECEIVERS: Final = 4096
_MAX_HOST_CHARS: Final = 255


@dataclass(frozen=True, slots=True)
class EncodeCall:
    """One part: `POST /encode`."""

    part: PartId
    items: tuple[Item, ...]
    endpoints: tuple[str, ...] | None
    """Where to push. None: the receivers say so themselves."""
    is_shared: bool = True
    """The receivers' sockets serve many requests, so that a connection is worth keeping."""


@dataclass(frozen=True, slots=True)
class Registration:
    """One receiver: `POST /scheduler_receive_url`."""

    req_id: str
    endpoint: str
    receive_count: int


def read_encode(body: Mapping[str, Any], config: SglangConfig) -> EncodeCall:
    """Raises BadRequest, or DialectError 500 for a destination of the other backend, as a stock encoder does."""
    req_id = read_id(body)
    modality = modality_of(body.get("modality"))
    num_parts = _integer(body, "num_parts", 1, None)
    part_idx = _integer(body, "part_idx", 0, num_parts - 1)
    hashes = body.get("hashes")
    if hashes is not None and not isinstance(hashes, (list, str, int)):
        raise BadRequest("hashes is neither a list nor a single hash")
    items = read_items(
        body.get("mm_items"), modality, max_items=config.max_items, is_silent=not config.send_video_sound
    )
    endpoints, is_shared = _endpoints(body, config)
    return EncodeCall(PartId(req_id, num_parts, part_idx, modality), tuple(items), endpoints, is_shared)


def read_registration(body: Mapping[str, Any], config: SglangConfig) -> Registration:
    """Raises BadRequest."""
    req_id = read_id(body)
    url = body.get("receive_url")
    if not isinstance(url, str):
        raise BadRequest("receive_url is missing or no string")
    host, colon, port = url.rpartition(":")
    if not colon or not (port.isascii() and port.isdigit() and len(port) <= 5):
        raise BadRequest(f"receive_url is {url[:80]!r}, allowed is host:port")
    endpoint = endpoint_of(host.removeprefix("[").removesuffix("]"), int(port), config)
    return Registration(req_id, endpoint, _integer(body, "receive_count", 1, _MAX_RECEIVERS))


def is_id(value: object) -> bool:
    """Whether a part may be called this."""
    return isinstance(value, str) and 0 < len(value) <= MAX_ID_CHARS


def read_id(body: Mapping[str, Any]) -> str:
    """Raises BadRequest."""
    req_id = body.get("req_id")
    if not is_id(req_id):
        shown = "missing" if req_id is None else f"{req_id!r}"[:80]
        raise BadRequest(f"req_id is {shown}, allowed is a string of 1 to {MAX_ID_CHARS} characters")
    return str(req_id)


def endpoint_of(host: str, port: int, config: SglangConfig) -> str:
    """What ZeroMQ connects to. Raises BadRequest for what is no host or port, or lies outside the allowed networks."""
    if not 1 <= port <= 65535:
        raise BadRequest(f"port is {port}, allowed is 1 to 65535")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        address = None
    if config.networks and (address is None or not any(address in network for network in config.networks)):
        raise BadRequest(f"{host[:80]!r} is not an address of the networks that embeddings may be pushed to")
    if isinstance(address, ipaddress.IPv6Address) and _is_word(host.replace(":", "").replace("%", "")):
        return f"tcp://[{host}]:{port}"
    if not _is_word(host):
        raise BadRequest(f"{host[:80]!r} is neither a host's name nor an address")
    return f"tcp://{host}:{port}"


def _is_word(text: str) -> bool:
    """Of what names, addresses and the zones of addresses are made of."""
    letters = text.translate({ord(sign): None for sign in ".-_"})
    return letters.isascii() and letters.isalnum() and len(text) <= _MAX_HOST_CHARS


def _endpoints(body: Mapping[str, Any], config: SglangConfig) -> tuple[tuple[str, ...] | None, bool]:
    """By the form of `embedding_port`: the receivers' own word, one tokenizer, or the older list of ranks."""
    ports = body.get("embedding_port")
    if ports is None:
        _demand("zmq_to_scheduler", config)
        return None, True
    _demand("zmq_to_scheduler" if isinstance(ports, list) else "zmq_to_tokenizer", config)
    host = body.get("prefill_host")
    if not isinstance(host, str) or not host:
        raise BadRequest("prefill_host is missing or no string")
    numbers = ports if isinstance(ports, list) else [ports]
    if not numbers or len(numbers) > _MAX_RECEIVERS or not all(type(port) is int for port in numbers):
        raise BadRequest("embedding_port is none of null, a port and a list of ports")
    endpoints = tuple(dict.fromkeys(endpoint_of(host, port, config) for port in numbers))
    return endpoints, isinstance(ports, list)


def _demand(backend: str, config: SglangConfig) -> None:
    if config.transfer_backend not in ("auto", backend):
        raise DialectError(
            f"this call is one of {backend}, and this encoder was started for {config.transfer_backend}; set "
            "--encoder-transfer-backend of the language-only server, or transfer_backend here, to the same"
        )


def _integer(body: Mapping[str, Any], name: str, lowest: int, highest: int | None) -> int:
    value = body.get(name)
    # Not isinstance: true is an int to Python.
    if type(value) is not int or value < lowest or (highest is not None and value > highest):
        allowed = f"{lowest} or more" if highest is None else f"{lowest} to {highest}"
        raise BadRequest(f"{name} is {repr(value)[:40]}, allowed is a whole number, {allowed}")
    return value
