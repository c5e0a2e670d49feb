"""Settings of the front: frozen, validated at birth, read once by `cli.load`."""

from dataclasses import dataclass, field
from pathlib import Path

from encoder.pace import PaceLimits
from preprocess.config import FetchLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeLimits:
    """Settings of `encoder.front.endpoint`; those of the same name in `FrontConfig` say what they mean."""

    model_name: str
    max_body_bytes: int
    max_file_bytes: int
    """Of a file in the body of an item."""
    body_pace: PaceLimits
    max_items: int
    max_reply_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontConfig:
    """The encoder's HTTP side. `encoders` are the ZMQ endpoints of its replicas (`ipc://` or `tcp://`)."""

    model_dir: Path
    model_name: str
    host: str = "127.0.0.1"
    port: int = 8000
    encoders: tuple[str, ...] = ()
    fetch: FetchLimits = field(default_factory=FetchLimits)
    max_body_bytes: int = 512 << 20
    # From the first byte of a request to the end of its headers.
    head_timeout_s: float = 30.0
    # Connections on which no request is under way: beyond it the one that waited longest is closed. As many again may
    # have said nothing yet, or nothing but probes.
    max_idle_connections: int = 1024
    # How long a client may send nothing of its body, ...
    body_timeout_s: float = 30.0
    # ... and how fast it must be, on average, when that time has passed since the body began.
    min_body_rate_bytes_s: float = 4096.0
    # Media of one request.
    max_items: int = 256
    # Media that are fetched or encoded at a time, of all requests and dialects together; one more is refused with 503.
    max_inflight: int = 256
    request_timeout_s: float = 300.0
    # Rows are copied out of the arena once they are there, so that a slow reader holds no room in it, as long as all
    # copies together are below this. Beyond it they stay leased until they are sent.
    max_reply_bytes: int = 1 << 30
    # How long a request waits while no replica is up; a killed one is back within this time as a rule.
    restart_wait_s: float = 20.0
    # How long answers may go on after the signal to stop; shorter than `SupervisorConfig.drain_s`.
    drain_s: float = 10.0
    api_keys: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        limits = ("max_body_bytes", "max_items", "max_inflight", "max_idle_connections", "min_body_rate_bytes_s")
        for name in (*limits, "head_timeout_s", "body_timeout_s", "request_timeout_s", "restart_wait_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"front.{name} is {getattr(self, name)}; it must be greater than 0")
        for name in ("drain_s", "max_reply_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"front.{name} is {getattr(self, name)}; it must not be negative")
        if self.max_items > self.max_inflight:
            raise ValueError(
                f"front.max_items is {self.max_items}; allowed: at most front.max_inflight, {self.max_inflight}"
            )
        if not 0 <= self.port <= 65535:
            raise ValueError(f"front.port is {self.port}; allowed: 0 to 65535")

    @property
    def encode_limits(self) -> EncodeLimits:
        """In the endpoint's own terms."""
        return EncodeLimits(
            model_name=self.model_name,
            max_body_bytes=self.max_body_bytes,
            max_file_bytes=self.fetch.max_bytes,
            body_pace=self.body_pace,
            max_items=self.max_items,
            max_reply_bytes=self.max_reply_bytes,
        )

    @property
    def body_pace(self) -> PaceLimits:
        """Of bodies in every dialect."""
        return PaceLimits(timeout_s=self.body_timeout_s, min_rate_bytes_s=self.min_body_rate_bytes_s)
