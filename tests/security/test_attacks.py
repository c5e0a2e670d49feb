"""What a hostile client can try on a running service: all of it is refused, and the service goes on as if nothing were.

Each test ends with an honest question; the last one compares memory and processes with those before the attacks.
"""

from __future__ import annotations

import base64
import gzip
import io
import json
import os
import pickle
import socket
import struct
import threading
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from tests.e2e.service import KNOWN_ANSWERS, SAMPLES, Answer, Service, file_url, running_service, text_of
from tests.security.hostile import (
    Gadget,
    assert_no_gadget_ran,
    connection,
    head,
    send_pickles_everywhere,
    sockets_of,
    status_of,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

MAX_BODY_BYTES = 4 << 20
BODY_TIMEOUT_S = 2.0
# A process may not grow by more than this for anything that is refused.
ROOM_BYTES = 400 << 20


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    settings = (
        f"gateway.max_body_bytes={MAX_BODY_BYTES}",
        f"gateway.file_max_bytes={MAX_BODY_BYTES}",
        f"gateway.body_timeout_s={BODY_TIMEOUT_S}",
        "fetch.timeout_s=5",
    )
    flags = [word for setting in settings for word in ("--set", setting)]
    log_dir: Path = tmp_path_factory.mktemp("attacks")
    with running_service(log_dir, "--mode", "epd", "--media-root", str(SAMPLES), *flags) as running:
        assert is_healthy(running)
        yield running


@pytest.fixture(scope="module")
def before(service: Service) -> dict[str, tuple[int, int]]:
    """Pid and memory of every stage before anything was tried."""
    return {name: (pid, resident_bytes(pid)) for name, pid in service.stages().items()}


@pytest.fixture(autouse=True)
def _goes_on(service: Service, before: dict[str, tuple[int, int]]) -> Iterator[None]:
    yield
    assert is_healthy(service)
    assert {name: pid for name, (pid, _) in before.items()} == service.stages()


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def is_healthy(service: Service) -> bool:
    parts = [
        {"type": "image_url", "image_url": {"url": file_url("picture.png")}},
        {"type": "text", "text": KNOWN_ANSWERS["picture.png"].question},
    ]
    return text_of(service.ask(parts, temperature=0)) == KNOWN_ANSWERS["picture.png"].answer


def ask_for(service: Service, url: str, kind: str = "image") -> Answer:
    return service.ask([{"type": f"{kind}_url", f"{kind}_url": {"url": url}}], max_tokens=4)


def assert_refused(answer: Answer, *, param: str | None = None) -> None:
    assert 400 <= answer.status < 500, answer
    error = answer.body["error"]
    assert error["message"]
    if param is not None:
        assert error["param"] == param, answer


class Inside(BaseHTTPRequestHandler):
    """A service that only this machine may reach, and that must never be asked for anything."""

    hits: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.hits.append(self.path)
        self.send_response(200)
        self.end_headers()
        self.wfile.write((SAMPLES / "picture.png").read_bytes())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def inside() -> Iterator[int]:
    """Its port, on every address of this machine."""
    with ThreadingHTTPServer(("", 0), Inside) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


HOSTS = (
    *(
        "127.0.0.1",
        "127.1",
        "127.0.1",
        "2130706433",
        "0x7f000001",
        "0x7f.1",
        "0177.0.0.1",
        "017700000001",
        "0",
        "0.0.0.0",
    ),
    *(
        "localhost",
        "LOCALHOST.",
        "[::1]",
        "[::]",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
        "[0:0:0:0:0:ffff:127.0.0.1]",
    ),
    *("[64:ff9b::7f00:1]", "[2002:7f00:1::]", "[fe80::1]", "[fe80::1%25lo]", "[fc00::1]", "[fec0::1]", "[::127.0.0.1]"),
    *("169.254.169.254", "[fd00:ec2::254]", "100.100.100.200", "192.0.0.192", "metadata.google.internal", "10.0.0.1"),
    *("172.16.0.1", "192.168.0.1", "100.64.0.1", "198.18.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255"),
    *("127.0.0.1%00.example.com", "127.0.0.1\u3002", "\u24df.0.0.1", "user@127.0.0.1", "user:pass@127.0.0.1"),
)


@pytest.mark.parametrize("host", HOSTS)
def test_addresses_of_the_inside_are_not_asked(service: Service, inside: int, host: str) -> None:
    Inside.hits.clear()
    answer = ask_for(service, f"http://{host}:{inside}/latest/meta-data/")
    assert_refused(answer, param="messages[0].content[0].image_url")
    assert Inside.hits == []


def test_this_machine_under_its_own_name_and_addresses(service: Service, inside: int) -> None:
    Inside.hits.clear()
    names = {socket.gethostname(), *(info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None))}
    for name in names:
        host = f"[{name}]" if ":" in str(name) else name
        assert_refused(ask_for(service, f"http://{host}:{inside}/"))
    assert Inside.hits == []


SCHEMES = (
    *("file:///etc/passwd", "file://localhost/etc/passwd", "file:/etc/passwd", "FILE:///etc/passwd", "file:etc/passwd"),
    *("gopher://127.0.0.1:1/_x", "ftp://127.0.0.1/x", "dict://127.0.0.1:1/", "jar:http://127.0.0.1!/", "unix:/tmp/x"),
    *("ldap://127.0.0.1", "javascript:alert(1)", "view-source:file:///etc/passwd", "concat:/etc/passwd|/etc/hosts"),
    *(
        "subfile,,start,0,end,64,,:/etc/passwd",
        "/etc/passwd",
        "../../etc/passwd",
        "",
        " ",
        "\x00",
        "http://",
        "http:///x",
    ),
)


@pytest.mark.parametrize("kind", ["image", "video", "audio"])
def test_other_schemes_are_refused(service: Service, kind: str) -> None:
    for url in SCHEMES:
        assert_refused(ask_for(service, url, kind))


def test_nothing_outside_the_media_roots_is_read(service: Service, tmp_path: Path) -> None:
    root = SAMPLES.resolve().as_uri()
    for path in ("../README.md", "..%2fREADME.md", "%2e%2e/README.md", "..%252fREADME.md", "....//README.md"):
        assert_refused(ask_for(service, f"{root}/{path}"))
    assert_refused(ask_for(service, f"{root}/picture.png%00.txt"))
    assert_refused(ask_for(service, root))
    assert_refused(ask_for(service, f"{root}x/picture.png"))
    for path in ("/proc/self/environ", "/proc/self/fd/0", "/dev/zero", "/dev/stdin", "/dev/fd/0", "/sys/kernel/notes"):
        assert_refused(ask_for(service, f"file://{path}"))
    link = SAMPLES / f"link-{os.getpid()}.png"
    link.symlink_to("/etc/passwd")
    pipe = SAMPLES / f"pipe-{os.getpid()}.png"
    os.mkfifo(pipe)
    try:
        assert_refused(ask_for(service, link.as_uri()))
        # Opening it would wait for a writer for ever.
        assert_refused(ask_for(service, f"{root}/{pipe.name}"))
    finally:
        link.unlink()
        pipe.unlink()


def test_a_playlist_leads_nowhere(service: Service, inside: int) -> None:
    """Formats that name other files: what they name is neither read nor asked."""
    Inside.hits.clear()
    target = f"http://127.0.0.1:{inside}/"
    texts = (
        f"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{target}\n#EXT-X-ENDLIST\n",
        "#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n",
        f"ffconcat version 1.0\nfile '{target}'\n",
        f'<?xml version="1.0"?><MPD><Period><BaseURL>{target}</BaseURL></Period></MPD>',
        f'<svg xmlns="http://www.w3.org/2000/svg"><image href="{target}"/></svg>',
        f"v=0\no=- 0 0 IN IP4 127.0.0.1\nm=video {inside} RTP/AVP 96\n",
    )
    for text in texts:
        for kind in ("image", "video", "audio"):
            url = f"data:application/octet-stream;base64,{base64.b64encode(text.encode()).decode()}"
            assert_refused(ask_for(service, url, kind))
    assert Inside.hits == []


def data_url(content: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def png_of(width: int, height: int) -> bytes:
    """A picture of one colour whose pixels nobody should unfold."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    squeezer = zlib.compressobj(9)
    row = bytes(1 + (width + 7) // 8)
    pieces = [squeezer.compress(row) for _ in range(min(height, 20_000))] + [squeezer.flush()]
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"".join(pieces)) + chunk(b"IEND", b"")


def gif_of(width: int, height: int) -> bytes:
    canvas = b"GIF89a" + struct.pack("<HH", width, height) + b"\x80\x00\x00" + bytes(6)
    frame = b"\x2c" + struct.pack("<HHHH", 0, 0, width, height) + b"\x00\x02\x02\x44\x01\x00"
    return canvas + frame * 50 + b"\x3b"


BOMBS: dict[str, tuple[str, Callable[[], bytes]]] = {
    "a picture of 10^10 pixels": ("image", lambda: png_of(100_000, 100_000)),
    "a strip": ("image", lambda: png_of(2**31 - 1, 1)),
    "a zip": ("image", lambda: zip_of(bytes(100 << 20))),
    "a gzip": ("video", lambda: gzip.compress(bytes(100 << 20))),
    "a gif of large frames": ("video", lambda: gif_of(65_000, 65_000)),
    "a wav that claims 1 GiB": ("audio", lambda: wav_head(1 << 30) + bytes(1000)),
    "a wav of 2^32 Hz": ("audio", lambda: wav_head(1000, rate=0xFFFFFFFF) + bytes(1000)),
    "nothing": ("audio", lambda: b""),
    "a pickle": ("image", lambda: pickle.dumps(Gadget("image"))),
}


def ztxt_chunk(data: bytes) -> bytes:
    body = b"Comment\0\0" + data
    return struct.pack(">I", len(body)) + b"zTXt" + body + struct.pack(">I", zlib.crc32(b"zTXt" + body))


def zip_of(content: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("picture.png", content)
    return buffer.getvalue()


def wav_head(num_bytes: int, rate: int = 16_000) -> bytes:
    riff = struct.pack("<4sI4s", b"RIFF", min(num_bytes + 36, 0xFFFFFFFF), b"WAVE")
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, rate, min(rate * 2, 0xFFFFFFFF), 2, 16)
    return riff + form + struct.pack("<4sI", b"data", num_bytes)


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused(service: Service, name: str) -> None:
    kind, make = BOMBS[name]
    started_s = time.monotonic()
    assert_refused(ask_for(service, data_url(make(), "application/octet-stream"), kind))
    assert time.monotonic() - started_s < 20


def test_a_comment_that_unfolds_is_left_alone(service: Service) -> None:
    """200 MB of text in a picture: the picture is looked at, the text is not."""
    picture = png_of(8, 8)
    bomb = picture[:33] + ztxt_chunk(zlib.compress(bytes(200 << 20), 9)) + picture[33:]
    before_bytes = {pid: peak_bytes(pid) for pid in service.stages().values()}
    assert ask_for(service, data_url(bomb, "image/png")).status == 200
    for pid, peak in before_bytes.items():
        assert peak_bytes(pid) < peak + (100 << 20)


def peak_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


BODIES: dict[str, Callable[[], bytes]] = {
    "deep": lambda: b'{"model": "mimo-nano", "messages": ' + b"[" * 500_000 + b"]" * 500_000 + b"}",
    "wide": lambda: json.dumps({"model": "mimo-nano", "messages": [], **{str(i): i for i in range(200_000)}}).encode(),
    "a long number": lambda: b'{"model": "mimo-nano", "seed": ' + b"9" * 1_000_000 + b"}",
    "no text": lambda: b"\xff\xfe" * 1000,
    "lone surrogates": lambda: b'{"model": "\\ud800", "messages": []}',
    "many messages": lambda: json.dumps(
        {"model": "mimo-nano", "messages": [{"role": "user", "content": "x"}] * 50_000}
    ).encode(),
    "a schema that bites itself": lambda: json.dumps(
        {
            "model": "mimo-nano",
            "messages": [{"role": "user", "content": "x"}],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"$ref": "http://127.0.0.1/schema"}},
            },
        }
    ).encode(),
}


@pytest.mark.parametrize("name", BODIES)
def test_hostile_bodies_are_refused_at_once(service: Service, name: str) -> None:
    started_s = time.monotonic()
    assert_refused(service.post("/v1/chat/completions", BODIES[name]()))
    assert time.monotonic() - started_s < 15


def test_schemas_that_take_long_hold_up_nobody(service: Service) -> None:
    """Each would keep a processor for seconds; together they are more than there are threads."""

    def hostile(number: int) -> int:
        parameters = {"type": "object", "properties": {"p": {"type": "string", "pattern": f"[a-z{number}]{{1,60}}"}}}
        functions = [{"name": f"f{i}", "strict": True, "parameters": parameters} for i in range(100)]
        tools = [{"type": "function", "function": function} for function in functions]
        return service.ask("hi", tools=tools, tool_choice="required", max_tokens=1, timeout_s=60).status

    with ThreadPoolExecutor(24) as pool:
        asked = [pool.submit(hostile, number) for number in range(24)]
        for _ in range(10):
            assert service.ask("hi", max_tokens=1, timeout_s=5).status == 200
        assert {one.result() for one in asked} <= {200, 400, 503}


def test_an_expensive_pattern_costs_little(service: Service) -> None:
    """Its automaton would have a billion states; only those that an answer comes through are made."""
    schema = {"type": "string", "pattern": "^((a{1,1000}){1,1000}){1,1000}$"}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    before_bytes = {pid: peak_bytes(pid) for pid in service.stages().values()}
    answer = service.ask("x", response_format=form, max_tokens=32)
    assert answer.status in (200, 400)
    assert answer.seconds < 15
    for pid, peak in before_bytes.items():
        assert peak_bytes(pid) < peak + (200 << 20)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/encode", "/v1/files", "/tokenize"])
def test_bodies_too_large_are_refused_before_they_are_read(service: Service, path: str) -> None:
    with connection(service) as client:
        client.sendall(head(path, **{"Content-Length": str(1 << 40), "Content-Type": content_type(path)}))
        assert status_of(client) == 413


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/encode", "/v1/files", "/tokenize"])
def test_bodies_without_a_length_are_cut_off(service: Service, path: str) -> None:
    piece = b"%x\r\n" % (1 << 16) + b"x" * (1 << 16) + b"\r\n"
    with connection(service) as client:
        client.sendall(head(path, **{"Transfer-Encoding": "chunked", "Content-Type": content_type(path)}))
        if path == "/v1/files":
            # A form that is one, up to a file without end.
            part = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
            client.sendall(b"%x\r\n%b\r\n" % (len(part), part))
        sender = threading.Thread(target=send_for_ever, args=(client, piece), daemon=True)
        sender.start()
        assert status_of(client) == 413
        client.shutdown(socket.SHUT_RDWR)
        sender.join(10)
        assert not sender.is_alive()


def send_for_ever(client: socket.socket, piece: bytes) -> None:
    with suppress(OSError):
        while True:
            client.sendall(piece)


def content_type(path: str) -> str:
    return "multipart/form-data; boundary=x" if path == "/v1/files" else "application/json"


def test_slow_clients_are_cut_off_and_keep_nobody_out(service: Service) -> None:
    """Heads that never end, bodies that drip, and connections that say nothing, two hundred at a time."""
    beginnings = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-A: ",
        head("/v1/chat/completions", **{"Content-Length": "1000", "Content-Type": "application/json"}) + b"{",
        b"",
        b"GET /",
    )
    clients = []
    for number in range(200):
        client = connection(service)
        client.sendall(beginnings[number % len(beginnings)])
        clients.append(client)
    assert is_healthy(service)
    with_body = [client for number, client in enumerate(clients) if number % len(beginnings) == 1]
    assert {status_of(client) for client in with_body} == {408}
    for client in clients:
        client.close()


def test_answers_that_nobody_reads_hold_up_nobody(service: Service) -> None:
    body = json.dumps(
        {
            "model": "mimo-nano",
            "messages": [{"role": "user", "content": "Count."}],
            "stream": True,
            "ignore_eos": True,
            "max_tokens": 200,
            "logprobs": True,
            "top_logprobs": 20,
        }
    ).encode()
    clients = []
    for _ in range(8):
        client = connection(service)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        client.sendall(
            head("/v1/chat/completions", **{"Content-Length": str(len(body)), "Content-Type": "application/json"})
        )
        client.sendall(body)
        clients.append(client)
    assert is_healthy(service)
    for client in clients:
        client.close()


def test_only_the_api_listens_and_only_here(service: Service) -> None:
    ports, paths = sockets_of({service.pid, *service.stages().values()})
    assert ports == {("0100007F", int(service.url.rpartition(":")[2]))}
    assert paths
    for path in paths:
        # Nobody but this user gets as far as the sockets of the stages.
        assert Path(path).parent.stat().st_mode & 0o077 == 0, path


def test_pickles_are_not_read_anywhere(service: Service) -> None:
    send_pickles_everywhere(service)


def test_many_attackers_at_once(service: Service) -> None:
    """Refusals cost little: a hundred bad requests beside honest ones, all ended in time."""
    urls = [f"http://{host}/" for host in HOSTS] + list(SCHEMES)
    with ThreadPoolExecutor(16) as pool:
        refused = [pool.submit(ask_for, service, url) for url in urls[:100]]
        honest = [pool.submit(is_healthy, service) for _ in range(8)]
        assert all(each.result(120) for each in honest)
        for each in refused:
            assert_refused(each.result(120))


def test_nothing_has_grown(service: Service, before: dict[str, tuple[int, int]]) -> None:
    for name, (pid, bytes_before) in before.items():
        assert resident_bytes(pid) < bytes_before + ROOM_BYTES, name
    assert_no_gadget_ran()
