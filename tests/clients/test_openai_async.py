"""OpenAI's SDK, asynchronous: many at once, streams, retries of what is busy."""

import asyncio

import openai
import pytest

from tests.clients.asked import GREEDY, MEDIA, PICTURE, PICTURE_ANSWER
from tests.e2e.service import KNOWN_ANSWERS, Service
from tests.fakes.gateway import MODEL as FAKE_MODEL
from tests.fakes.gateway import running_gateway, says
from tests.fakes.stages import until

pytestmark = pytest.mark.e2e


def async_client(served: Service, **options: int) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", **{"max_retries": 0, **options})


async def test_many_at_once_each_get_their_own_answer(served: Service) -> None:
    async with async_client(served) as client:

        async def whole(name: str) -> str | None:
            answer = await client.chat.completions.create(**GREEDY, messages=MEDIA[name])
            content: str | None = answer.choices[0].message.content
            return content

        async def streamed(name: str) -> str:
            stream = await client.chat.completions.create(**GREEDY, messages=MEDIA[name], stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        names = [*MEDIA] * 2
        answers = await asyncio.gather(*(whole(name) for name in names), *(streamed(name) for name in names))
    assert list(answers) == [KNOWN_ANSWERS[name].answer for name in names] * 2


async def test_a_task_that_is_cancelled_takes_its_request_along(served: Service) -> None:
    async with async_client(served) as client:
        task = asyncio.create_task(
            client.chat.completions.create(**GREEDY, messages=PICTURE, max_tokens=2000, extra_body={"ignore_eos": True})
        )
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        answer = await client.chat.completions.create(**GREEDY, messages=PICTURE)
        assert answer.choices[0].message.content == PICTURE_ANSWER


async def test_the_client_comes_back_when_told_to() -> None:
    """A busy server answers 503 with Retry-After, and the SDK asks again by itself."""
    async with running_gateway(says("a red circle"), max_inflight=1) as stack:
        messages = [{"role": "user", "content": "hello"}]
        async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=3) as client:
            stack.worker.stall_after = 1
            first = asyncio.create_task(
                client.chat.completions.create(model=FAKE_MODEL, messages=messages)  # type: ignore[call-overload]
            )
            await until(lambda: stack.worker.num_running == 1)
            busy = client.with_options(max_retries=0)
            with pytest.raises(openai.InternalServerError) as refused:
                await busy.chat.completions.create(model=FAKE_MODEL, messages=messages)  # type: ignore[call-overload]
            assert refused.value.status_code == 503
            assert int(refused.value.response.headers["Retry-After"]) >= 1
            assert refused.value.code == "overloaded"
            second = asyncio.create_task(
                client.chat.completions.create(model=FAKE_MODEL, messages=messages)  # type: ignore[call-overload]
            )
            await asyncio.sleep(0.2)
            stack.worker.stall_after = None
            first.cancel()
            answer = await second
            assert answer.choices[0].message.content == "a red circle"


async def test_keys_are_asked_for() -> None:
    async with running_gateway(says("ok"), api_keys=("sesame",)) as stack:
        for key, right in [("sesame", True), ("wrong", False)]:
            async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key=key, max_retries=0) as client:
                if right:
                    assert [model.id async for model in client.models.list()] == [FAKE_MODEL]
                    continue
                with pytest.raises(openai.AuthenticationError) as refused:
                    await client.models.list()
                assert refused.value.code == "invalid_api_key"
