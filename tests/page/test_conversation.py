"""What of a conversation the model hears again: nothing refused or never answered; and its loss."""

from base64 import b64encode
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser, Dialog

from epd.types import Finish, FinishReason, Usage
from tests.fakes.gateway import Stack, running_gateway, says
from tests.page.visit import Visit, visiting

FAULTS = (r"Failed to load resource", "ERR_INTERNET_DISCONNECTED")
PICTURE: Any = {"name": "a.png", "mimeType": "image/png", "buffer": b"some picture"}
PICTURE_URL = f"data:image/png;base64,{b64encode(b'some picture').decode()}"
ANSWER = "a red circle"


async def sent(visit: Visit, act: Callable[[], Awaitable[Any]]) -> list[dict[str, Any]]:
    """The messages of the request that something sends."""
    async with visit.page.expect_request("**/v1/chat/completions") as asked:
        await act()
    body: Any = (await asked.value).post_data_json
    messages: list[dict[str, Any]] = body["messages"]
    return messages


def failed(status: int) -> Finish:
    usage = Usage(prompt_tokens=1, completion_tokens=0)
    return Finish(
        request_id="", reason=FinishReason.FAILED, usage=usage, status=status, code="bad", message="It is bad."
    )


async def fail(visit: Visit, stack: Stack, way: str) -> None:
    """Ask about a picture and get no answer, in one of the ways there are."""
    await visit.page.set_input_files("#files", PICTURE)
    await visit.attached(1)
    number = await visit.answers.count()
    if way == "network":
        await visit.context.set_offline(True)
        await visit.ask("what?")
        await visit.context.set_offline(False)
    elif way == "stopped":
        stack.worker.stall_after = 0
        await visit.page.fill("#question", "what?")
        await visit.page.press("#question", "Enter")
        await visit.page.wait_for_selector("#stop:visible")
        await visit.page.click("#stop")
        await visit.answer(number)
        stack.worker.stall_after = None
    else:
        stack.worker.finish = failed(int(way))
        await visit.ask("what?")
        stack.worker.finish = None


@pytest.mark.parametrize("way", ["422", "400", "429", "500", "network", "stopped"])
async def test_a_question_without_an_answer_is_left_out_until_it_is_asked_again(browser: Browser, way: str) -> None:
    async with running_gateway() as stack, visiting(browser, stack.url, allowed=FAULTS) as visit:
        stack.fetcher.contents[PICTURE_URL] = b"some picture"
        await visit.open()
        await visit.ask("one")
        await fail(visit, stack, way)
        questions = visit.page.locator(".turn.user")
        assert "Not part of the conversation" in await questions.nth(1).inner_text()
        messages = await sent(visit, lambda: visit.ask("two"))
        assert [message["content"] for message in messages] == ["one", ANSWER, "two"]
        # Again, it is the last question, with its picture, and what was asked since stays.
        again = visit.page.locator(".turn.assistant >> nth=1 >> .facts >> text=Try again")
        messages = await sent(visit, again.click)
        assert await visit.answer(2) == ANSWER
        assert [message["content"] for message in messages[:-1]] == ["one", ANSWER, "two", ANSWER]
        assert [part["type"] for part in messages[-1]["content"]] == ["image_url", "text"]
        assert "Not part of the conversation" not in await questions.nth(2).inner_text()
        messages = await sent(visit, lambda: visit.ask("three"))
        assert [message["role"] for message in messages] == ["user", "assistant"] * 3 + ["user"]


async def test_edit_takes_back_a_left_out_question_alone(browser: Browser) -> None:
    async with running_gateway() as stack, visiting(browser, stack.url, allowed=FAULTS) as visit:
        await visit.open()
        await fail(visit, stack, "422")
        await visit.ask("two")
        await visit.page.click(".turn.user.left-out >> text=Edit")
        assert await visit.page.input_value("#question") == "what?"
        await visit.attached(1)
        assert await visit.page.locator(".turn.user .text").all_inner_texts() == ["two"]


async def test_a_call_that_was_cut_is_not_sent_as_whole(browser: Browser) -> None:
    """Its arguments are no JSON, so that the server would refuse every later question."""
    async with running_gateway(says(ANSWER)) as stack, visiting(browser, stack.url, allowed=FAULTS) as visit:
        await visit.open()
        found = await visit.page.evaluate(
            """async () => {
              const { AnswerView } = await import("/page/answer.js");
              const said = (isWhole, ...deltas) => {
                const view = new AnswerView();
                for (const delta of deltas) view.take(delta);
                view.finish(isWhole);
                return view.message();
              };
              const call = (text) => (
                { tool_calls: [{ index: 0, id: "a", function: { name: "f", arguments: text } }] });
              const thought = { reasoning_content: "hm" };
              return [said(true, call('{"x":')), said(true, { content: "so" }, call('{"x":')), said(false, call("{}")),
                said(true, call("{}")), said(false, thought), said(true, thought),
                said(true), said(false), said(false, { content: "so" })];
            }"""
        )
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    so = {"role": "assistant", "content": "so"}
    assert found == [
        None,
        so,
        None,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        None,
        {"role": "assistant", "content": None, "reasoning_content": "hm"},
        {"role": "assistant", "content": ""},
        None,
        so,
    ]


async def test_the_browser_asks_before_a_conversation_is_lost(browser: Browser) -> None:
    async with running_gateway() as stack, visiting(browser, stack.url) as visit:
        asked: list[str] = []

        async def accept(dialog: Dialog) -> None:
            asked.append(dialog.type)
            await dialog.accept()

        visit.page.on("dialog", accept)
        await visit.open()
        await visit.page.click("#question")
        await visit.page.reload()
        assert asked == []
        await visit.ask("one")
        await visit.page.reload()
        assert asked == ["beforeunload"]


async def test_several_files_are_dropped_and_pasted_at_once(browser: Browser, tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.png", "b.mp4", "c.wav", "d.txt")]
    for path in paths:
        path.write_bytes(b"something")
    async with running_gateway() as stack, visiting(browser, stack.url, allowed=FAULTS) as visit:
        await visit.open()
        await visit.give("drop", *paths)
        await visit.attached(3)
        await visit.until("document.getElementById('question').value === 'something'")
        await visit.give("paste", *paths[:2], onto="#question")
        await visit.attached(5)
        messages = await sent(visit, lambda: visit.ask("what?"))
        kinds = [part["type"] for part in messages[0]["content"]]
        assert kinds == ["image_url", "video_url", "audio_url", "image_url", "video_url", "text"]
