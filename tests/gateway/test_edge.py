"""Limits, TLS and the log as a client and an operator meet them."""

from __future__ import annotations

import asyncio
import logging
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from epd.config import GatewayConfig
from epd.gateway.process import check_gateway
from epd.gateway.tls import Tls, TlsUnusable
from tests.fakes.gateway import MODEL_DIR, running_gateway

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}


async def test_too_many_requests_are_told_when_to_come_back() -> None:
    async with running_gateway(requests_per_minute=2, api_keys=("one", "two")) as stack:
        url = f"{stack.url}/v1/chat/completions"
        statuses = []
        for key in ("one", "one", "one", "two"):
            async with stack.session.post(url, json=BODY, headers={"Authorization": f"Bearer {key}"}) as answer:
                statuses.append(answer.status)
                if answer.status == 429:
                    error = (await answer.json())["error"]
                    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
                    assert 25 <= int(answer.headers["Retry-After"]) <= 30
                    assert "gateway.requests_per_minute" in error["message"]
                    assert answer.headers["X-RateLimit-Limit-Requests"] == "2"
                    assert answer.headers["X-RateLimit-Remaining-Requests"] == "0"
                    assert 55 <= float(answer.headers["X-RateLimit-Reset-Requests"].removesuffix("s")) <= 60
                else:
                    assert answer.headers["X-RateLimit-Limit-Requests"] == "2"
        assert statuses == [200, 200, 429, 200]
        # Looking is free, and a wrong key uses nobody's share.
        for _ in range(5):
            async with stack.session.get(f"{stack.url}/v1/models", headers={"Authorization": "Bearer one"}) as answer:
                assert answer.status == 200
            async with stack.session.post(url, json=BODY, headers={"Authorization": "Bearer no"}) as answer:
                assert answer.status == 401
                assert answer.headers["WWW-Authenticate"] == "Bearer"
        async with stack.session.post(url, json=BODY, headers={"Authorization": "Bearer two"}) as answer:
            assert answer.status == 200


async def test_the_log_has_a_line_per_request_and_no_key(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "epd.gateway.access")
    async with running_gateway(api_keys=("very-secret",)) as stack:
        headers = {"Authorization": "Bearer very-secret", "X-Request-Id": "mine-1"}
        async with stack.session.post(f"{stack.url}/v1/chat/completions", json=BODY, headers=headers) as answer:
            assert answer.status == 200
        async with stack.session.get(f"{stack.url}/health") as answer:
            assert answer.status == 200
        async with stack.session.get(f"{stack.url}/v1/no\nwhere", headers=headers) as answer:
            assert answer.status == 404
    lines = [record for record in caplog.records if record.name == "epd.gateway.access"]
    assert [record.__dict__["facts"]["status"] for record in lines] == [200, 404]
    assert lines[0].__dict__["facts"]["request_id"] == "mine-1"
    assert lines[0].__dict__["facts"]["client"]
    assert "very-secret" not in caplog.text
    assert "no\nwhere" not in caplog.text


def make_certificate(directory: Path, name: str, *, passphrase: str | None = None) -> tuple[Path, Path]:
    certificate, key = directory / f"{name}.pem", directory / f"{name}.key"
    secret = ["-nodes"] if passphrase is None else ["-passout", f"pass:{passphrase}"]
    command = [
        *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", *secret),
        *("-keyout", str(key), "-out", str(certificate), "-days", "2", "-subj", f"/CN={name}"),
        *("-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"),
    ]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key


async def name_of_server(url: str, trusted: list[Path]) -> str:
    """Who answers on a new connection, as a client that checks it; it answers a request, too."""
    context = ssl.create_default_context()
    for path in trusted:
        context.load_verify_locations(path)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]), ssl=context)
    writer.write(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    subject = writer.get_extra_info("peercert")["subject"]
    writer.close()
    return str(dict(item[0] for item in subject)["commonName"])


async def test_tls_and_a_certificate_that_is_renewed(tmp_path: Path) -> None:
    (certificate, key), (new_certificate, new_key) = make_certificate(tmp_path, "a"), make_certificate(tmp_path, "b")
    tls = Tls(certificate, key)
    async with running_gateway(tls=tls) as stack:
        trusted = [certificate.with_name("trust-a.pem"), new_certificate]
        trusted[0].write_bytes(certificate.read_bytes())
        assert await name_of_server(stack.url, trusted) == "a"
        certificate.write_bytes(new_certificate.read_bytes())
        tls.renew()
        assert await name_of_server(stack.url, trusted) == "a", "half a change is none"
        key.write_bytes(new_key.read_bytes())
        tls.renew()
        assert await name_of_server(stack.url, trusted) == "b"
        with pytest.raises((aiohttp.ClientError, ConnectionError)):
            await stack.session.get(f"{stack.url}/v1/models")
    assert tls.context.minimum_version >= ssl.TLSVersion.TLSv1_2


def test_files_of_tls_that_cannot_be_used(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path, "a")
    _, other_key = make_certificate(tmp_path, "b")
    _, locked_key = make_certificate(tmp_path, "c", passphrase="secret")
    for files in ((certificate, other_key), (key, certificate), (tmp_path / "no", key), (certificate, locked_key)):
        with pytest.raises(TlsUnusable, match=r"gateway\.tls_"):
            Tls(*files)


def test_settings_that_contradict_themselves(tmp_path: Path) -> None:
    def config(**settings: object) -> GatewayConfig:
        return GatewayConfig(model_dir=MODEL_DIR, model_name="tiny", **settings)  # type: ignore[arg-type]

    for settings, words in (
        ({"tls_key": tmp_path}, "tls_certificate"),
        ({"tls_certificate": tmp_path}, "tls_key"),
        ({"requests_burst": 3}, "requests_per_minute"),
        ({"requests_per_minute": -1}, "requests_per_minute"),
        ({"cors_origins": ("chat.example",)}, "cors_origins"),
        ({"cors_origins": ("https://chat.example/path",)}, "cors_origins"),
    ):
        with pytest.raises(ValueError, match=words):
            config(**settings)
    with pytest.raises(ValueError, match="api_keys_file"):
        check_gateway(config(api_keys_file=tmp_path / "absent"))
    check_gateway(config(cors_origins=("https://a.example", "http://localhost:3000/", "*")))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize("announced", [True, False])
async def test_a_body_that_is_too_large_is_told_how_much_may_be_sent(path: str, announced: bool) -> None:
    async with running_gateway(max_body_bytes=1000) as stack:
        body = b"x" * 1500

        async def pieces() -> AsyncIterator[bytes]:
            yield body

        headers = {"Content-Type": "application/json"}
        async with stack.session.post(path, data=body if announced else pieces(), headers=headers) as answer:
            assert answer.status == 413
            given = "1500 bytes" if announced else "more than 1000 bytes"
            message = (await answer.json())["error"]["message"]
            assert message == f"the body has {given}; allowed: 1000 (gateway.max_body_bytes)"


async def test_the_fingerprint_is_one_also_for_who_waited_for_the_workers() -> None:
    async with running_gateway(restart_wait_s=20.0) as stack:
        stack.worker.kv_fingerprint = "weights"
        stack.worker.die()
        await asyncio.sleep(0.1)
        waiting = asyncio.create_task(stack.ask())
        streaming = asyncio.create_task(stack.events())
        await asyncio.sleep(0.1)
        stack.worker.start()
        told = [(await waiting)[1], (await stack.ask())[1], *(await streaming)[:-1]]
        assert len({event["system_fingerprint"] for event in told}) == 1
