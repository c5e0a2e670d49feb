"""`/v1/files` over HTTP: OpenAI's shapes, and what is refused."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from yarl import URL

from tests.fakes.gateway import Stack, running_gateway
from tests.fakes.stages import until

PNG = b"\x89PNG\r\n\x1a\n" + bytes(100)
HTML = b"<!doctype html><script>alert(1)</script>"


@asynccontextmanager
async def gateway(tmp_path: Path, **settings: Any) -> AsyncIterator[Stack]:
    async with running_gateway(files_dir=tmp_path / "files", **settings) as stack:
        yield stack


def form(content: bytes = PNG, filename: str = "a.png", /, *, field: str = "file", **fields: str) -> aiohttp.FormData:
    body = aiohttp.FormData(quote_fields=False)
    for name, value in ({"purpose": "user_data"} | fields).items():
        if value:
            body.add_field(name, value)
    body.add_field(field, content, filename=filename, content_type="text/html")
    return body


async def upload(stack: Stack, *arguments: Any, headers: Any = None, **fields: Any) -> tuple[int, dict[str, Any]]:
    async with stack.session.post("/v1/files", data=form(*arguments, **fields), headers=headers) as response:
        return response.status, await response.json()


async def get(stack: Stack, path: str, **options: Any) -> tuple[int, dict[str, Any]]:
    async with stack.session.get(f"/v1/files{path}", **options) as response:
        return response.status, await response.json()


def stored(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "files").rglob("*") if path.is_file() and path.name != "lock"]


async def test_the_life_of_a_file(tmp_path: Path) -> None:
    async with gateway(tmp_path) as stack:
        status, file = await upload(stack, PNG, "Bild \u00e4\u4e2d.png")
        assert status == 200
        assert file["object"] == "file"
        assert (file["bytes"], file["filename"]) == (108, "Bild \u00e4\u4e2d.png")
        assert file["purpose"] == "user_data"
        assert file["expires_at"] - file["created_at"] == 30 * 86400
        assert await get(stack, f"/{file['id']}") == (200, file)
        status, listed = await get(stack, "")
        assert listed == {
            "object": "list",
            "data": [file],
            "first_id": file["id"],
            "last_id": file["id"],
            "has_more": False,
        }
        async with stack.session.get(f"/v1/files/{file['id']}/content") as response:
            assert await response.read() == PNG
            assert response.headers["Content-Type"] == "image/png"
            assert response.headers["Content-Length"] == "108"
            assert response.headers["X-Content-Type-Options"] == "nosniff"
            assert response.headers["Content-Security-Policy"] == "default-src 'none'; sandbox"
            assert response.headers["Content-Disposition"] == (
                "attachment; filename=\"Bild __.png\"; filename*=UTF-8''Bild%20%C3%A4%E4%B8%AD.png"
            )
        async with stack.session.head(f"/v1/files/{file['id']}/content") as response:
            assert (response.status, response.headers["Content-Length"]) == (200, "108")
        async with stack.session.delete(f"/v1/files/{file['id']}") as response:
            assert await response.json() == {"id": file["id"], "object": "file", "deleted": True}
        for path in (f"/{file['id']}", f"/{file['id']}/content"):
            status, answer = await get(stack, path)
            assert (status, answer["error"]["code"]) == (404, "file_not_found")
        assert (await get(stack, ""))[1]["data"] == []
    assert stored(tmp_path) == []


async def test_it_is_there_after_a_restart(tmp_path: Path) -> None:
    async with gateway(tmp_path) as stack:
        _, file = await upload(stack)
    async with gateway(tmp_path) as stack:
        assert await get(stack, f"/{file['id']}") == (200, file)


async def test_a_page_is_never_run(tmp_path: Path) -> None:
    async with gateway(tmp_path) as stack:
        _, file = await upload(stack, HTML, 'x".html')
        async with stack.session.get(f"/v1/files/{file['id']}/content") as response:
            assert response.headers["Content-Type"] == "application/octet-stream"
            assert response.headers["Content-Disposition"].startswith('attachment; filename="x_.html";')


async def test_the_sdk(tmp_path: Path) -> None:
    async with gateway(tmp_path) as stack:
        client = openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0)
        made = await client.files.create(
            file=("a.png", PNG), purpose="vision", expires_after={"anchor": "created_at", "seconds": 3600}
        )
        assert made.expires_at == made.created_at + 3600
        assert (await client.files.retrieve(made.id)).id == made.id
        await client.files.create(file=("b.png", PNG), purpose="user_data")
        await client.files.create(file=("c.png", PNG), purpose="user_data")
        assert [file.filename async for file in client.files.list(limit=1)] == ["c.png", "b.png", "a.png"]
        assert (await client.files.content(made.id)).content == PNG
        assert (await client.files.delete(made.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve(made.id)
        await client.close()


async def test_pages_of_a_list(tmp_path: Path) -> None:
    async with gateway(tmp_path) as stack:
        purposes = ("user_data", "vision", "user_data")
        ids = [(await upload(stack, b"x", purpose, purpose=purpose))[1]["id"] for purpose in purposes]

        async def page(query: str) -> list[int]:
            status, answer = await get(stack, f"?{query}")
            assert status == 200, answer
            return [ids.index(file["id"]) for file in answer["data"] if file["id"] in ids]

        assert await page("order=asc") == [0, 1, 2]
        assert await page("order=desc&limit=2") == [2, 1]
        assert await page(f"after={ids[1]}") == [0]
        assert await page(f"after={ids[1]}&order=asc") == [2]
        assert await page("purpose=vision") == [1]
        assert await page(f"after={ids[0]}") == []
        for query, param in (
            ("limit=0", "limit"),
            ("limit=10001", "limit"),
            ("limit=x", "limit"),
            ("limit=%C2%B2", "limit"),
            ("order=up", "order"),
            ("purpose=batch", "purpose"),
            ("after=file-1", "after"),
            ("before=x", "before"),
        ):
            status, answer = await get(stack, f"?{query}")
            assert (status, answer["error"]["param"]) == (400, param)


async def test_each_key_has_its_own(tmp_path: Path) -> None:
    async with gateway(tmp_path, api_keys=("one", "two")) as stack:
        one, two = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
        assert (await upload(stack))[0] == 401
        _, file = await upload(stack, headers=one)
        path = f"/{file['id']}"
        assert (await get(stack, path, headers=one))[0] == 200
        for wrong in (path, f"{path}/content"):
            assert (await get(stack, wrong, headers=two))[0] == 404
        assert (await get(stack, "", headers=two))[1]["data"] == []
        async with stack.session.delete(f"/v1/files{path}", headers=two) as response:
            assert response.status == 404
        assert (await get(stack, path))[0] == 401
    names = {part for path in stored(tmp_path) for part in path.parts}
    assert not {"one", "two"} & names, "keys do not belong on disk"


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        (form(purpose=""), "purpose", "field purpose is required; allowed: user_data, vision, assistants"),
        (form(purpose="batch"), "purpose", 'purpose is "batch"; allowed: user_data, vision, assistants'),
        (form(field="image"), "image", 'unknown field "image"; allowed: file, purpose'),
        (form(colour="red"), "colour", 'unknown field "colour"'),
        (form(**{"expires_after[seconds]": "60"}), "expires_after[anchor]", "is null; allowed"),
        (form(**{"expires_after[anchor]": "now", "expires_after[seconds]": "60"}), "expires_after[anchor]", '"now"'),
        (form(**{"expires_after[anchor]": "created_at"}), "expires_after[seconds]", "allowed: 1 to 2592000"),
        (
            form(**{"expires_after[anchor]": "created_at", "expires_after[seconds]": "2592001"}),
            "expires_after[seconds]",
            "gateway.files_ttl_s",
        ),
        (form(purpose="x" * 2000), "purpose", "more than 1024 bytes"),
        *(
            (form(PNG, name), "file", "no path")
            for name in ("../a", "/etc/passwd", "a\\b", "..", ".", "", "n" * 256, "\u202egnp.exe")
        ),
    ],
)
async def test_a_form_is_refused_by_name_and_leaves_nothing(
    tmp_path: Path, body: aiohttp.FormData, param: str, words: str
) -> None:
    async with gateway(tmp_path) as stack:
        async with stack.session.post("/v1/files", data=body) as response:
            error = (await response.json())["error"]
        assert (response.status, error["param"]) == (400, param)
        assert words in error["message"]
        assert stored(tmp_path) == []


async def raw(stack: Stack, body: bytes | AsyncIterator[bytes], **headers: str) -> tuple[int, dict[str, Any]]:
    given = {"Content-Type": "multipart/form-data; boundary=b"} | {k.replace("_", "-"): v for k, v in headers.items()}
    async with stack.session.post("/v1/files", data=body, headers=given) as response:
        return response.status, (await response.json())["error"]


def part(disposition: str, content: bytes = b"x", more: str = "") -> bytes:
    return f"--b\r\nContent-Disposition: form-data; {disposition}\r\n{more}\r\n".encode() + content + b"\r\n"


@pytest.mark.filterwarnings("ignore::aiohttp.multipart.BadContentDispositionHeader")
@pytest.mark.parametrize(
    ("body", "headers", "status", "words"),
    [
        (b"", {}, 400, "no form"),
        (b"{}", {"Content_Type": "application/json"}, 415, "allowed: multipart/form-data"),
        (b"x", {"Content_Type": "multipart/form-data"}, 400, "no form"),
        (b"x", {"Content_Encoding": "gzip"}, 415, "allowed: identity"),
        (part('name="file"; filename="a"') + b"--b--", {"Sec_Fetch_Site": "cross-site"}, 403, "other sites"),
        (part('name="file"', b"text") + b"--b--", {}, 400, "field file is text"),
        (part('name="file"; filename="a"') * 2 + b"--b--", {}, 400, "more than one file"),
        (part('name="purpose"', b"vision") + b"--b--", {}, 400, "field file is required"),
        (part('name="purpose"') * 2 + b"--b--", {}, 400, "twice"),
        (part('name="file"; filename="a"', more="Content-Transfer-Encoding: base64\r\n"), {}, 400, "base64"),
        (part('name="file"; filename="a"', more="Content-Type: multipart/mixed; boundary=c\r\n"), {}, 400, "form"),
        (part("name=\"file\"; filename*=UTF-8''..%2F..%2Fetc%2Fpasswd"), {}, 400, "no path"),
        (part('name="file"; filename="a"')[:-30], {}, 400, ""),
        (part('name="x" \0'), {}, 400, ""),
    ],
)
async def test_what_is_no_upload_is_refused(
    tmp_path: Path, body: bytes, headers: dict[str, str], status: int, words: str
) -> None:
    async with gateway(tmp_path) as stack:
        found, error = await raw(stack, body, **headers)
        assert found == status, error
        assert words in error["message"]
        assert stored(tmp_path) == []


async def test_limits_are_named_and_hold(tmp_path: Path) -> None:
    settings = {"file_max_bytes": 100_000, "files_bytes": 150_000, "files_count": 2}
    async with gateway(tmp_path, **settings) as stack:
        status, answer = await upload(stack, bytes(300_000))
        assert (status, answer["error"]["code"]) == (413, "file_too_large")
        assert "allowed: 100000 (gateway.file_max_bytes)" in answer["error"]["message"]

        async def pieces() -> AsyncIterator[bytes]:
            yield part('name="file"; filename="a"', bytes(90_000))[:-2]
            while True:
                yield bytes(1000)

        status, error = await raw(stack, pieces())
        assert (status, error["code"]) == (413, "file_too_large")
        assert stored(tmp_path) == []
        assert (await upload(stack, bytes(90_000)))[0] == 200
        status, answer = await upload(stack, bytes(90_000))
        assert (status, answer["error"]["code"]) == (413, "file_storage_full")
        assert "gateway.files_bytes" in answer["error"]["message"]
        assert (await upload(stack, bytes(10)))[0] == 200
        status, answer = await upload(stack, bytes(10))
        assert (status, answer["error"]["code"]) == (413, "file_storage_full")
        assert "gateway.files_count" in answer["error"]["message"]
        assert len(stored(tmp_path)) == 4
        assert await stack.metric("mimo_gateway_files") == 2
        assert await stack.metric("mimo_gateway_files_bytes") == 90_010


async def test_a_client_that_leaves_leaves_nothing(tmp_path: Path) -> None:
    async with gateway(tmp_path) as stack:
        arrived = asyncio.Event()

        async def pieces() -> AsyncIterator[bytes]:
            yield part('name="file"; filename="a"', bytes(600_000))[:-2]
            arrived.set()
            await asyncio.sleep(60)

        sending = asyncio.create_task(raw(stack, pieces()))
        await arrived.wait()
        await until(lambda: any(path.stat().st_size for path in stored(tmp_path)))
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        await until(lambda: not stored(tmp_path))


async def test_a_client_that_says_nothing_more_is_given_up(tmp_path: Path) -> None:
    async with gateway(tmp_path, body_timeout_s=0.2) as stack:

        async def pieces() -> AsyncIterator[bytes]:
            yield part('name="file"; filename="a"')[:-2]
            await asyncio.sleep(30)

        status, error = await raw(stack, pieces())
        assert (status, error["code"]) == (408, "body_timeout")
        assert stored(tmp_path) == []


@pytest.mark.parametrize(
    "path",
    ["..%2F..%2Fetc%2Fpasswd", "%2Fetc%2Fpasswd", "file-%00", ".", "file-" + "0" * 32, "%2e%2e", "a" * 5000, "%ff"],
)
async def test_ids_are_no_paths(tmp_path: Path, path: str) -> None:
    async with gateway(tmp_path) as stack:
        for method, end in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
            url = f"{stack.url}/v1/files/{path}{end}"
            async with stack.session.request(method, URL(url, encoded=True)) as response:
                answer = json.loads(await response.text())
            assert response.status in (404, 405), answer
            assert "passwd" not in answer["error"].get("param", "")


async def test_a_gateway_without_a_place_for_files_has_no_such_route() -> None:
    async with running_gateway() as stack:
        assert (await get(stack, ""))[0] == 404
