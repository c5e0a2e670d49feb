"""LangChain's ChatOpenAI, pointed at this server."""

from typing import Any, Literal

import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from tests.clients.asked import MODEL, PICTURE_ANSWER, PICTURE_URL, Shape
from tests.e2e.service import KNOWN_ANSWERS, Service

pytestmark = pytest.mark.e2e
PICTURE = HumanMessage(
    [
        {"type": "image_url", "image_url": {"url": PICTURE_URL}},
        {"type": "text", "text": KNOWN_ANSWERS["picture.png"].question},
    ]
)


@pytest.fixture
def chat(served: Service) -> ChatOpenAI:
    return chat_of(served)


def chat_of(served: Service, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=f"{served.url}/v1", api_key=SecretStr("none"), model=MODEL, temperature=0, max_retries=0, **options
    )


@tool
def paint(colour: Literal["red", "green"], layers: Literal[1, 2, 3]) -> str:
    """Paint the picture."""
    return f"{layers} layers of {colour}"


def test_invoke_about_a_picture(chat: ChatOpenAI) -> None:
    answer = chat.invoke([PICTURE])
    assert answer.content == PICTURE_ANSWER
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["total_tokens"] > 0
    assert answer.response_metadata["finish_reason"] == "stop"


def test_its_own_image_blocks(chat: ChatOpenAI) -> None:
    """The blocks that LangChain translates for every provider."""
    _, _, encoded = PICTURE_URL.partition("base64,")
    block = {"type": "image", "base64": encoded, "mime_type": "image/png"}
    message = HumanMessage([block, {"type": "text", "text": KNOWN_ANSWERS["picture.png"].question}])
    assert chat.invoke([message]).content == PICTURE_ANSWER


def test_stream(served: Service) -> None:
    pieces = list(chat_of(served, stream_usage=True).stream([PICTURE]))
    assert "".join(str(piece.content) for piece in pieces) == PICTURE_ANSWER
    assert any(piece.usage_metadata for piece in pieces)


async def test_async_batch(chat: ChatOpenAI) -> None:
    answers = await chat.abatch([[PICTURE], [SystemMessage("Be brief."), PICTURE]])
    assert answers[0].content == PICTURE_ANSWER
    assert answers[1].content


def test_bound_tools(served: Service) -> None:
    bound = chat_of(served, max_tokens=120).bind_tools([paint], tool_choice="required", strict=True)
    answer = bound.invoke([PICTURE])
    assert isinstance(answer, AIMessage)
    assert answer.tool_calls, answer
    call = answer.tool_calls[0]
    result = paint.invoke(call)
    assert isinstance(result, ToolMessage)
    after = chat_of(served, max_tokens=20).bind_tools([paint]).invoke([PICTURE, answer, result])
    assert after.content or after.tool_calls  # type: ignore[attr-defined]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(served: Service, method: Literal["json_schema", "function_calling"]) -> None:
    structured = chat_of(served, max_tokens=120).with_structured_output(Shape, method=method, strict=True)
    assert isinstance(structured.invoke([PICTURE]), Shape)
