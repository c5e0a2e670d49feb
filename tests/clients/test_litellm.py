"""LiteLLM as a library. Its tree is heavy, so it is no part of the test extra: `pip install litellm` to run this."""

import os
from typing import Any

import pytest

from tests.clients.asked import MEDIA, MODEL, PICTURE, PICTURE_ANSWER, TOOL, Shape
from tests.e2e.service import KNOWN_ANSWERS, Service

# Else it asks the network for prices while it is imported.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
litellm: Any = pytest.importorskip("litellm", reason="LiteLLM is not installed: pip install litellm")

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("ignore")]


def ask(served: Service, **fields: Any) -> Any:
    return litellm.completion(
        model=f"openai/{MODEL}",
        api_base=f"{served.url}/v1",
        api_key="none",
        **{"messages": PICTURE, "temperature": 0, "num_retries": 0, **fields},
    )


@pytest.mark.parametrize("name", [name for name in MEDIA if name != "clip.mp4"])
def test_media(served: Service, name: str) -> None:
    answer = ask(served, messages=MEDIA[name])
    assert answer.choices[0].message.content == KNOWN_ANSWERS[name].answer
    assert answer.usage.total_tokens > 0


def test_stream(served: Service) -> None:
    pieces = [piece.choices[0].delta.content or "" for piece in ask(served, stream=True)]
    assert "".join(pieces) == PICTURE_ANSWER


def test_tools_and_schemas(served: Service) -> None:
    call = ask(served, tools=[TOOL], tool_choice="required", max_tokens=120).choices[0].message.tool_calls[0]
    assert call.function.name == "paint"
    answer = ask(served, response_format=Shape, max_tokens=120)
    assert Shape.model_validate_json(answer.choices[0].message.content)


def test_errors_are_its_own_classes(served: Service) -> None:
    with pytest.raises(litellm.BadRequestError):
        ask(served, temperature=9)
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(
            model="openai/other", api_base=f"{served.url}/v1", api_key="none", messages=PICTURE, num_retries=0
        )
