"""Pages of other sites, over HTTP: what they may and may not make a browser do."""

from __future__ import annotations

import aiohttp
import pytest

from epd.gateway.origins import Origins
from tests.fakes.gateway import running_gateway

EVIL, FRIEND = "https://evil.example", "https://chat.example:8443"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}


async def test_other_sites_get_nothing_by_default() -> None:
    async with running_gateway() as stack:
        for method, path in (("POST", "/v1/chat/completions"), ("POST", "/tokenize")):
            async with stack.session.request(method, stack.url + path, json=BODY, headers={"Origin": EVIL}) as answer:
                assert answer.status == 403
                assert (await answer.json())["error"]["code"] == "foreign_page"
        preflight = {"Origin": EVIL, "Access-Control-Request-Method": "POST"}
        async with stack.session.options(f"{stack.url}/v1/chat/completions", headers=preflight) as answer:
            assert answer.status == 405
            assert "Access-Control-Allow-Origin" not in answer.headers
        async with stack.session.get(f"{stack.url}/v1/models", headers={"Origin": EVIL}) as answer:
            assert answer.status == 200
            assert "Access-Control-Allow-Origin" not in answer.headers


async def test_the_own_page_and_no_page_at_all_may() -> None:
    async with running_gateway() as stack:
        for headers in ({}, {"Origin": stack.url}):
            async with stack.session.post(f"{stack.url}/v1/chat/completions", json=BODY, headers=headers) as answer:
                assert answer.status == 200


async def test_an_allowed_origin_is_told_so_on_every_answer() -> None:
    async with running_gateway(cors_origins=(FRIEND,), api_keys=("key",)) as stack:
        url = f"{stack.url}/v1/chat/completions"
        asking = {
            "Origin": FRIEND,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
        }
        # No operation of the document, so not by the session that is held to it.
        async with aiohttp.ClientSession() as browser, browser.options(url, headers=asking) as answer:
            assert answer.status == 204
            assert answer.headers["Access-Control-Allow-Origin"] == FRIEND
            assert "x-stainless-lang" in answer.headers["Access-Control-Allow-Headers"]
        bearer = {"Authorization": "Bearer key"}
        for headers, body, status in (
            ({}, BODY, 401),
            (bearer, {}, 400),
            (bearer, BODY, 200),
            (bearer, {**BODY, "stream": True}, 200),
        ):
            async with stack.session.post(url, json=body, headers={"Origin": FRIEND, **headers}) as answer:
                assert answer.status == status
                assert answer.headers["Access-Control-Allow-Origin"] == FRIEND
                assert "X-Request-Id" in answer.headers["Access-Control-Expose-Headers"]
                assert answer.headers["Vary"] == "Origin"
        async with stack.session.post(url, json=BODY, headers={"Origin": EVIL, **bearer}) as answer:
            assert answer.status == 403
            assert "Access-Control-Allow-Origin" not in answer.headers


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *(("localhost", 200), ("localhost.", 200), ("LOCALHOST.:80", 200), ("a.localhost", 200)),
        *(("127.0.0.1:1", 200), ("[::1]:80", 200), ("mine.test", 200), ("mine.test.", 200)),
        *(("evil.example", 403), ("127.0.0.1.evil.example", 403), ("localhost.evil.example:80", 403), ("[", 403)),
        *(("evil.example.", 403), ("localhost..", 403)),
    ],
)
async def test_names_that_somebody_points_here(host: str, status: int) -> None:
    async with (
        running_gateway(allowed_hosts=("mine.test",)) as stack,
        stack.session.get(f"{stack.url}/v1/models", headers={"Host": host}) as answer,
    ):
        assert answer.status in ({200} if status == 200 else {400, 403})


async def test_names_do_not_matter_where_keys_are_asked_for_or_others_may_come() -> None:
    async with running_gateway(api_keys=("key",)) as stack:
        headers = {"Host": "api.example", "Authorization": "Bearer key"}
        async with stack.session.get(f"{stack.url}/v1/models", headers=headers) as answer:
            assert answer.status == 200
    assert not Origins((), host="0.0.0.0", names=(), asks_for_keys=False)._minds_names
    assert Origins((), host="::1", names=(), asks_for_keys=False)._minds_names
