"""Checks of one deployment: its settings, checkpoint, port and stores, and what earlier ones have left."""

import fcntl
import os
import shutil
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from cli.cluster import ClusterConfig, cluster_keys
from cli.doctor_check import Check
from cli.doctor_machine import Needs
from cli.load import ConfigError, ServeConfig
from cli.load_role import EncoderDeployment, RoleDeployment
from cli.models import cache_dir, kv_store_dir
from cli.plan_units import gib
from cli.port_owner import port_owner
from cli.preflight import check_deployment
from cli.terminal import os_words
from epd import mooncake_parts, redis_nodes
from epd.config import EngineConfig

_STORE_MEMORY_BYTES: Final = 128 << 20
_OWN_FILES: Final = 1024
_FILES_PER_REQUEST: Final = 8
_LARGEST_TOWERS_BYTES: Final = 3 << 30
_CONNECT_TIMEOUT_S: Final = 1.0
_LOW_DISK_BYTES: Final = 1 << 30
_SHM: Final = Path("/dev/shm")
_STORE_FIX: Final = "start it, or correct engine.kv_store or encoder.embedding_store; without it nothing is kept there"

Deployment = ServeConfig | EncoderDeployment | RoleDeployment


def needs_of(config: Deployment) -> Needs:
    """What its processes take together, weights as the files are."""
    weight_bytes = sum(file.stat().st_size for file in config.model_dir.rglob("*.safetensors") if file.is_file())
    engines = engines_of(config)
    on_host = [engine for engine in engines if engine.device.startswith("cpu")]
    memory_bytes = sum(engine.kv_budget_bytes for engine in on_host)
    memory_bytes += sum(engine.host_budget_bytes + engine.embedding_buffer_bytes for engine in engines)
    towers_on_host = [encoder for encoder in config.encoders if encoder.device.startswith("cpu")]
    local = [engine for engine in engines if engine.kv_store.startswith("local")]
    store_bytes = (local[0].kv_store_memory_bytes or _STORE_MEMORY_BYTES) if local else 0
    return Needs(
        shared_memory_bytes=store_bytes + (config.encoders[0].arena_bytes if config.encoders else 0),
        memory_bytes=memory_bytes,
        weight_bytes=len(towers_on_host) * _tower_bytes(config, weight_bytes) + len(on_host) * weight_bytes,
        num_threads=sum(encoder.tower_threads for encoder in config.encoders)
        + sum(worker.threads for worker in engines),
        num_files=_OWN_FILES + _FILES_PER_REQUEST * _num_requests(config),
        on_cpu=bool(on_host or towers_on_host),
        on_cuda=len(on_host) < len(engines) or len(towers_on_host) < len(config.encoders),
    )


def engines_of(config: Deployment) -> tuple[EngineConfig, ...]:
    return () if isinstance(config, EncoderDeployment) else (*config.prefill, *config.decode)


def _num_requests(config: Deployment) -> int:
    if isinstance(config, EncoderDeployment):
        return config.front.max_inflight
    return config.gateway.max_inflight if config.gateway is not None else 0


def _tower_bytes(config: Deployment, weight_bytes: int) -> int:
    """At most: an encoder loads towers alone, the tokenizer's file and of the others a part that is small."""
    tokenizer = sum(file.stat().st_size for file in (config.model_dir / "audio_tokenizer").glob("*.safetensors"))
    return min(weight_bytes, tokenizer + _LARGEST_TOWERS_BYTES)


def check_settings(config: Deployment) -> list[Check]:
    """Checkpoint, ports, the other machines, stores."""
    checks = [_checkpoint(config)]
    if isinstance(config, RoleDeployment):
        checks += _cluster(config.cluster)
    server = config.front if isinstance(config, EncoderDeployment) else config.gateway
    if server is not None:
        checks.append(check_port(server.host, server.port))
    stores = {engine.kv_store for engine in engines_of(config)}
    stores |= {encoder.embedding_store for encoder in config.encoders}
    for store in sorted(stores):
        checks += check_store_reachable(store)
    return checks


def _cluster(config: ClusterConfig) -> list[Check]:
    """The secret, the address that is listened on, and whoever is to be asked."""
    checks = []
    try:
        cluster_keys(config)
    except ConfigError as error:
        checks.append(Check("cluster key", "fail", str(error), "mimo serve --help tells of --cluster-key-file"))
    if config.listen:
        parts = urlsplit(config.listen)
        checks.append(check_port(parts.hostname or "0.0.0.0", parts.port or 0))
    for address in (*config.prefill, *config.decode, *config.encoders):
        parts = urlsplit(address)
        fix = "start that role there, or correct the address; the gateway waits for it"
        checks.append(_reach(address, (parts.hostname or "", parts.port or 0), None, name="cluster", fix=fix))
    return checks


def _checkpoint(config: Deployment) -> Check:
    if isinstance(config, ServeConfig):
        try:
            check_deployment(config)
        except ConfigError as error:
            said = " ".join(line.strip() for line in str(error).splitlines())
            return Check("checkpoint", "fail", said, "mimo inspect MODEL tells more")
    return Check("checkpoint", "ok", f"{config.model_name} in {config.model_dir}")


def check_port(host: str, port: int) -> Check:
    """Whether a server could listen there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        owner = port_owner(port)
        said = f"cannot listen on {host}:{port}: {os_words(error)}" + (f", by {owner}" if owner else "")
        return Check("port", "fail", said, "end that process, or choose another port with --port")
    return Check("port", "ok", f"{host}:{port} is free")


def check_store_reachable(store: str) -> list[Check]:
    """Of a store that is a server elsewhere: whether it answers. No line for what is on this host."""
    if store.startswith(("redis://", "rediss://", "unix:")):
        return [_reach_redis(node) for node in redis_nodes(store)]
    if store.startswith("mooncake:"):
        host, port, _ = mooncake_parts(store)
        return [_reach(f"mooncake://{host}:{port}", (host, port), None)]
    return []


def _reach_redis(node: str) -> Check:
    parts = urlsplit(node)
    if parts.scheme == "unix":
        return _reach(f"unix:{parts.path}", parts.path, b"PING\r\n")
    name = f"{parts.scheme}://{parts.hostname}:{parts.port or 6379}"
    greeting = None if parts.scheme == "rediss" else b"PING\r\n"
    return _reach(name, (parts.hostname or "localhost", parts.port or 6379), greeting)


def _reach(
    place_name: str,
    place: tuple[str, int] | str,
    greeting: bytes | None,
    *,
    name: str = "store",
    fix: str = _STORE_FIX,
) -> Check:
    """A greeting is answered by Redis with `+PONG`, or an error where a password is wanted: either way it is there."""
    try:
        with _connected(place) as connection:
            if greeting is not None:
                connection.sendall(greeting)
                if not connection.recv(64).startswith((b"+", b"-")):
                    return Check(name, "warn", f"{place_name} answers, but not as Redis does", fix)
    except OSError as error:
        return Check(name, "warn", f"{place_name} cannot be reached: {os_words(error)}", fix)
    return Check(name, "ok", f"{place_name} answers")


def _connected(place: tuple[str, int] | str) -> socket.socket:
    if isinstance(place, tuple):
        return socket.create_connection(place, timeout=_CONNECT_TIMEOUT_S)
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(_CONNECT_TIMEOUT_S)
    connection.connect(place)
    return connection


def check_caches(environ: Mapping[str, str]) -> list[Check]:
    """Directories that outlive a server: whether they can be written, and what they hold."""
    places = {"cache": cache_dir(environ), "KV on disk": kv_store_dir(environ)}
    return [_directory(name, place) for name, place in places.items()]


def _directory(name: str, directory: Path) -> Check:
    existing = directory
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    try:
        with tempfile.TemporaryFile(dir=existing):
            free_bytes = shutil.disk_usage(existing).free
    except OSError as error:
        fix = "make it writable, or name another in MIMO_CACHE_DIR (of KV: MIMO_KV_STORE_DIR)"
        return Check(name, "warn", f"{directory} cannot be written: {os_words(error)}", fix)
    held = f"{gib(_held_bytes(directory))} held" if existing == directory else "not there yet"
    said = f"{directory}: {held}, {gib(free_bytes)} free"
    if free_bytes < _LOW_DISK_BYTES:
        return Check(name, "warn", said, "make room (mimo cache clear --kv), or name another place in MIMO_CACHE_DIR")
    return Check(name, "ok", said)


def _held_bytes(directory: Path) -> int:
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
            except OSError:
                # Servers make and remove files meanwhile.
                continue
    return total


def check_stale(parent: Path | None = None, shm: Path = _SHM) -> Check:
    """What killed deployments have left: directories whose lock nobody holds, and their shared memory."""
    parent = Path(tempfile.gettempdir()) if parent is None else parent
    stale = [lock.parent for lock in parent.glob("mimo-*/supervisor.lock") if _is_free(lock)]
    segments = [segment for run in stale for segment in shm.glob(f"{run.name}-*")]
    if not stale:
        return Check("killed servers", "ok", "have left nothing")
    size_bytes = sum(segment.stat().st_blocks * 512 for segment in segments if segment.exists())
    said = f"{len(stale)} have left {gib(size_bytes)} of shared memory: {', '.join(run.name for run in stale[:5])}"
    return Check(
        "killed servers",
        "warn",
        said,
        "mimo serve removes it at its next start, or: rm -r "
        + " ".join([*(str(run) for run in stale[:5]), *(str(segment) for segment in segments[:5])]),
    )


def _is_free(lock: Path) -> bool:
    try:
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def configured(config: Deployment) -> str:
    """In a few words."""
    if isinstance(config, RoleDeployment):
        return f"{config.model_name}, role {config.role}"
    counted = {"encoder": len(config.encoders)}
    if isinstance(config, ServeConfig):
        counted |= {"prefill worker": len(config.prefill), "decode worker": len(config.decode)}
    counts = ", ".join(f"{count} {what}{'s'[: count != 1]}" for what, count in counted.items() if count)
    kind = f"mode {config.mode}" if isinstance(config, ServeConfig) else "role encoder"
    return f"{config.model_name}, {kind}: {counts}"
