"""The files of the page: headers, freshness, compression, and that they are all there and fit together."""

import gzip
import re
from pathlib import Path

import aiohttp
import pytest

from tests.fakes.gateway import running_gateway

PAGE = Path(__file__).parent.parent.parent / "epd" / "gateway" / "page"
FILES = sorted(path for path in PAGE.rglob("*") if path.is_file())


async def test_the_page_and_every_file_of_it_are_served_without_a_key() -> None:
    async with running_gateway(api_keys=("secret",)) as stack:
        for path in FILES:
            async with stack.session.get(f"/page/{path.name}") as response:
                assert response.status == 200, path
                assert await response.read() == path.read_bytes()
                assert response.headers["X-Content-Type-Options"] == "nosniff"
                assert response.headers["Referrer-Policy"] == "no-referrer"
        async with stack.session.get("/") as response:
            assert response.content_type == "text/html"
            assert await response.read() == (PAGE / "index.html").read_bytes()


async def test_the_content_policy_allows_nothing_from_elsewhere() -> None:
    async with running_gateway() as stack, stack.session.get("/") as response:
        policy = response.headers["Content-Security-Policy"].split("; ")
    assert "default-src 'self'" in policy
    assert "object-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert not any(word in rule for rule in policy for word in ("unsafe", "*", "http"))


async def test_what_has_not_changed_is_not_sent_again() -> None:
    async with running_gateway() as stack:
        async with stack.session.get("/page/main.js") as response:
            tag = response.headers["ETag"]
            assert response.headers["Cache-Control"] == "no-cache"
        for known in (tag, f'"other", {tag}', "*", tag.removeprefix("W/")):
            async with stack.session.get("/page/main.js", headers={"If-None-Match": known}) as response:
                assert response.status == 304, known
                assert await response.read() == b""
                assert response.headers["ETag"] == tag
        async with stack.session.get("/page/main.js", headers={"If-None-Match": '"other"'}) as response:
            assert response.status == 200


@pytest.mark.parametrize(
    ("accepted", "packed"),
    [("gzip", True), ("br, gzip;q=0.5", True), ("GZIP", True), ("gzip;q=0", False), ("br", False), ("", False)],
)
async def test_text_is_packed_for_who_takes_it(accepted: str, packed: bool) -> None:
    async with running_gateway() as stack:
        url = f"{stack.url}/page/chat.js"
        headers = {"Accept-Encoding": accepted}
        async with (
            aiohttp.ClientSession(auto_decompress=False) as plain,
            plain.get(url, headers=headers) as response,
        ):
            content = await response.read()
            assert (response.headers.get("Content-Encoding") == "gzip") is packed
            assert response.headers["Vary"] == "Accept-Encoding"
        assert (gzip.decompress(content) if packed else content) == (PAGE / "chat.js").read_bytes()


@pytest.mark.parametrize("name", ["nothing.js", "..%2Fapp.py", "%2e%2e/app.py", "samples/picture.png", "main.js%00"])
async def test_nothing_else_is_served(name: str) -> None:
    async with running_gateway() as stack, stack.session.get(f"{stack.url}/page/{name}") as response:
        assert response.status == 404
        assert "error" in await response.json()


def test_what_the_files_name_is_there() -> None:
    """A page that works offline names nothing but its own files and routes."""
    names = {path.name for path in FILES}
    assert len(names) == len(FILES)
    for path in FILES:
        if path.suffix not in (".html", ".js", ".css"):
            continue
        text = path.read_text(encoding="utf-8")
        named = re.findall(r'(?:src|href)="/page/([^"]+)"', text) + re.findall(r'from "\./([^"]+)"', text)
        assert set(named) <= names, path
        assert not re.findall(r"https?://(?!www\.w3\.org/)", text), path
        assert not re.search(r"innerHTML|outerHTML\s*=|insertAdjacentHTML|document\.write|\beval\(", text), path
        assert not re.search(r'\sstyle="|\son[a-z]+="', text), path


def test_the_page_is_small() -> None:
    texts = [path.read_bytes() for path in FILES if path.suffix in (".html", ".js", ".css")]
    assert sum(len(gzip.compress(text, mtime=0)) for text in texts) < 41_000
