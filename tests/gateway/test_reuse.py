"""Media that are named instead of sent: by the client's uuid, or by the key it was told."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from epd.types import GenerateRequest
from tests.fakes.gateway import IMAGE_URL, VIDEO_URL, Stack, running_gateway
from tests.fakes.stages import until

PATH = "messages[0].content[0]"
PNG, OTHER = IMAGE_URL, VIDEO_URL
UNKNOWN = "0" * 32


def part(url: str | None = None, kind: str = "image", **fields: Any) -> dict[str, Any]:
    inner = {} if url is None else {f"{kind}_url": {"url": url}}
    return {"type": f"{kind}_url", **inner, **fields}


async def told(stack: Stack, *parts: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    status, answer, _ = await stack.ask(list(parts), **fields)
    assert status == 200, answer
    media: list[dict[str, Any]] = answer["media"]
    return media


async def refused(stack: Stack, *parts: dict[str, Any], **options: Any) -> tuple[int, str, str]:
    """Status, code, and the field at fault."""
    status, answer, _ = await stack.ask(list(parts), **options)
    return status, answer["error"]["code"], answer["error"]["param"]


async def test_keys_are_told_when_asked_for_or_when_a_name_is_used() -> None:
    async with running_gateway() as stack:
        _, answer, _ = await stack.ask([part(PNG)])
        assert "media" not in answer
        media = await told(stack, part(PNG), {"type": "text", "text": "?"}, part(OTHER), return_media=True)
        assert [entry["param"] for entry in media] == [f"{PATH}.image_url", "messages[0].content[2].image_url"]
        assert media[0]["uuid"] is None
        assert (media[0]["modality"], media[0]["tokens"], media[0]["cached"]) == ("image", 9, True)
        assert media[1]["cached"] is False
        (named,) = await told(stack, part(PNG, uuid="mine"))
        assert (named["key"], named["uuid"]) == (media[0]["key"], "mine")
        events = await stack.events([part(PNG, uuid="mine")])
        with_media = [event for event in events if isinstance(event, dict) and "media" in event]
        assert [event["media"] for event in with_media] == [[named]]
        assert with_media[0]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("absent", [{}, {"image_url": None}])
async def test_a_uuid_stands_for_content(absent: dict[str, Any]) -> None:
    async with running_gateway() as stack:
        (first,) = await told(stack, part(IMAGE_URL, uuid="mine"))
        (again,) = await told(stack, part(uuid="mine", **absent))
        assert again["key"] == first["key"]
        assert again["cached"] is True
        assert stack.encoder.encoded == [b"image", b"image"]
        assert stack.fetcher.fetched == [IMAGE_URL], "what is known is not fetched again"
        (low,) = await told(stack, part(uuid="mine", detail="low", **absent))
        assert low["key"] != first["key"], "options are those of the part"


async def test_a_uuid_means_what_came_with_it_last() -> None:
    async with running_gateway() as stack:
        (first,) = await told(stack, part(PNG, uuid="u"))
        (second,) = await told(stack, part(OTHER, uuid="u"))
        (named,) = await told(stack, part(uuid="u"))
        assert first["key"] != second["key"] == named["key"]
        assert stack.encoder.encoded[-1] == b"video"


async def test_the_same_uuid_in_flight_many_times_is_fine() -> None:
    async with running_gateway() as stack:
        parts = [part(PNG, uuid="u")] * 3
        media = await asyncio.gather(*(told(stack, *parts) for _ in range(4)))
        assert len({entry["key"] for request in media for entry in request}) == 1
        assert (await told(stack, part(uuid="u")))[0]["key"] == media[0][0]["key"]


async def test_a_key_stands_for_content_and_options() -> None:
    async with running_gateway() as stack:
        (low,) = await told(stack, part(PNG, detail="low"), return_media=True)
        (again,) = await told(stack, part(key=low["key"]))
        assert again == low | {"cached": True, "param": f"{PATH}.image_url"}
        assert stack.encoder.asked[-1][2].detail == "low"
        assert stack.encoder.asked_by_key == []
        assert await refused(stack, part(key=low["key"], detail="low")) == (400, "invalid_request", f"{PATH}.detail")


async def test_a_key_that_only_the_encoders_know() -> None:
    async with running_gateway(media_shelf_bytes=0) as stack:
        (first,) = await told(stack, part(PNG), return_media=True)
        (again,) = await told(stack, part(key=first["key"]))
        assert again == first | {"cached": True}
        assert stack.encoder.asked_by_key == [first["key"]]
        assert stack.encoder.encoded == [b"image"]
        assert not stack.encoder.leases


async def test_content_outlives_the_embedding() -> None:
    async with running_gateway() as stack:
        (first,) = await told(stack, part(PNG), return_media=True)
        stack.encoder.kept.clear()
        (again,) = await told(stack, part(key=first["key"]))
        assert again == first
        assert stack.encoder.encoded == [b"image", b"image"]


@pytest.mark.parametrize(
    ("given", "field"),
    [
        (part(uuid="never"), "uuid"),
        (part(key=UNKNOWN), "key"),
        (part(uuid="never", key=UNKNOWN), "key"),
        ({"type": "input_audio", "uuid": "never"}, "uuid"),
        (part(kind="video", uuid="never"), "uuid"),
    ],
)
async def test_an_unknown_name_is_a_404_that_names_it(given: dict[str, Any], field: str) -> None:
    async with running_gateway() as stack:
        status, answer, _ = await stack.ask([given])
        error = answer["error"]
        assert (status, error["code"], error["param"]) == (404, "unknown_media", f"{PATH}.{field}")
        assert given[field] in error["message"]
        assert "send its content" in error["message"]


@pytest.mark.parametrize(
    ("given", "param"),
    [
        (part(), f"{PATH}.image_url"),
        (part(uuid=""), f"{PATH}.uuid"),
        (part(uuid="u" * 257), f"{PATH}.uuid"),
        (part(uuid=7), f"{PATH}.uuid"),
        (part(key="0" * 31), f"{PATH}.key"),
        (part(key="A" * 32), f"{PATH}.key"),
        (part(key="../" * 10 + "00"), f"{PATH}.key"),
        (part(PNG, key=UNKNOWN), f"{PATH}.key"),
        ({"type": "text", "text": "hi", "uuid": "u"}, f"{PATH}.uuid"),
    ],
)
async def test_names_that_make_no_sense(given: dict[str, Any], param: str) -> None:
    async with running_gateway() as stack:
        status, answer, _ = await stack.ask([given])
        assert (status, answer["error"]["param"]) == (400, param), answer


async def test_a_key_is_of_one_kind() -> None:
    for shelf_bytes in (1 << 20, 0):
        async with running_gateway(media_shelf_bytes=shelf_bytes) as stack:
            (first,) = await told(stack, part(PNG), return_media=True)
            wrong = part(kind="audio", key=first["key"])
            assert await refused(stack, wrong) == (400, "invalid_request", f"{PATH}.key")
            assert not stack.encoder.leases


async def test_the_key_of_other_content_is_refused() -> None:
    async with running_gateway() as stack:
        one, other = await told(stack, part(PNG, uuid="u"), part(OTHER))
        assert (await told(stack, part(PNG, key=one["key"])))[0]["key"] == one["key"]
        assert await refused(stack, part(PNG, key=other["key"])) == (400, "invalid_request", f"{PATH}.key")


async def test_names_are_per_api_key() -> None:
    async with running_gateway(api_keys=("one", "two")) as stack:
        one, two = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))

        def body(given: dict[str, Any]) -> dict[str, Any]:
            return {"model": "tiny", "messages": [{"role": "user", "content": [given]}]}

        assert (await stack.post(body(part(PNG, uuid="u")), headers=one))[0] == 200
        assert (await stack.post(body(part(uuid="u")), headers=one))[0] == 200
        status, answer, _ = await stack.post(body(part(uuid="u")), headers=two)
        assert (status, answer["error"]["code"]) == (404, "unknown_media")


async def test_after_a_loss_a_medium_of_which_only_the_key_is_known_is_asked_for_again() -> None:
    async with running_gateway(media_shelf_bytes=0) as stack:
        (first,) = await told(stack, part(PNG), return_media=True)
        stack.worker.die_after = 0
        asking = asyncio.create_task(stack.ask([part(key=first["key"])]))
        await until(lambda: stack.worker.die_after is None)
        stack.worker.start()
        status, answer, _ = await asking
        assert status == 200, answer
        assert stack.encoder.asked_by_key == [first["key"]] * 2
        assert not stack.encoder.leases


async def test_after_a_loss_a_medium_that_nobody_has_any_more_is_a_clear_error() -> None:
    async with running_gateway(media_shelf_bytes=0) as stack:
        (first,) = await told(stack, part(PNG), return_media=True)
        answer = stack.worker.answer

        def last_answer(request: GenerateRequest) -> Sequence[int]:
            stack.encoder.kept.clear()
            return answer(request)

        stack.worker.answer, stack.worker.die_after = last_answer, 0
        asking = asyncio.create_task(stack.ask([part(key=first["key"])]))
        await until(lambda: stack.worker.die_after is None)
        stack.worker.start()
        status, body, _ = await asking
        error = body["error"]
        assert (status, error["code"], error["param"]) == (404, "unknown_media", f"{PATH}.key")
        assert first["key"] in error["message"]


async def test_a_shelf_that_is_full_forgets_what_was_used_least_recently() -> None:
    async with running_gateway(media_shelf_bytes=800) as stack:
        for name in ("a", "b", "c"):
            await told(stack, part(PNG, uuid=name))
        assert await refused(stack, part(uuid="a")) == (404, "unknown_media", f"{PATH}.uuid")
        await told(stack, part(uuid="c"))
        shelf = "mimo_gateway_media_shelf"
        assert 0 < await stack.metric(f"{shelf}_bytes") <= 800
        assert await stack.metric(f"{shelf}_names") == 2
        assert await stack.metric(f"{shelf}_lookups_total") == 2
        assert await stack.metric(f"{shelf}_evictions_total") == 2
