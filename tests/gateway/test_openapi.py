"""The document says what the server does: every route of it, every shape, its own model and limits."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from schemathesis.specs.openapi.definitions import OPENAPI_31_VALIDATOR

from epd.gateway.answer_shapes import ModelCard
from epd.gateway.examples import PICTURE
from epd.gateway.openapi import document
from epd.gateway.operations import ERRORS, Answer, FormBody, Operation, Parameter
from epd.gateway.schema_sampling import TOKEN_ID
from epd.gateway_config import GatewayConfig
from tests.fakes.document import AnswerJudge
from tests.fakes.gateway import MODEL, MODEL_DIR, RENDERER, chat_body, running_gateway, says

CONFIG = GatewayConfig(model_dir=MODEL_DIR, model_name=MODEL)


async def served(**settings: Any) -> dict[str, Any]:
    async with running_gateway(says("ok"), **settings) as stack, stack.session.get("/openapi.json") as response:
        assert response.status == 200
        return dict(await response.json())


async def test_every_route_is_in_the_document_and_nothing_else() -> None:
    async with running_gateway(says("ok")) as stack:
        routes = {
            (route.method, route.resource.canonical)
            for route in stack.app.router.routes()
            if route.resource is not None and route.method != "HEAD"
        }
        paths = (await (await stack.session.get("/openapi.json")).json())["paths"]
    assert routes == {(method.upper(), path) for path, methods in paths.items() for method in methods}


async def test_the_document_is_valid_and_its_references_lead_somewhere() -> None:
    whole = await served()
    faults = [f"{error.instance_path}: {error.message}" for error in OPENAPI_31_VALIDATOR.iter_errors(whole)]
    assert not faults
    references = {found["$ref"] for found in objects(whole) if "$ref" in found}
    assert references
    for reference in references:
        target: Any = whole
        for name in reference.removeprefix("#/").split("/"):
            target = target[name]
    used = json.dumps(whole)
    unused = [name for name in whole["components"]["schemas"] if f'"#/components/schemas/{name}"' not in used]
    assert not unused


def objects(value: Any) -> list[dict[str, Any]]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    below = [found for item in inner for found in objects(item)]
    return [value, *below] if isinstance(value, dict) else below


async def test_operations_have_names_of_their_own_and_words_for_people() -> None:
    whole = await served()
    operations = [operation for methods in whole["paths"].values() for operation in methods.values()]
    ids = [operation["operationId"] for operation in operations]
    assert len(ids) == len(set(ids))
    assert all(operation["summary"] for operation in operations)
    assert {tag for operation in operations for tag in operation["tags"]} == {tag["name"] for tag in whole["tags"]}


async def test_it_tells_of_this_server_s_model_limits_and_keys() -> None:
    without, with_keys = await served(max_messages=7), await served(api_keys=("k",))
    chat = without["components"]["schemas"]["ChatBody"]["properties"]
    assert chat["model"]["enum"] == [MODEL]
    assert chat["messages"]["maxItems"] == 7
    post = without["paths"]["/v1/chat/completions"]["post"]
    assert "security" not in post
    assert "401" not in post["responses"]
    post = with_keys["paths"]["/v1/chat/completions"]["post"]
    assert post["security"] == [{"key": []}]
    assert "401" in post["responses"]
    assert "security" not in with_keys["paths"]["/health"]["get"]


async def test_the_document_needs_no_key() -> None:
    async with running_gateway(says("ok"), api_keys=("k",)) as stack:
        for path, status in [("/openapi.json", 200), ("/health", 200), ("/v1/models", 401), ("/v1/nothing", 401)]:
            async with stack.session.get(path) as response:
                assert response.status == status
        async with stack.session.get("/nothing") as response:
            assert response.status == 404
        async with stack.session.post("/health") as response:
            assert response.status == 405
            assert response.headers["Allow"] == "GET,HEAD"


async def nothing(_: web.Request) -> web.Response:
    return web.Response()


def test_forms_parameters_and_paths_with_patterns() -> None:
    operation = Operation(
        method="POST",
        path="/files/{name:[a-z]{1,3}}/of/{model}",
        handler=nothing,
        tag="files",
        summary="Keep a file",
        request=FormBody(shape=ModelCard, files=("file",)),
        responses={200: Answer(description="Kept", media_type="application/octet-stream")},
        errors=(404, 429),
        parameters=(Parameter(name="limit", where="query", description="At most", schema={"type": "integer"}),),
    )
    whole = document([operation], CONFIG)
    written = whole["paths"]["/files/{name}/of/{model}"]["post"]
    assert [(p["name"], p["in"], p["required"]) for p in written["parameters"]] == [
        ("limit", "query", False),
        ("name", "path", True),
        ("model", "path", True),
    ]
    form = written["requestBody"]["content"]["multipart/form-data"]["schema"]
    assert form["properties"]["file"]["format"] == "binary"
    assert form["required"][0] == "file"
    assert list(written["responses"]["200"]["content"]) == ["application/octet-stream"]
    assert {"400", "404", "405", "408", "413", "415", "429", "500", "503"} <= written["responses"].keys()
    assert not list(OPENAPI_31_VALIDATOR.iter_errors(whole))


async def test_all_statuses_of_errors_have_words_and_headers() -> None:
    whole = await served()
    responses = whole["components"]["responses"]
    assert responses.keys() == {f"Error{status}" for status in ERRORS}
    for status in (429, 503):
        assert "Retry-After" in responses[f"Error{status}"]["headers"]
    assert "Allow" in responses["Error405"]["headers"]
    assert all("X-Request-Id" in response["headers"] for response in responses.values())


async def test_answers_are_held_to_the_document() -> None:
    """The judge of every other test of the gateway does see a fault."""
    async with running_gateway(says("ok")) as stack:
        status, body, headers = await stack.ask(logprobs=True, top_logprobs=2)
        judge = AnswerJudge.of(stack.app, CONFIG)
        url, path = stack.url + "/v1/chat/completions", "/v1/chat/completions"
        judge.check("POST", url, status, headers, json.dumps(body))
        for spoilt in (
            body | {"usage": body["usage"] | {"total_tokens": -1}},
            body | {"surprise": 1},
            {name: value for name, value in body.items() if name != "created"},
        ):
            with pytest.raises(AssertionError, match=path):
                judge.check("POST", url, status, headers, json.dumps(spoilt))
        with pytest.raises(AssertionError, match="status 418"):
            judge.check("POST", url, 418, headers, json.dumps(body))
        with pytest.raises(AssertionError, match="request id"):
            judge.check("POST", url, status, {"Content-Type": "application/json"}, json.dumps(body))
        events = await stack.events(stream_options={"include_usage": True})
        stream = "\n\n".join(f"data: {json.dumps(event)}" for event in events[:-1])
        headers = {"X-Request-Id": "r", "Content-Type": "text/event-stream"}
        judge.check("POST", url, 200, headers, stream)
        with pytest.raises(AssertionError, match=path):
            judge.check("POST", url, 200, headers, stream.replace('"assistant"', '"user"'))


async def test_the_examples_of_the_document_work() -> None:
    async with running_gateway(says("ok")) as stack:
        stack.fetcher.contents[PICTURE] = b"picture"
        paths = (await (await stack.session.get("/openapi.json")).json())["paths"]
        num_examples = 0
        for path, methods in paths.items():
            content = methods.get("post", {}).get("requestBody", {}).get("content", {})
            for name, example in content.get("application/json", {}).get("examples", {}).items():
                async with stack.session.post(path, json=example["value"]) as response:
                    assert response.status == 200, (path, name, await response.text())
                    num_examples += 1
    assert num_examples >= 3


async def test_values_that_python_calls_equal_are_no_values_of_a_schema() -> None:
    """Where only false is allowed 0 is not, and where only 0 or 1 is, false and true are not."""
    async with running_gateway(says("ok")) as stack:
        properties = (await (await stack.session.get("/openapi.json")).json())["components"]["schemas"]["ChatBody"]
        tried = 0
        for name, schema in properties["properties"].items():
            only = [option["const"] for option in schema.get("anyOf", ()) if "const" in option]
            for value in only:
                wrong = int(value) if isinstance(value, bool) else bool(value)
                status, body, _ = await stack.ask(**{name: wrong})
                assert (status, body["error"]["param"]) == (400, name)
                assert json.dumps(value) in body["error"]["message"]
                assert (await stack.ask(**{name: value}))[0] == 200
                tried += 1
        assert tried >= 5


async def test_limits_of_rates_and_files_of_keys_are_told(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sesame\n")
    keys.chmod(0o600)
    async with running_gateway(says("ok"), requests_per_minute=60, api_keys_file=keys) as stack:
        async with stack.session.get("/openapi.json") as response:
            whole = await response.json()
        operation = whole["paths"]["/v1/chat/completions"]["post"]
        assert operation["security"] == [{"key": []}]
        assert {"401", "429"} <= operation["responses"].keys()
        status, _, headers = await stack.post(chat_body(), headers={"Authorization": "Bearer sesame"})
        assert status == 200
        for name in operation["responses"]["200"]["headers"]:
            assert name in headers
            rule = whole["components"]["headers"][name]["schema"]["pattern"]
            assert re.search(rule, headers[name])
        assert "X-RateLimit-Limit-Requests" in operation["responses"]["200"]["headers"]


async def test_bodies_have_the_limits_of_this_server() -> None:
    schemas = (await served(max_choices=3, max_prompts=5))["components"]["schemas"]
    chat, text = schemas["ChatBody"]["properties"], schemas["CompletionBody"]["properties"]
    for body in (chat, text):
        assert {"type": "integer", "minimum": 1, "maximum": 3} in body["n"]["anyOf"]
    arrays = [kind for kind in text["prompt"].get("anyOf") or text["prompt"]["oneOf"] if kind["type"] == "array"]
    assert [kind.get("maxItems") for kind in arrays] == [5, None, 5]
    last = RENDERER.vocabulary.num_token_ids - 1
    token_id = {"type": "integer", "minimum": 0, "maximum": last}
    assert arrays[1]["items"] == arrays[2]["items"]["items"] == token_id
    assert schemas["DetokenizeBody"]["properties"]["tokens"]["items"] == token_id
    assert next(kind for kind in chat["stop_token_ids"]["anyOf"] if kind["type"] == "array")["items"] == token_id
    assert TOKEN_ID not in json.dumps(schemas)


@pytest.mark.parametrize("body", ["ChatBody", "CompletionBody"])
async def test_every_field_of_a_request_is_described(body: str) -> None:
    properties = (await served())["components"]["schemas"][body]["properties"]
    assert not [name for name, field in properties.items() if not field.get("description")]
