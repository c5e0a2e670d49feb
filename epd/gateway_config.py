"""Settings of the gateway. See `epd.config`, which gives them on."""

import re
from dataclasses import dataclass, field
from pathlib import Path

from epd.setting_checks import positive
from preprocess.config import FetchLimits

_ORIGIN = re.compile(r"https?://[^/\s?#@]+/?", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchPolicy:
    """What may be fetched for a client. `media_roots` opens file: URLs under these folders only."""

    media_roots: tuple[Path, ...] = ()
    allow_private_addresses: bool = False
    max_bytes: int = 256 << 20
    timeout_s: float = 20.0
    # For one connection to come about, and between two pieces of an answer.
    stall_timeout_s: float = 10.0
    # Downloads at a time: of all requests together, and of one.
    max_concurrency: int = 256
    max_concurrency_per_request: int = 64

    def __post_init__(self) -> None:
        positive(
            "fetch",
            max_bytes=self.max_bytes,
            timeout_s=self.timeout_s,
            stall_timeout_s=self.stall_timeout_s,
            max_concurrency=self.max_concurrency,
            max_concurrency_per_request=self.max_concurrency_per_request,
        )

    @property
    def limits(self) -> FetchLimits:
        """In the fetcher's own terms."""
        return FetchLimits(
            max_bytes=self.max_bytes,
            timeout_s=self.timeout_s,
            stall_timeout_s=self.stall_timeout_s,
            allow_private_addresses=self.allow_private_addresses,
            media_roots=self.media_roots,
            max_concurrency=self.max_concurrency,
            max_concurrency_per_request=self.max_concurrency_per_request,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """The HTTP side. Addresses are ZMQ endpoints: `ipc://` or `tcp://` of a process, or `tcp://NAME:PORT` of as many
    processes as the name has addresses."""

    model_dir: Path
    model_name: str
    host: str = "127.0.0.1"
    port: int = 8000
    encoders: tuple[str, ...] = ()
    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    fetch: FetchPolicy = field(default_factory=FetchPolicy)
    max_body_bytes: int = 512 << 20
    # How long a client may send nothing of its body, and how long a small body may take in all.
    body_timeout_s: float = 30.0
    # From the first byte of a request to the end of its head; as long again for TLS to come about before it.
    head_timeout_s: float = 30.0
    # Connections on which no request is under way; beyond that the one that waited longest is closed.
    max_idle_connections: int = 1024
    max_messages: int = 2048
    # Content parts and tool calls of all messages together, and the media among them.
    max_parts: int = 2048
    max_media: int = 256
    max_inflight: int = 256
    # Answers that a request may ask for of one prompt (`n`); as many of a request are written at the same time.
    max_choices: int = 16
    # Prompts of one request to /v1/completions.
    max_prompts: int = 128
    request_timeout_s: float = 300.0
    heartbeat_s: float = 0.5
    # Shorter than `EngineConfig.peer_timeout_s`: the gateway gives a silent worker up before the worker gives it up.
    worker_timeout_s: float = 15.0
    # How long a request waits for a stage that is down, at admission and before each further attempt. A killed stage is
    # missed at once and is back within this time unless the machine is very busy; clients are told to come back then.
    # One that hangs is given up after `worker_timeout_s`, killed after `SupervisorConfig.silence_s`: both count.
    restart_wait_s: float = 20.0
    # How often host names among the addresses are resolved again: what they stand for comes and goes.
    resolve_period_s: float = 5.0
    # Whether /ready asks for every process of every stage, or for one of each: where replicas come and go, one of them
    # is always coming or going.
    ready_needs_all: bool = True
    # How long answers may go on after the signal to stop; shorter than `SupervisorConfig.drain_s`, after which the
    # supervisor kills. What has not ended by then is ended with an error.
    drain_s: float = 10.0
    max_attempts: int = 3
    default_max_tokens: int = 512
    # Keys, or sha256:DIGEST of them; and a file with one a line, read again when it changes. None of either: no key is
    # asked for.
    api_keys: tuple[str, ...] = ()
    api_keys_file: Path | None = None
    # PEM files; both or neither. Read again when they change.
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    # Origins whose pages may use the API in a browser, "https://chat.example" or "*"; none is CORS off.
    cors_origins: tuple[str, ...] = ()
    # Names that this server is called by, while it listens on loopback only and asks for no key; addresses and
    # localhost always are.
    allowed_hosts: tuple[str, ...] = ()
    # Of each API key, or each address where there are no keys: requests that cost something, 0 for no limit. `burst`
    # may come at once after a pause, 0 for a minute's worth.
    requests_per_minute: int = 0
    requests_burst: int = 0
    max_inflight_per_client: int = 0
    # Where uploaded files are kept; gateways may share it. None, or files_bytes of 0: there is no /v1/files.
    files_dir: Path | None = None
    # Of each API key: what its files may take in all, and how many there may be.
    files_bytes: int = 4 << 30
    files_count: int = 10_000
    # Of one file. To be used as a medium it must also be within `FetchPolicy.max_bytes`.
    file_max_bytes: int = 256 << 20
    # When files go by themselves, counted from their upload; a client may ask for less.
    files_ttl_s: float = 30 * 86400.0
    # Content that clients may name again by uuid or key (`epd.gateway.media_shelf`), of all API keys together.
    media_shelf_bytes: int = 256 << 20
    # Of /v1/encode: rows on their way to clients, of all requests together. Beyond it they stay leased until sent.
    encode_reply_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        positive(
            "gateway",
            max_body_bytes=self.max_body_bytes,
            body_timeout_s=self.body_timeout_s,
            head_timeout_s=self.head_timeout_s,
            max_idle_connections=self.max_idle_connections,
            max_messages=self.max_messages,
            max_parts=self.max_parts,
            max_media=self.max_media,
            max_inflight=self.max_inflight,
            max_choices=self.max_choices,
            max_prompts=self.max_prompts,
            request_timeout_s=self.request_timeout_s,
            heartbeat_s=self.heartbeat_s,
            worker_timeout_s=self.worker_timeout_s,
            restart_wait_s=self.restart_wait_s,
            resolve_period_s=self.resolve_period_s,
            max_attempts=self.max_attempts,
            default_max_tokens=self.default_max_tokens,
            files_count=self.files_count,
            file_max_bytes=self.file_max_bytes,
            files_ttl_s=self.files_ttl_s,
        )
        for name in ("files_bytes", "media_shelf_bytes", "encode_reply_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"gateway.{name} is {getattr(self, name)}; it must not be negative")
        for name in ("requests_per_minute", "requests_burst", "max_inflight_per_client"):
            if getattr(self, name) < 0:
                raise ValueError(f"gateway.{name} is {getattr(self, name)}; allowed: 0 (no limit) or more")
        if self.requests_burst and not self.requests_per_minute:
            raise ValueError(f"gateway.requests_burst is {self.requests_burst}; it needs gateway.requests_per_minute")
        if (self.tls_certificate is None) != (self.tls_key is None):
            missing = "tls_certificate" if self.tls_certificate is None else "tls_key"
            raise ValueError(f"gateway.{missing} is not set; TLS needs tls_certificate and tls_key")
        for origin in self.cors_origins:
            if origin != "*" and _ORIGIN.fullmatch(origin) is None:
                raise ValueError(
                    f"gateway.cors_origins has {origin!r}; allowed: scheme and host, https://chat.example:8443, or *"
                )
        if self.drain_s < 0:
            raise ValueError(f"gateway.drain_s is {self.drain_s}; it must not be negative")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"gateway.port is {self.port}; allowed: 0 to 65535")
