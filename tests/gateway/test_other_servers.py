"""Users of other servers are told what to use here, by routes, by fields, and in docs/api.md."""

import json
from pathlib import Path
from typing import Any

import pytest

from epd.config import GatewayConfig
from epd.errors import InvalidRequest
from epd.gateway.other_servers import FIELDS, ROUTES
from epd.gateway.schema import ChatBody
from epd.gateway.validation import read_body
from tests.fakes.gateway import IMAGE_URL, MODEL, MODEL_DIR, chat_body, running_gateway, says

DOCS = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
LIMITS = GatewayConfig(model_dir=MODEL_DIR, model_name=MODEL)
PICTURE = {"type": "image_url", "image_url": {"url": IMAGE_URL}}


def refusal(body: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        read_body(body if isinstance(body, bytes) else json.dumps(body).encode(), ChatBody, LIMITS)
    return caught.value


async def test_an_unknown_route_names_what_to_use(tmp_path: Path) -> None:
    near = {"/v1/models/": "/v1/models", "/models": "/v1/models", "/v1/v1/files": "/v1/files", "/v1/health": "/health"}
    async with running_gateway(files_dir=tmp_path) as stack:
        for path, instead in {**ROUTES, **near}.items():
            async with stack.session.get(path) as response:
                error = (await response.json())["error"]
                assert (response.status, error["code"]) == (404, "unknown_route")
                assert error["message"] == f"there is no route {path}; use {instead}"
            async with stack.session.options(instead.split()[0].rstrip(",")) as response:
                assert response.status == 405, f"{instead} is a route"
        async with stack.session.get("/nowhere") as response:
            assert (await response.json())["error"]["message"] == "there is no route /nowhere"


@pytest.mark.parametrize("field", [field for field in FIELDS if "." not in field])
def test_a_field_of_another_server_names_what_to_use(field: str) -> None:
    error = refusal(chat_body(**{field: "x"}))
    assert error.param == field
    assert f"; use {FIELDS[field]}" in error.message


def test_the_older_word_for_calls_in_a_message() -> None:
    turn = {"role": "assistant", "content": "x", "function_call": {"name": "f", "arguments": "{}"}}
    error = refusal(chat_body() | {"messages": [turn]})
    assert error.message.endswith("allowed: null; use tool_calls")


def test_a_misspelled_field_names_the_nearest() -> None:
    assert "; the nearest is temperature; allowed" in refusal(chat_body(temprature=1)).message
    assert "nearest" not in refusal(chat_body(x=1)).message
    assert "nearest" not in refusal(chat_body(**{"x" * 100_000: 1})).message


def test_the_documents_have_the_table() -> None:
    table = DOCS.partition("## Coming from")[2].partition("\n## ")[0]
    assert not [name for name in (*ROUTES, *FIELDS) if "." not in name and f"`{name}`" not in table]


@pytest.mark.parametrize(
    ("message", "param", "words"),
    [
        ({"content": [{"type": "image_url", "image_url": "data:x"}]}, "content[0].image_url", 'object: {"url": ...}'),
        ({"content": [{"type": "input_audio", "input_audio": "x"}]}, "content[0].input_audio", 'object: {"data": ...}'),
        ({"role": "system", "content": [PICTURE]}, "content[0].type", 'of the role "system"; media go into messages'),
        ({"role": "tool", "tool_call_id": "1", "content": [PICTURE]}, "content[0].type", 'of the role "tool"'),
    ],
)
def test_what_a_part_must_be_is_told(message: dict[str, Any], param: str, words: str) -> None:
    error = refusal(chat_body() | {"messages": [{"role": "user"} | message]})
    assert error.param == f"messages[0].{param}"
    assert words in error.message


def test_no_body_and_numbers_that_are_none() -> None:
    assert refusal(b"").message == "the body is empty; it must be a JSON object"
    for number in (b"NaN", b"1e999", b"-Infinity"):
        error = refusal(b'{"model": "m", "temperature": ' + number + b"}")
        assert error.param == "temperature"
        assert "temperature" in error.message


async def test_options_beside_a_key_are_refused_wherever_they_stand() -> None:
    async with running_gateway() as stack:
        for part, param in [({"image_url": {"detail": "low"}}, "image_url.detail"), ({"detail": "low"}, "detail")]:
            part = {"type": "image_url", "key": "0" * 32, **part}
            status, body, _ = await stack.post(chat_body([part]))
            assert status == 400
            assert body["error"]["param"] == f"messages[0].content[0].{param}"
            assert "a key stands for content and options" in body["error"]["message"]


async def test_what_is_taken_without_effect() -> None:
    marked = {"cache_control": {"type": "ephemeral", "ttl": "5m"}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    part = {"type": "text", "text": "hi"}
    plain = {"messages": [{"role": "user", "content": [part]}], "tools": [tool]}
    named = {
        "messages": [{"role": "user", "name": "ann", **marked, "content": [part | marked]}],
        "tools": [tool | marked],
    }
    async with running_gateway(says("ok")) as stack:
        for body in (plain, named):
            status, _, _ = await stack.post({"model": MODEL, **body})
            assert status == 200
        first, second = stack.worker.submitted
        assert first.token_ids == second.token_ids
    assert "`cache_control`" in DOCS
    assert "`messages[].name`" in DOCS


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/files"),
        ("GET", "/v1/files"),
        ("GET", "/v1/files/file-1"),
        ("GET", "/v1/models"),
        ("GET", "/v1/pipeline"),
        ("POST", "/tokenize"),
        ("POST", "/v1/encode"),
    ],
)
async def test_an_unknown_query_parameter_is_refused(tmp_path: Path, method: str, path: str) -> None:
    async with (
        running_gateway(files_dir=tmp_path) as stack,
        stack.session.request(method, path, params={"foo": "1"}, json={} if method == "POST" else None) as response,
    ):
        error = (await response.json())["error"]
    assert (response.status, error["param"]) == (400, "foo")
    assert error["message"].startswith('unknown query parameter "foo"; allowed: ')


async def test_probes_may_bring_any_query() -> None:
    async with running_gateway(api_keys=("k",)) as stack:
        for path in ("/health", "/metrics", "/openapi.json"):
            async with stack.session.get(path, params={"t": "1"}) as response:
                assert response.status == 200
        async with stack.session.get("/v1/models", params={"t": "1"}) as response:
            assert response.status == 401, "keys come first"


async def test_the_result_of_a_call_that_nobody_made_is_refused() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turns = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
    ]
    async with running_gateway(says("ok")) as stack:
        assert (await stack.post(chat_body() | {"messages": turns}))[0] == 200
        for order in ((0, 2), (0, 2, 1)):
            status, body, _ = await stack.post(chat_body() | {"messages": [turns[i] for i in order]})
            assert status == 400
            assert body["error"]["param"] == "messages[1].tool_call_id"
            assert 'is "c1"; allowed: the id of a call' in body["error"]["message"]
