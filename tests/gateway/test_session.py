"""What puts requests into one session, and that the workers hear of it."""

from typing import Any

import pytest

from epd.gateway.schema import ChatBody
from epd.gateway.session import session_of
from epd.types import Role
from tests.fakes.gateway import IMAGE_URL, VIDEO_URL, running_gateway, says

SYSTEM = {"role": "system", "content": "Be brief."}
FIRST = {"role": "user", "content": "What is a ring?"}
LATER = [{"role": "assistant", "content": "A circle."}, {"role": "user", "content": "And a torus?"}]


def session(*messages: dict[str, Any], **fields: Any) -> str:
    return session_of(ChatBody.model_validate({"model": "tiny", "messages": [*messages], **fields}))


def test_the_client_may_name_it() -> None:
    assert session(FIRST, prompt_cache_key="user-7") == "user-7"
    assert session(SYSTEM, prompt_cache_key="user-7") == "user-7"
    assert session(FIRST, prompt_cache_key="") == session(FIRST, prompt_cache_key=None) == session(FIRST)


def test_turns_of_a_conversation_stay_in_it_whatever_is_sampled() -> None:
    assert session(SYSTEM, FIRST) == session(SYSTEM, FIRST, *LATER) == session(SYSTEM, FIRST, temperature=0.5, seed=3)
    assert len(session(SYSTEM, FIRST)) == 32


def test_what_begins_otherwise_is_another() -> None:
    picture = {"type": "image_url", "image_url": {"url": IMAGE_URL}}
    text = {"type": "text", "text": FIRST["content"]}
    video = {"type": "video_url", "video_url": {"url": VIDEO_URL}}
    begun = [
        (FIRST,),
        (SYSTEM, FIRST),
        (SYSTEM, LATER[1]),
        (SYSTEM,),
        ({"role": "user", "content": [picture, text]},),
        ({"role": "user", "content": [text, picture]},),
        ({"role": "user", "content": [text, video]},),
        ({"role": "user", "content": [text, {**video, "fps": 1.0}]},),
        ({"role": "user", "content": [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}]},),
        ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "bc"}]},),
    ]
    assert len({session(*messages) for messages in begun} | {session(FIRST, model="other")}) == len(begun) + 1


@pytest.mark.parametrize("roles", [(Role.BOTH,), (Role.PREFILL, Role.DECODE)])
async def test_workers_hear_of_it(roles: tuple[Role, ...]) -> None:
    async with running_gateway(says("yes"), roles=roles) as stack:
        for fields in ({"prompt_cache_key": "user-7"}, {}):
            status, body, _ = await stack.ask("What?", **fields)
            assert status == 200, body
        named, unnamed = (request.session for request in stack.worker.submitted)
        assert named == "user-7"
        assert unnamed == session({"role": "user", "content": "What?"})


async def test_a_name_too_long_is_refused() -> None:
    async with running_gateway(says("yes")) as stack:
        status, _, _ = await stack.ask("What?", prompt_cache_key="é" * 256)
        assert status == 200
        status, body, _ = await stack.ask("What?", prompt_cache_key="é" * 257)
        assert status == 400
        assert body["error"]["param"] == "prompt_cache_key"
        assert "at most 256 characters" in body["error"]["message"]


def test_a_name_is_a_string() -> None:
    with pytest.raises(ValueError, match="prompt_cache_key"):
        session(FIRST, prompt_cache_key=7)
