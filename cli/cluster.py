"""Settings of processes that serve one stage by itself: where they listen, whom they reach, and what makes them trust.

    [cluster]
    listen = "tcp://0.0.0.0:7002"          of role prefill, decode and encoder-worker
    advertise = "tcp://10.0.0.7:7002"      where others reach that; by default this machine's own address
    prefill = ["tcp://prefill:7001"]       of role gateway; also decode and encoders
    key_file = "/run/secrets/cluster-key"

The shared secret itself is never a setting: it is in the file, or in MIMO_CLUSTER_KEY.
"""

import ipaddress
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from cli.errors import ConfigError
from cli.terminal import os_words
from encoder.cluster import ClusterKeys, WeakSecret, host_of, needs_keys

KEY_VARIABLE = "MIMO_CLUSTER_KEY"
_ADDRESS = re.compile(r"tcp://(\[[0-9a-fA-F:.]+\]|[^\s:/\[\]@]+):([1-9][0-9]{0,4})")
_ANYWHERE = ("0.0.0.0", "::")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """`advertise` empty means this machine's own address. `health_port` None means no answers over HTTP there."""

    listen: str = ""
    advertise: str = ""
    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    encoders: tuple[str, ...] = ()
    # Holds the secret that all processes share, 32 random bytes at least.
    key_file: Path | None = None
    # Without a secret, everybody who reaches the ports can read and change what is said.
    insecure: bool = False
    health_host: str = "127.0.0.1"
    health_port: int | None = None

    def __post_init__(self) -> None:
        for key in ("listen", "advertise"):
            if getattr(self, key):
                _check_address(f"cluster.{key}", getattr(self, key))
        for key in ("prefill", "decode", "encoders"):
            for address in getattr(self, key):
                _check_address(f"cluster.{key}", address)
        if self.advertise and host_of(self.advertise) in _ANYWHERE:
            raise ValueError(f"cluster.advertise is {self.advertise!r}; allowed: an address that others can reach")
        if self.health_port is not None and not 1 <= self.health_port <= 65535:
            raise ValueError(f"cluster.health_port is {self.health_port}; allowed: 1 to 65535, or leave it out")

    @property
    def addresses(self) -> tuple[str, ...]:
        """Everything that is said goes to or comes from one of these."""
        return (*([self.listen] if self.listen else []), *self.prefill, *self.decode, *self.encoders)


def _check_address(key: str, address: str) -> None:
    found = _ADDRESS.fullmatch(address)
    if found is None or int(found[2]) > 65535:
        raise ValueError(f"{key} is {address!r}; allowed: tcp://HOST:PORT, such as tcp://prefill:7001")


def cluster_keys(config: ClusterConfig, environ: Mapping[str, str] | None = None) -> ClusterKeys | None:
    """The keys that are derived from the secret, None where nobody needs any.

    Raises ConfigError, which never holds the secret; also for an address beyond this machine without one.
    """
    environ = os.environ if environ is None else environ
    given = environ.get(KEY_VARIABLE)
    if config.key_file is not None and given is not None:
        raise ConfigError(f"cluster.key_file and {KEY_VARIABLE} are both set; give one")
    if config.key_file is None and given is None:
        open_to = [address for address in config.addresses if needs_keys(address)]
        if open_to and not config.insecure:
            raise ConfigError(
                f"{open_to[0]} is beyond this machine, and there is no cluster key; make one with openssl rand -base64 "
                f"32 > FILE and give it to every process with --cluster-key-file FILE or {KEY_VARIABLE}. On a network "
                "that nobody else can reach, --insecure-cluster does without"
            )
        return None
    if config.insecure:
        raise ConfigError("cluster.insecure is true and there is a cluster key; give one of them")
    try:
        secret = (given or "").encode() if config.key_file is None else config.key_file.read_bytes()
        return ClusterKeys.derive(secret)
    except OSError as error:
        raise ConfigError(f"cluster.key_file is {config.key_file}, which cannot be read: {os_words(error)}") from error
    except WeakSecret as error:
        where = KEY_VARIABLE if config.key_file is None else f"cluster.key_file {config.key_file}"
        raise ConfigError(f"{where}: {error}") from error


def with_advertised(config: ClusterConfig) -> ClusterConfig:
    """With the address that others are told, where none was chosen. Raises ConfigError where there is none."""
    if config.advertise or not config.listen:
        return config
    if host_of(config.listen) not in _ANYWHERE:
        return replace(config, advertise=config.listen)
    host, port = own_address(), config.listen.rpartition(":")[2]
    if host is None:
        raise ConfigError(
            f"cluster.listen is {config.listen}, and this machine's own address cannot be told; give --advertise "
            f"tcp://HOST:{port}"
        )
    return replace(config, advertise=f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}")


def own_address() -> str | None:
    """The address this machine speaks to others from; None where it has no other than loopback. Sends nothing."""
    for family, elsewhere in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((elsewhere, 9))
                host = str(probe.getsockname()[0])
        except OSError:
            continue
        if not ipaddress.ip_address(host).is_loopback:
            return host
    try:
        host = socket.gethostbyname(socket.gethostname())
    except OSError:
        return None
    return None if ipaddress.ip_address(host).is_loopback else host


def near(address: str) -> str:
    """Where a process of this machine reaches what listens at `address`."""
    loopback = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host_of(address))
    return address if loopback is None else f"tcp://{loopback}:{address.rpartition(':')[2]}"
