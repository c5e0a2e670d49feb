"""The two calls of the dialect, checked: bodies of JSON to frozen values. Keys that are not known are left aside."""

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from encoder.quoting import shown
from encoder.sglang.config import SglangConfig
from encoder.sglang.errors import BadRequest, DialectError
from encoder.sglang.items import Item, modality_of, read_items
from encoder.sglang.message import PartId

MAX_ID_CHARS: Final = 1024
_MAX_RECEIVERS: Final = 4096
_MAX_PARTS: Final = 65536
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
    num_parts = _integer(body, "num_parts", 1, _MAX_PARTS)
    part_idx = _integer(body, "part_idx", 0, num_parts - 1)
    hashes = body.get("hashes")
    if hashes is not None and not isinstance(hashes, (list, str, int)):
        raise BadRequest(f"hashes is {shown(hashes)}, allowed is null, a list and a single hash")
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
        raise BadRequest(f"receive_url is {_given(url)}, allowed is a string, host:port")
    host, colon, port = url.rpartition(":")
    if not colon or not (port.isascii() and port.isdigit() and len(port) <= 5):
        raise BadRequest(f"receive_url is {shown(url)}, allowed is host:port")
    endpoint = endpoint_of(host.removeprefix("[").removesuffix("]"), int(port), config, fields=("receive_url",) * 2)
    return Registration(req_id, endpoint, _integer(body, "receive_count", 1, _MAX_RECEIVERS))


def is_id(value: object) -> bool:
    """Whether a part may be called this."""
    return isinstance(value, str) and 0 < len(value) <= MAX_ID_CHARS


def read_id(body: Mapping[str, Any]) -> str:
    """Raises BadRequest."""
    req_id = body.get("req_id")
    if not is_id(req_id):
        raise BadRequest(f"req_id is {_given(req_id)}, allowed is a string of 1 to {MAX_ID_CHARS} characters")
    return str(req_id)


def endpoint_of(host: str, port: int, config: SglangConfig, *, fields: tuple[str, str]) -> str:
    """What ZeroMQ connects to. Raises BadRequest for what is no host or port, or lies outside the allowed networks.

    `fields` are where host and port were given.
    """
    of_host, of_port = fields
    if not 1 <= port <= 65535:
        raise BadRequest(f"{of_port} is {shown(port)}, allowed is a port, 1 to 65535")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        address = None
    is_ipv6 = isinstance(address, ipaddress.IPv6Address) and _is_word(host.replace(":", "").replace("%", ""))
    # What ends in a number is meant as an address.
    is_name = address is None and _is_word(host) and not host.rstrip(".").rpartition(".")[2].isdigit()
    if not (is_ipv6 or is_name or isinstance(address, ipaddress.IPv4Address)):
        raise BadRequest(f"{of_host} is {shown(host)}, allowed is a host's name or an IP address")
    if config.networks and (address is None or not any(address in network for network in config.networks)):
        allowed = ", ".join(config.receiver_networks)
        raise BadRequest(
            f"{of_host} is {shown(host)}, allowed is an address of the networks that embeddings may be pushed to, "
            f"{allowed} (receiver_networks)"
        )
    return f"tcp://[{host}]:{port}" if is_ipv6 else f"tcp://{host}:{port}"


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
        raise BadRequest(f"prefill_host is {_given(host)}, allowed is a host's name or an IP address")
    numbers = ports if isinstance(ports, list) else [ports]
    if not numbers or len(numbers) > _MAX_RECEIVERS:
        raise BadRequest(
            f"embedding_port is {shown(ports)}, allowed is null, a port, or an array of 1 to {_MAX_RECEIVERS} ports"
        )
    endpoints: dict[str, None] = {}
    for index, port in enumerate(numbers):
        field = f"embedding_port[{index}]" if isinstance(ports, list) else "embedding_port"
        # Not isinstance: true is an int to Python.
        if type(port) is not int:
            raise BadRequest(f"{field} is {shown(port)}, allowed is a port, 1 to 65535")
        endpoints[endpoint_of(host, port, config, fields=("prefill_host", field))] = None
    return tuple(endpoints), isinstance(ports, list)


def _demand(backend: str, config: SglangConfig) -> None:
    if config.transfer_backend not in ("auto", backend):
        raise DialectError(
            f"this call is one of {backend}, and this encoder was started for {config.transfer_backend}; set "
            "--encoder-transfer-backend of the language-only server, or transfer_backend here, to the same"
        )


def _given(value: object) -> str:
    return "missing" if value is None else shown(value)


def _integer(body: Mapping[str, Any], name: str, lowest: int, highest: int) -> int:
    value = body.get(name)
    # Not isinstance: true is an int to Python.
    if type(value) is not int or not lowest <= value <= highest:
        raise BadRequest(f"{name} is {_given(value)}, allowed is a whole number, {lowest} to {highest}")
    return value
