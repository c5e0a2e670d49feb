"""Settings of the dialect. The defaults are what a stock language-only server expects."""

import ipaddress
from dataclasses import dataclass
from typing import Final, Literal
from urllib.parse import urlsplit

TransferBackend = Literal["auto", "zmq_to_scheduler", "zmq_to_tokenizer", "mooncake"]
_BACKENDS: Final = ("auto", "zmq_to_scheduler", "zmq_to_tokenizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangConfig:
    """Section `[sglang]`."""

    enabled: bool = True
    transfer_backend: TransferBackend = "auto"
    """`auto` serves both ZeroMQ backends, request by request; the other two refuse what is not theirs."""
    register_urls: tuple[str, ...] = ()
    """Bootstrap servers of language-only servers, `http://host:8997`, that are told of this encoder."""
    advertised_url: str | None = None
    """What they are told, `http://host:port`. None: this host's address on its default route, and the port served."""
    renew_period_s: float = 60.0
    """How often they are told again, so that one that was restarted learns of this encoder. 0: once."""
    send_video_sound: bool = False
    """Whether the sound of videos is encoded and sent. Off, videos are silent: release 0.5.23 takes in what it is sent
    and then refuses the request, because its check of MiMo prompts knows no sound but that of audio items."""
    embedding_data_module: str = "sglang.srt.disaggregation.encoder.receiver"
    """Where the reader's release has the class EmbeddingData. It has moved before."""
    modality_module: str = "sglang.srt.multimodal.modality"
    encode_timeout_s: float = 180.0
    """For all media of one part together."""
    send_timeout_s: float = 180.0
    """From the last row on: for the receivers to say where they are, and for each message to be on its way."""
    registration_timeout_s: float = 180.0
    """How long a receiver that comes first waits for its part."""
    connect_timeout_s: float = 15.0
    """For a receiver, which listens before it says where, to take the connection."""
    receiver_networks: tuple[str, ...] = ()
    """Networks, `10.0.0.0/8`, that embeddings may be pushed to. Empty: any address."""
    max_parts: int = 1024
    """At a time; more are refused with 503."""
    max_items: int = 1024
    """Media in one part."""
    max_waiting: int = 8192
    """Receivers that wait for their part at a time; more are refused with 503."""
    max_copied_bytes: int = 1024**3
    """Rows whose receivers are long in coming are moved out of the arena, as long as all together are below this."""
    max_body_bytes: int = 512 * 1024 * 1024
    """Of one call. Media may come inside it, as base64."""

    def __post_init__(self) -> None:
        if self.transfer_backend == "mooncake":
            raise ValueError(
                "transfer_backend is 'mooncake', which this encoder does not speak; start the language-only servers "
                "with --encoder-transfer-backend zmq_to_scheduler"
            )
        if self.transfer_backend not in _BACKENDS:
            raise ValueError(f"transfer_backend is {self.transfer_backend!r}, allowed is {', '.join(_BACKENDS)}")
        for name in ("encode_timeout_s", "send_timeout_s", "registration_timeout_s", "connect_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}, allowed is above 0")
        for name in ("max_parts", "max_items", "max_waiting", "max_body_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, allowed is 1 or more")
        for name in ("renew_period_s", "max_copied_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}, allowed is 0 or more")
        for name in ("embedding_data_module", "modality_module"):
            if not all(word.isidentifier() for word in getattr(self, name).split(".")):
                raise ValueError(f"{name} is {getattr(self, name)!r}, allowed is the dotted name of a Python module")
        for url in (*self.register_urls, *(() if self.advertised_url is None else (self.advertised_url,))):
            _check_url(url)
        for network in self.receiver_networks:
            # Raises ValueError in words of its own.
            ipaddress.ip_network(network)

    @property
    def networks(self) -> tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]:
        """`receiver_networks`, read."""
        return tuple(ipaddress.ip_network(network) for network in self.receiver_networks)


def _check_url(url: str) -> None:
    parts = urlsplit(url)
    # The other side appends a path to the text and compares it as a whole: a slash at the end makes it another encoder.
    if parts.scheme != "http" or not parts.hostname or parts.path or parts.query or parts.fragment:
        raise ValueError(f"{url!r} is not a URL of the form http://host:port, without a slash at the end")
