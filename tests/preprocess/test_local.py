"""data: URLs in every spelling, and file: URLs under roots."""

from __future__ import annotations

import base64
import os
import socket
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preprocess import FetchLimits, MediaForbidden, MediaInvalid, MediaTooLarge, MediaUnreachable
from preprocess.local import decode_data_url, read_file_url

# Chosen so that its base64 holds both + and /, and needs padding.
CONTENT = b"\xfb\xff\xfe\xfb\xef\xbe\x00\x01"
ENCODED = base64.b64encode(CONTENT).decode()
URL_SAFE = base64.urlsafe_b64encode(CONTENT).decode()


@pytest.mark.parametrize(
    "url",
    [
        f"data:image/png;base64,{ENCODED}",
        f"DATA:IMAGE/PNG;BASE64,{ENCODED}",
        f"data:;base64,{ENCODED}",
        f"data:image/png;charset=utf-8;base64,{ENCODED}",
        f"data:image/png; base64 ,{ENCODED}",
        f"data:image/png;base64,{ENCODED.rstrip('=')}",
        f"data:image/png;base64,{URL_SAFE}",
        f"data:image/png;base64,{URL_SAFE.rstrip('=')}",
        f"data:image/png;base64,{quote(ENCODED, safe='')}",
        f"data:image/png;base64, {ENCODED[:5]}\r\n\t{ENCODED[5:]}\n",
        f"data:image/png;base64,{ENCODED[:4]}%0A{ENCODED[4:]}",
        f"data:image/png,{quote(CONTENT)}",
        f"data:base64,{ENCODED}",
        f"data:image/png;BASE64;name=a.png,{ENCODED}",
        f"data://image/png;base64,{ENCODED}",
        f"data:image/png;\nbase64,{ENCODED}\n",
        f"data:image/png;base64,{ENCODED}==",
        f"data:image/png;base64,{URL_SAFE[:6]}{ENCODED[6:]}",
        f"data:image/png;base64,{ENCODED[:4]} {ENCODED[4:]}",
        f"data:image/png;base64,{quote(URL_SAFE.rstrip('='), safe='')}%3d",
        f"data:image/svg+xml;charset=utf-8,{quote(CONTENT)}",
    ],
)
def test_every_spelling(url: str) -> None:
    assert decode_data_url(url, 1000) == CONTENT


def test_plain_text() -> None:
    assert decode_data_url("data:,a+b%20c", 1000) == b"a+b c"


@given(content=st.binary(max_size=200), safe=st.booleans(), padded=st.booleans(), escaped=st.booleans())
@settings(max_examples=100, deadline=None)
def test_round_trip(content: bytes, safe: bool, padded: bool, escaped: bool) -> None:
    text = (base64.urlsafe_b64encode if safe else base64.b64encode)(content).decode()
    text = text if padded else text.rstrip("=")
    text = quote(text, safe="") if escaped else text
    assert decode_data_url(f"data:x/y;base64,{text}", 1000) == content


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("data:image/png;base64", "no comma"),
        ("data:image/png;base64,ab*d", "not base64"),
        ("data:image/png;base64,ab=d", "not base64"),
        ("data:image/png;base64,abcde", "5 base64 digits"),
        ("data:image/png;base64,abc\u00e9", "not base64"),
        ("data:image/png;base64,data:image/png;base64,abcd", "not base64"),
        ("data:image/png;base64,abc%zz", "not base64"),
        ("data:image/png;base64,abc\ufeff", "not base64"),
        ("data:,\ud800", "not text at 0"),
        ("data:image/png;base64x,abc\ud800", "not text at 3"),
        (f"data:image/png;base64,AAAA{ENCODED.replace('+', ' ', 1)}", "a \\+ arrives as a space"),
    ],
)
def test_malformed(url: str, words: str) -> None:
    with pytest.raises(MediaInvalid, match=words):
        decode_data_url(url, 1000)


def test_data_limit() -> None:
    assert decode_data_url(f"data:;base64,{ENCODED}", len(CONTENT)) == CONTENT
    with pytest.raises(MediaTooLarge):
        decode_data_url(f"data:;base64,{ENCODED}", len(CONTENT) - 1)
    with pytest.raises(MediaTooLarge, match="characters"):
        decode_data_url("data:;base64," + "A" * 4000, 1000)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    media = tmp_path / "media"
    (media / "sub dir").mkdir(parents=True)
    (media / "a.png").write_bytes(b"inside")
    (media / "sub dir" / "b.png").write_bytes(b"below")
    (tmp_path / "secret").write_bytes(b"secret")
    return media


def limits(root: Path, max_bytes: int = 100) -> FetchLimits:
    return FetchLimits(media_roots=(root,), max_bytes=max_bytes)


def test_files_under_the_root(root: Path) -> None:
    assert read_file_url(f"file://{root}/a.png", limits(root)) == b"inside"
    assert read_file_url(f"file:{root}/a.png", limits(root)) == b"inside"
    for host in ("localhost", "LOCALHOST", "LocalHost"):
        assert read_file_url(f"file://{host}{root}/sub%20dir/b.png", limits(root)) == b"below"
    assert read_file_url(f"file://{root}/sub%20dir/../a.png", limits(root)) == b"inside"


def test_links_inside_the_root_are_followed_and_a_linked_root_works(root: Path, tmp_path: Path) -> None:
    (root / "alias.png").symlink_to(root / "a.png")
    assert read_file_url(f"file://{root}/alias.png", limits(root)) == b"inside"
    linked = tmp_path / "linked"
    linked.symlink_to(root)
    assert read_file_url(f"file://{linked}/a.png", limits(linked)) == b"inside"


def test_no_way_out(root: Path, tmp_path: Path) -> None:
    (root / "escape").symlink_to(tmp_path / "secret")
    (root / "updir").symlink_to(tmp_path)
    sibling = tmp_path / "media-other"
    sibling.mkdir()
    (sibling / "c").write_bytes(b"x")
    for path in (
        f"{root}/../secret", f"{root}/%2e%2e/secret", f"{root}/%2E%2E%2Fsecret", f"{root}/escape",
        f"{root}/updir/secret", f"{sibling}/c", "/etc/passwd", "/does/not/exist",
    ):  # fmt: skip
        with pytest.raises(MediaForbidden, match="outside"):
            read_file_url(f"file://{path}", limits(root))


def test_refusals(root: Path) -> None:
    with pytest.raises(MediaForbidden, match="are off"):
        read_file_url(f"file://{root}/a.png", FetchLimits())
    with pytest.raises(MediaForbidden, match=r"names evil\.example"):
        read_file_url(f"file://evil.example{root}/a.png", limits(root))
    with pytest.raises(MediaInvalid, match="query"):
        read_file_url(f"file://{root}/a.png?x", limits(root))
    with pytest.raises(MediaInvalid, match="zero byte"):
        read_file_url(f"file://{root}/a%00.png", limits(root))
    with pytest.raises(MediaUnreachable, match=r"missing\.png cannot be read: No such file"):
        read_file_url(f"file://{root}/missing.png", limits(root))
    with pytest.raises(MediaTooLarge, match="6 bytes"):
        read_file_url(f"file://{root}/a.png", limits(root, max_bytes=5))
    with pytest.raises(MediaForbidden, match="regular"):
        read_file_url(f"file://{root}/sub%20dir", limits(root))
    os.mkfifo(root / "pipe")
    with pytest.raises(MediaForbidden, match="regular"):
        read_file_url(f"file://{root}/pipe", limits(root))


@pytest.mark.parametrize(
    "url",
    [
        "file:///proc/self/environ",
        "file:///proc/self/fd/0",
        "file:///dev/zero",
        "file:///dev/stdin",
        "file:////etc/passwd",
        "file://localhost//etc/passwd",
        "file:///..//..//etc/passwd",
        "file:ROOT/..%2f..%2f..%2f..%2f..%2f..%2f..%2f..%2fetc/passwd",
        "file:ROOT/zero",
        "file:ROOT/environ",
        "file://%2fetc/passwd",
        "file://etc/passwd",
        "file:etc/passwd",
        "file:../../etc/passwd",
    ],
)
def test_ways_that_others_found(root: Path, url: str) -> None:
    (root / "zero").symlink_to("/dev/zero")
    (root / "environ").symlink_to("/proc/self/environ")
    with pytest.raises((MediaForbidden, MediaInvalid)) as refused:
        read_file_url(url.replace("ROOT", str(root)), limits(root))
    assert "passwd" not in refused.value.message.replace(url, "")


def test_what_is_no_file_is_never_waited_for(root: Path) -> None:
    (root / "loop").symlink_to(root / "loop")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(root / "socket"))
        for name in ("loop", "socket", "loop/a", "a.png/b", "%252e%252e/secret", "..\\secret"):
            with pytest.raises((MediaForbidden, MediaUnreachable)):
                read_file_url(f"file://{root}/{name}", limits(root))
