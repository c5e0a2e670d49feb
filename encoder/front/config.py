"""Settings of the front: frozen, validated at birth, read once by `cli.load`."""

from dataclasses import dataclass, field
from pathlib import Path

from preprocess.config import FetchLimits


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
    # How long a client may send nothing of its body, and how long a small body may take in all.
    body_timeout_s: float = 30.0
    # Media of one request.
    max_items: int = 256
    # Media that are fetched or encoded at a time, of all requests and dialects together; one more is refused with 503.
    max_inflight: int = 256
    request_timeout_s: float = 300.0
    # Rows are copied out of the arena once they are there, so that a slow reader holds no room in it, as long as all
    # copies together are below this. Beyond it they stay leased until they are sent.
    max_reply_bytes: int = 1 << 30
    # How long a request waits while no replica is up; a killed one is back within this time as a rule.
    restart_wait_s: float = 12.0
    # How long answers may go on after the signal to stop; shorter than `SupervisorConfig.drain_s`.
    drain_s: float = 10.0
    api_keys: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = ("max_body_bytes", "body_timeout_s", "max_items", "max_inflight", "request_timeout_s", "restart_wait_s")
        for name in names:
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
