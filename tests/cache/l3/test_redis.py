"""A Redis server as a node: what it keeps for how long, who may come in, and what other answers than the usual mean."""

import re
import ssl
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import redis

from epd.cache.l3.base import NodeFailed, NodeTimedOut, Tended
from epd.cache.l3.open import open_store
from epd.cache.l3.redis_node import PREFIX, RedisNode
from tests.fakes.redis_server import RedisServer, running_redis

TIMEOUT_S = 5.0
SECRET = "hunter2%40"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with running_redis(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def plain(server: RedisServer) -> Iterator[redis.Redis]:
    """Another program's client of the same server."""
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
        yield client


@pytest.fixture
def node(server: RedisServer) -> Iterator[RedisNode]:
    node = RedisNode(server.url, ttl_s=100.0)
    yield node
    node.close()


def got(node: RedisNode, *keys: bytes) -> list[bytes | None]:
    found: dict[int, bytes | None] = {}

    def sink(index: int, value: memoryview | None) -> None:
        assert index not in found
        found[index] = None if value is None else bytes(value)

    node.get(keys, sink, timeout_s=TIMEOUT_S)
    return [found[index] for index in range(len(keys))]


def put(node: RedisNode, *items: tuple[bytes, bytes]) -> Sequence[bool]:
    return node.put([(key, [value]) for key, value in items], timeout_s=TIMEOUT_S)


def test_values_of_all_sizes_in_any_pieces(node: RedisNode) -> None:
    """Larger than the buffer, smaller, none; what reads like a reply is but bytes."""
    sizes = [0, 1, 2, 100, (1 << 14) - 1, 1 << 16, (1 << 16) + 3, 1 << 20, 5, 3 << 20, 7]
    values = {b"k%d" % size: (b"$5\r\n*1\r\n:0\r\n-ERR\r\n" * (size // 18 + 1))[:size] for size in sizes}
    items = [(key, [value[:3], memoryview(value)[3:50], bytearray(), value[50:]]) for key, value in values.items()]
    assert list(node.put(items, timeout_s=TIMEOUT_S)) == [True] * len(sizes)
    keys = [key for size in sizes for key in (b"k%d" % size, b"missing")]
    assert got(node, *keys) == [value for value in values.values() for value in (value, None)]


def test_more_keys_than_are_sent_at_once(node: RedisNode) -> None:
    keys = [b"%d\r\n" % number for number in range(2500)]
    assert all(put(node, *((key, key) for key in keys[::2])))
    assert list(node.exists(keys, timeout_s=TIMEOUT_S)) == [number % 2 == 0 for number in range(2500)]
    node.touch(keys, timeout_s=TIMEOUT_S)
    node.discard(keys[:2000], timeout_s=TIMEOUT_S)
    assert sum(node.exists(keys, timeout_s=TIMEOUT_S)) == 250


def test_what_is_read_or_touched_lives_on(node: RedisNode, plain: redis.Redis) -> None:
    names = [b"written", b"read", b"touched", b"asked for"]
    put(node, *((name, b"x") for name in names))
    assert all(99_000 < plain.pttl(PREFIX + name) <= 100_000 for name in names)
    for name in names:
        plain.pexpire(PREFIX + name, 5000)
    assert got(node, b"read") == [b"x"]
    node.touch([b"touched", b"absent"], timeout_s=TIMEOUT_S)
    assert node.exists([b"asked for"], timeout_s=TIMEOUT_S)
    lives = [plain.pttl(PREFIX + name) > 90_000 for name in names]
    assert lives == [False, True, True, False]
    assert not plain.exists(PREFIX + b"absent")


def test_without_a_time_to_live_the_server_decides(server: RedisServer, plain: redis.Redis) -> None:
    node = RedisNode(server.url, ttl_s=None)
    put(node, (b"k", b"x"))
    assert plain.pttl(PREFIX + b"k") == -1
    node.touch([b"k"], timeout_s=TIMEOUT_S)
    assert got(node, b"k") == [b"x"]
    assert plain.pttl(PREFIX + b"k") == -1
    node.close()


def test_what_has_expired_is_a_miss(server: RedisServer) -> None:
    node = RedisNode(server.url, ttl_s=0.05)
    put(node, (b"k", b"x"))
    time.sleep(0.1)
    assert got(node, b"k") == [None]
    assert list(node.exists([b"k"], timeout_s=TIMEOUT_S)) == [False]
    node.close()


def test_databases_are_apart(server: RedisServer, node: RedisNode) -> None:
    other = RedisNode(server.url.removesuffix("/0") + "/3", ttl_s=None)
    put(node, (b"k", b"zero"))
    put(other, (b"k", b"three"))
    assert (got(node, b"k"), got(other, b"k")) == ([b"zero"], [b"three"])
    other.close()


def test_what_another_program_keeps_under_our_name_is_a_miss(node: RedisNode, plain: redis.Redis) -> None:
    plain.lpush(PREFIX + b"list", b"x")
    put(node, (b"k", b"x"))
    assert got(node, b"k", b"list", b"k") == [b"x", None, b"x"]
    assert list(put(node, (b"list", b"ours"))) == [True]
    assert got(node, b"list") == [b"ours"]


def test_a_full_server_keeps_nothing_and_says_so(tmp_path: Path) -> None:
    with running_redis(tmp_path, "--maxmemory", "4mb", "--maxmemory-policy", "noeviction") as server:
        node = RedisNode(server.url, ttl_s=100.0)
        kept = put(node, *((b"%d" % number, bytes(1 << 20)) for number in range(6)))
        assert kept[0] is True
        assert kept[-1] is False
        assert "its memory is full" in node.why_unkept
        assert got(node, b"0") == [bytes(1 << 20)]
        assert got(node, b"5") == [None]
        assert isinstance(node, Tended)
        assert node.tend() is False
        usage = node.usage()
        assert usage.capacity_bytes == 4 << 20
        assert usage.num_records == sum(kept)
        assert usage.used_bytes is not None
        assert usage.used_bytes > sum(kept) << 20
        node.close()


def test_a_server_that_was_restarted_costs_no_call(tmp_path: Path) -> None:
    with running_redis(tmp_path) as server:
        node = RedisNode(server.url, ttl_s=100.0)
        put(node, (b"k", b"x"))
        server.kill()
        server.restart()
        assert got(node, b"k") == [None]
        assert list(put(node, (b"k", b"y"))) == [True]
        node.close()


def test_who_knows_the_password_comes_in(tmp_path: Path) -> None:
    with running_redis(tmp_path, "--requirepass", "hunter2@") as server:
        place = server.url.removeprefix("redis://")
        node = RedisNode(f"redis://:{SECRET}@{place}", ttl_s=None)
        put(node, (b"k", b"x"))
        with redis.Redis.from_url(f"redis://:{SECRET}@{place}") as plain:
            plain.acl_setuser("pages", enabled=True, passwords="+other", keys="*", commands=["+@all"])
        user = RedisNode(f"redis://pages:other@{place}", ttl_s=None)
        assert got(user, b"k") == [b"x"]
        for secret in (":wrong-hunter@", "nobody:wrong-hunter@", ""):
            stranger = RedisNode(f"redis://{secret}{place}", ttl_s=None)
            with pytest.raises(NodeFailed, match="AuthenticationError") as refused:
                stranger.exists([b"k"], timeout_s=TIMEOUT_S)
            assert "hunter" not in "".join(traceback.format_exception(refused.value))
        node.close()
        user.close()


def test_passwords_are_not_shown() -> None:
    url = f"redis://me:{SECRET}@host:7000/2"
    node = RedisNode(url, ttl_s=None)
    assert node.name == "redis://host:7000/2"
    assert "hunter" not in repr(node)
    for bad in (
        "redis:9/x",
        "redis://:{}@",
        "redis://:{}@h/x",
        "redis://:{}@h:x/0",
        "redis://:{}@h:99999",
        "http://{}@h",
        "redis://:{}@h?password=hunter",
        "redis://:{}@h?socket_timeout=9",
        "redis://:{}@h?ssl_cert_reqs=none",
        "redis://:{}@h#hunter",
        "redis://:{}@[::1/0",
        "rediss://:{}@h?ssl_cert_reqs=hunter",
        "rediss://:{}@h?ssl_nonsense=hunter",
        "unix://:{}@",
        "unix://:{}@host/socket",
        "unix://:{}@/socket?db=x",
        "unix://:{}@/socket?decode_responses=1",
    ):
        with pytest.raises(ValueError, match="Redis server") as refused:
            RedisNode(bad.format(SECRET), ttl_s=None)
        assert "hunter" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("redis://host", "redis://host:6379/0"),
        ("redis://host:7/", "redis://host:7/0"),
        ("rediss://host/5", "rediss://host:6379/5"),
        ("rediss://me:{}@host/5?ssl_ca_certs=/c.pem", "rediss://host:6379/5"),
        ("redis://[::1]:7/1", "redis://[::1]:7/1"),
        ("unix:///run/redis%20one.sock", "unix:///run/redis one.sock?db=0"),
        ("unix://me:{}@/run/redis.sock?db=3", "unix:///run/redis.sock?db=3"),
    ],
)
def test_one_server_has_one_name(url: str, name: str) -> None:
    assert RedisNode(url.format(SECRET), ttl_s=None).name == name


def test_through_a_socket_of_the_host(tmp_path: Path) -> None:
    path = tmp_path / "redis.sock"
    with running_redis(tmp_path, "--unixsocket", str(path), "--requirepass", "hunter2@") as server:
        node = RedisNode(f"unix://:{SECRET}@{path}?db=3", ttl_s=100.0)
        assert list(put(node, (b"k", b"x"))) == [True]
        same = RedisNode(f"redis://:{SECRET}@127.0.0.1:{server.port}/3", ttl_s=100.0)
        assert (got(node, b"k"), got(same, b"k")) == ([b"x"], [b"x"])
        server.kill()
        with pytest.raises(NodeFailed):
            node.exists([b"k"], timeout_s=TIMEOUT_S)
        path.unlink()
        with pytest.raises(NodeFailed, match="FileNotFoundError"):
            node.exists([b"k"], timeout_s=TIMEOUT_S)
        node.close()
        same.close()


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "epd.cache.l3.redis_node")
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(NodeFailed, match=re.escape("pip install 'mimo-epd[redis]'")) as refused:
        open_store("redis://:hunter@host", memory_bytes=0, disk_bytes=0, io_bytes=1, timeout_s=1.0, ttl_s=None)
    assert "hunter" not in str(refused.value)


def test_with_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    request = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    try:
        subprocess.run(
            ["openssl", *request, *names, "-keyout", key, "-out", certificate], check=True, capture_output=True
        )
    except FileNotFoundError:
        pytest.skip("openssl is not installed, which makes the certificate")
    # The port of plain connections goes first, to see that the server is there.
    with running_redis(tmp_path) as other:
        tls_port = other.port
    options = ["--tls-cert-file", key.with_name("certificate.pem"), "--tls-key-file", key, "--tls-auth-clients", "no"]
    with running_redis(tmp_path, "--tls-port", str(tls_port), *map(str, options)):
        stranger = RedisNode(f"rediss://127.0.0.1:{tls_port}/0", ttl_s=None)
        with pytest.raises(NodeFailed, match="SSLCertVerificationError"):
            stranger.exists([b"k"], timeout_s=TIMEOUT_S)
        monkeypatch.setenv(ssl.get_default_verify_paths().openssl_cafile_env, str(certificate))
        node = RedisNode(f"rediss://127.0.0.1:{tls_port}/0", ttl_s=None)
        value = bytes(range(256)) * 2000
        assert list(put(node, (b"k", value), (b"l", b""))) == [True, True]
        assert got(node, b"k", b"l", b"m", b"k") == [value, b"", None, value]
        node.close()


def test_nobody_there_is_known_at_once(tmp_path: Path) -> None:
    with running_redis(tmp_path) as server:
        pass
    node = RedisNode(server.url, ttl_s=None)
    begun_s = time.monotonic()
    with pytest.raises(NodeFailed, match="ConnectionRefusedError"):
        node.exists([b"k"], timeout_s=TIMEOUT_S)
    assert time.monotonic() - begun_s < 1.0


def test_a_stopped_server_costs_the_time_limit_and_its_late_replies_go_nowhere(tmp_path: Path) -> None:
    with running_redis(tmp_path) as server:
        node = RedisNode(server.url, ttl_s=None)
        put(node, (b"old", b"old"), (b"new", b"new"))
        server.pause()
        for _ in range(3):
            begun_s = time.monotonic()
            with pytest.raises(NodeTimedOut):
                node.get([b"old"], lambda *_: pytest.fail("a value came from nowhere"), timeout_s=0.05)
            assert 0.04 < time.monotonic() - begun_s < 0.5
        server.resume()
        assert got(node, b"new", b"old") == [b"new", b"old"]
        node.close()
