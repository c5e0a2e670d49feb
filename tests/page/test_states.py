"""The page and what does not happen every day: keys, errors, a server that goes, tools, thoughts, hostile text."""

import asyncio
import json
import re
from typing import Any

import pytest
from playwright.async_api import Browser

from epd.types import Finish, FinishReason, Usage
from tests.fakes.gateway import running_gateway, says
from tests.page.visit import visiting

NO_USAGE = Usage(prompt_tokens=1, completion_tokens=0)
REFUSED = r"Failed to load resource"
HOSTILE = (
    "<img src=x onerror=alert(1)> <script>alert(2)</script> [link](javascript:alert(3))\n\n"
    "**bold** and *leaning*, 2*3*4, `a < b`\n\n# Title\n\n- one\n- two\n\n3. three\n4. four\n\n> said\n\n"
    "```python\nprint('**not bold**')\n```\n\nlast line"
)


async def test_what_the_model_says_is_text(browser: Browser) -> None:
    async with running_gateway(says(HOSTILE)) as stack, visiting(browser, stack.url) as visit:
        await visit.open()
        await visit.ask("hello")
        body = visit.answers.nth(0).locator(".body").first
        assert await body.locator("img, script, a, iframe").count() == 0
        assert "<img src=x onerror=alert(1)>" in await body.inner_text()
        assert await body.locator("strong").all_inner_texts() == ["bold"]
        assert await body.locator("em").all_inner_texts() == ["leaning"]
        assert "2*3*4" in await body.inner_text()
        assert await body.locator("p code").all_inner_texts() == ["a < b"]
        assert await body.locator("h3").all_inner_texts() == ["Title"]
        assert await body.locator("ul li").all_inner_texts() == ["one", "two"]
        assert await body.locator("ol").get_attribute("start") == "3"
        assert await body.locator("blockquote").all_inner_texts() == ["said"]
        assert await body.locator("pre code").all_inner_texts() == ["print('**not bold**')"]
        assert (await body.inner_text()).endswith("last line")


async def test_thoughts_are_folded_and_settings_are_sent_and_kept(browser: Browser) -> None:
    async with running_gateway(says("<think>it is red</think>Red.")) as stack, visiting(browser, stack.url) as visit:
        await visit.open()
        page = visit.page
        await page.click("#open-settings")
        await page.fill("#temperature", "0.7")
        await page.fill("#max-tokens", "33")
        await page.select_option("#thinking", "on")
        await page.fill("#system", "Be brief.")
        await page.fill("#schema", "{oops")
        await page.click("#settings-save")
        assert "The JSON schema is not JSON" in await page.inner_text("#settings-fault")
        await page.fill("#schema", "")
        await page.click("#settings-save")
        await page.reload()
        await page.wait_for_selector("#pulse:has-text('live')")
        async with page.expect_request("**/v1/chat/completions") as asked:
            assert await visit.ask("Which colour?") == "Red."
        body = (await asked.value).post_data_json
        assert body["temperature"] == 0.7
        assert body["max_tokens"] == 33
        assert body["chat_template_kwargs"] == {"enable_thinking": True}
        assert body["messages"][0] == {"role": "system", "content": "Be brief."}
        details = visit.answers.nth(0).locator(".reasoning")
        assert re.match(r"Thought for", await details.locator("summary").inner_text())
        assert not await details.locator("p").is_visible()
        await details.locator("summary").click()
        assert await details.locator("p").inner_text() == "it is red"


CALL = "<tool_call>\n<function=weather>\n<parameter=city>Graz</parameter>\n</function>\n</tool_call>"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


async def test_a_tool_call_is_readable_and_its_result_goes_back(browser: Browser) -> None:
    def answer(request: Any) -> Any:
        return says(CALL if len(stack.worker.submitted) == 1 else "It rains.")(request)

    async with running_gateway(answer) as stack, visiting(browser, stack.url) as visit:
        await visit.open()
        page = visit.page
        await page.click("#open-settings")
        await page.fill("#functions", json.dumps([WEATHER]))
        await page.click("#settings-save")
        await visit.ask("What is the weather in Graz?")
        assert await page.inner_text(".call .name code") == "weather"
        assert json.loads(await page.inner_text(".call pre")) == {"city": "Graz"}
        await page.fill(".call input", "rain")
        async with page.expect_request("**/v1/chat/completions") as asked:
            await page.press(".call input", "Enter")
        assert await visit.answer(1) == "It rains."
        messages = (await asked.value).post_data_json["messages"]
        assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
        assert messages[2]["content"] == "rain"
        assert messages[2]["tool_call_id"] == messages[1]["tool_calls"][0]["id"]


async def test_a_key_is_asked_for_used_and_forgotten(browser: Browser) -> None:
    keys = ("right-key", "other-key")
    async with (
        running_gateway(api_keys=keys) as stack,
        visiting(browser, stack.url, allowed=(REFUSED,)) as visit,
    ):
        page = visit.page
        await page.goto(stack.url + "/")
        await page.wait_for_selector("#key-dialog[open]")
        await page.fill("#key", "schlüssel 😀")
        await page.keyboard.press("Enter")
        await page.wait_for_selector("#key-fault:has-text('\"ü\" in it')")
        await page.fill("#key", "wrong-key")
        await page.keyboard.press("Enter")
        await page.wait_for_selector("#key-text:has-text('did not take this key')")
        assert await page.evaluate("JSON.stringify(sessionStorage)") == "{}"
        await page.fill("#key", "right-key")
        await page.click("#key-use")
        await page.wait_for_selector("#pulse:has-text('live')")
        assert await visit.ask("hello") == "a red circle"
        await page.wait_for_selector("#recent tbody tr")
        kept = await page.evaluate("[JSON.stringify(localStorage), JSON.stringify(sessionStorage)]")
        assert "right-key" not in kept[0]
        assert "right-key" in kept[1]
        # What an earlier page may have kept, and a key that is taken back.
        await page.evaluate("sessionStorage.setItem('mimo.key', 'schl\\u00fcssel')")
        await page.reload()
        await page.wait_for_selector("#key-dialog[open]")
        await page.fill("#key", "right-key")
        await page.click("#key-use")
        await page.wait_for_selector("#pulse:has-text('live')")
        await page.click("#open-settings")
        await page.click("#change-key")
        await page.fill("#key", "wrong-key")
        await page.click("#key-use")
        await page.wait_for_selector("#key-text:has-text('did not take this key')")
        assert await page.evaluate("JSON.stringify(sessionStorage)") == "{}"
        # Another client sees the pipeline, and not this one's request.
        async with stack.session.get("/v1/pipeline", headers={"Authorization": "Bearer other-key"}) as response:
            other = await response.json()
        assert other["requests"] == []
        assert other["sequence"] == 1


@pytest.mark.parametrize(
    ("finish", "shown"),
    [
        (
            Finish(
                request_id="",
                reason=FinishReason.FAILED,
                usage=NO_USAGE,
                status=500,
                code="broken_model",
                message="The model broke.",
            ),
            ["The model broke.", "broken_model 500", "its log has the request id"],
        ),
        (
            Finish(
                request_id="",
                reason=FinishReason.FAILED,
                usage=NO_USAGE,
                status=413,
                code="too_large",
                message="Too much.",
            ),
            ["Too much.", "too_large 413", "Attach something smaller"],
        ),
    ],
    ids=["server", "client"],
)
async def test_an_error_says_its_code_and_what_to_do(browser: Browser, finish: Finish, shown: list[str]) -> None:
    async with running_gateway() as stack, visiting(browser, stack.url, allowed=(REFUSED,)) as visit:
        await visit.open()
        stack.worker.finish = finish
        await visit.ask("hello")
        text = await visit.page.inner_text(".fault")
        for words in shown:
            assert words in text
        stack.worker.finish = None
        await visit.page.click(".facts >> text=Try again")
        await visit.page.wait_for_selector(".fault", state="detached")
        assert await visit.answer(0) == "a red circle"


async def test_a_stopped_answer_keeps_what_came_and_the_worker_hears(browser: Browser) -> None:
    async with running_gateway(says("one two three four five six")) as stack, visiting(browser, stack.url) as visit:
        stack.worker.stall_after = 4
        await visit.open()
        await visit.page.fill("#question", "hello")
        await visit.page.press("#question", "Enter")
        await visit.until("document.querySelector('.turn.assistant .body')?.textContent.length > 4")
        await visit.page.click("#stop")
        text = await visit.answer(0)
        assert text
        assert "one two three four five six".startswith(text)
        for _ in range(200):
            if stack.worker.aborted:
                break
            await asyncio.sleep(0.01)
        assert stack.worker.aborted
        assert await visit.page.locator("#send").is_visible()


async def test_the_page_says_that_the_server_is_gone_and_finds_it_again(browser: Browser) -> None:
    allowed = (REFUSED, "ERR_CONNECTION_REFUSED")
    phone = {"width": 320, "height": 640}
    async with running_gateway() as stack, visiting(browser, stack.url, allowed=allowed, viewport=phone) as visit:
        await visit.open()
        assert await visit.page.evaluate("document.documentElement.scrollWidth") <= phone["width"]
        assert not await visit.page.locator("#gone").is_visible()
        await visit.context.set_offline(True)
        await visit.page.wait_for_selector("#pulse:has-text('the server is gone')")
        # Beside the question too: the other pane is out of sight.
        await visit.page.wait_for_selector("#composer #gone:has-text('The server is gone')")
        await visit.ask("hello")
        assert "The server does not answer." in await visit.page.inner_text(".fault")
        await visit.context.set_offline(False)
        await visit.page.wait_for_selector("#pulse:has-text('live')")
        stack.worker.ready = False
        await visit.page.wait_for_selector(".stage.down")
        assert "not ready" in (await visit.page.locator(".stage.down .processes").text_content() or "")


async def test_nothing_is_asked_while_nobody_looks(browser: Browser) -> None:
    async with running_gateway() as stack, visiting(browser, stack.url) as visit:
        await visit.open()
        await visit.page.evaluate(
            """() => { Object.defineProperty(document, "hidden", {value: true, configurable: true});
                 document.dispatchEvent(new Event("visibilitychange")); }"""
        )
        await visit.page.wait_for_selector("#pulse:has-text('paused')")
        before = visit.asked.count("/v1/pipeline")
        await asyncio.sleep(1.6)
        assert visit.asked.count("/v1/pipeline") == before
        await visit.page.evaluate(
            """() => { delete document.hidden; document.dispatchEvent(new Event("visibilitychange")); }"""
        )
        await visit.page.wait_for_selector("#pulse:has-text('live')")


async def test_light_and_dark(browser: Browser) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    async with running_gateway() as stack:
        seen = {}
        for scheme in ("light", "dark"):
            async with visiting(browser, stack.url, color_scheme=scheme) as visit:
                await visit.open()
                seen[scheme] = await visit.page.evaluate(ground)
                # The switch goes from the system's theme to dark to light, and is remembered.
                for theme in ("dark", "light"):
                    await visit.page.click("#theme")
                    seen[f"{scheme} {theme}"] = await visit.page.evaluate(ground)
                    await visit.page.reload()
                    assert await visit.page.evaluate(ground) == seen[f"{scheme} {theme}"]
        assert seen["light"] != seen["dark"]
        assert seen["light"] == seen["light light"] == seen["dark light"]
        assert seen["dark"] == seen["light dark"] == seen["dark dark"]


async def test_a_sound_is_recorded_and_a_refusal_is_told(browser: Browser) -> None:
    async with running_gateway() as stack:
        async with visiting(browser, stack.url, allowed=(REFUSED,), permissions=["microphone"]) as visit:
            await visit.open()
            await visit.page.click("#microphone")
            await visit.page.wait_for_selector("#microphone[aria-pressed=true]")
            await asyncio.sleep(0.5)
            await visit.page.click("#microphone")
            await visit.page.wait_for_selector("#attachments audio")
            async with visit.page.expect_request("**/v1/chat/completions") as asked:
                await visit.page.press("#question", "Enter")
            [part] = (await asked.value).post_data_json["messages"][0]["content"]
            assert part["audio_url"]["url"].startswith("data:audio/webm;base64,")
            await visit.answer(0)
        async with visiting(browser, stack.url) as visit:
            await visit.open()
            await visit.page.evaluate(
                """() => { navigator.mediaDevices.getUserMedia =
                     async () => { throw new DOMException("no", "NotAllowedError"); }; }"""
            )
            await visit.page.click("#microphone")
            await visit.page.wait_for_selector("#notice:has-text('Allow it in the browser')")


async def test_files_that_are_no_media_are_refused_by_name_and_text_goes_into_the_question(browser: Browser) -> None:
    async with running_gateway() as stack, visiting(browser, stack.url) as visit:
        await visit.open()
        await visit.page.set_input_files("#files", {"name": "a.pdf", "mimeType": "application/pdf", "buffer": b"%PDF"})
        await visit.page.wait_for_selector("#notice:has-text('a.pdf')")
        await visit.page.set_input_files("#files", {"name": "b.png", "mimeType": "image/png", "buffer": b""})
        await visit.page.wait_for_selector("#notice:has-text('nothing in it: b.png')")
        assert await visit.page.locator("#attachments li").count() == 0
        text = {"name": "a.txt", "mimeType": "text/plain", "buffer": b"some words"}
        await visit.page.set_input_files("#files", text)
        await visit.until("document.getElementById('question').value === 'some words'")
        assert not await visit.page.inner_text("#notice")


async def test_a_model_of_text_alone_is_offered_no_media(browser: Browser) -> None:
    picture = {"name": "a.png", "mimeType": "image/png", "buffer": b"x"}
    async with running_gateway() as stack, visiting(browser, stack.url) as visit:
        stack.encoder.infos = dict  # type: ignore[method-assign]
        await visit.open()
        await visit.page.wait_for_selector(".welcome >> text=This model reads and writes text")
        assert not await visit.page.locator("#attach").is_visible()
        assert not await visit.page.locator("#microphone").is_visible()
        assert await visit.page.locator(".stage[data-stage='encode']").count() == 0
        await visit.page.set_input_files("#files", picture)
        await visit.page.wait_for_selector("#notice:has-text('This model takes no image')")
        assert await visit.ask("hello") == "a red circle"


async def test_events_are_read_wherever_they_are_cut(browser: Browser) -> None:
    """The stream's parser, on every way to cut a text in two, and byte by byte."""
    async with running_gateway() as stack, visiting(browser, stack.url) as visit:
        await visit.open()
        found = await visit.page.evaluate(
            """async () => {
              const { EventParser } = await import("/page/sse.js");
              const text = 'data: {"a": "h\\u00e4\\u{1F600}"}\\r\\n\\r\\n: note\\nevent: x\\ndata:one\\ndata: two\\n\\n'
                + 'id: 1\\n\\ndata: x\\r\\ndata: y\\r\\n\\r\\ndata: [DONE]\\r\\rdata: cut';
              const bytes = new TextEncoder().encode(text);
              const read = (cuts) => {
                const parser = new EventParser();
                const events = [];
                let from = 0;
                for (const cut of [...cuts, bytes.length]) {
                  events.push(...parser.push(bytes.slice(from, cut)));
                  from = cut;
                }
                return [...events, ...parser.close()];
              };
              const ways = [[...bytes.keys()], ...[...bytes.keys()].map((cut) => [cut])];
              return [...new Set(ways.map((cuts) => JSON.stringify(read(cuts))))].map((events) => JSON.parse(events));
            }"""
        )
        assert found == [['{"a": "hä😀"}', "one\ntwo", "x\ny", "[DONE]"]]


MARKDOWN = """| name | size |
| --- | ---: |
| **a** | 1 \\| 2 |
| <b> | 3 |

1. one
   - inner *a*
     - inmost
   - inner b

2. two
after

- x
+ y"""


async def test_tables_and_lists_within_lists_are_nodes(browser: Browser) -> None:
    async with running_gateway(says(MARKDOWN)) as stack, visiting(browser, stack.url) as visit:
        await visit.open()
        await visit.ask("hello")
        body = visit.answers.nth(0).locator(".body").first
        assert await body.locator("th").all_inner_texts() == ["name", "size"]
        assert await body.locator("td").all_inner_texts() == ["a", "1 | 2", "<b>", "3"]
        assert await body.locator("td strong").count() == 1
        assert await body.locator("td[data-align=right]").count() == 2
        assert await body.locator("ol > li").count() == 2
        assert await body.locator("ol > li > ul > li").count() == 2
        assert await body.locator("ol > li > ul > li > ul > li").all_inner_texts() == ["inmost"]
        assert await body.locator("ul:not(li ul) > li").all_inner_texts() == ["x", "y"]
        assert await body.locator("p").all_inner_texts() == ["after"]


async def test_a_file_the_server_does_not_take_is_refused_as_it_is_attached(browser: Browser) -> None:
    """By the server's own word, and from then on without asking it; both name the setting."""
    limit = 5 << 20
    large = {"name": "large.png", "mimeType": "image/png", "buffer": b"x" * (limit + 1)}
    said = f"the file is larger than this server takes: {limit} bytes (gateway.file_max_bytes)"
    error = {"message": said, "code": "file_too_large", "type": "invalid_request_error", "param": None}
    async with running_gateway() as stack, visiting(browser, stack.url, allowed=(REFUSED,)) as visit:
        await visit.page.route("**/v1/files", lambda route: route.fulfill(status=413, json={"error": error}))
        await visit.open()
        for words in ('"large.png": the file is larger', "this server takes 5.0 MiB at most"):
            await visit.page.set_input_files("#files", large)
            await visit.page.wait_for_selector(f"#notice:has-text('{words}')")
            assert "gateway.file_max_bytes" in await visit.page.inner_text("#notice")
            assert await visit.page.locator("#attachments li").count() == 0
        assert visit.asked.count("/v1/files") == 1


async def test_faults_name_files_and_settings_and_count_what_was_computed(browser: Browser) -> None:
    async with running_gateway() as stack, visiting(browser, stack.url) as visit:
        await visit.open()
        found = await visit.page.evaluate(
            """async () => {
              const { ApiError } = await import("/page/api.js");
              const { waterfall } = await import("/page/waterfall.js");
              const names = new Map([["messages[0].content[0]", "picture.png"]]);
              const fault = (values) => new ApiError({ code: "x", ...values }).naming(names);
              const place = "messages[0].content[0].image_url";
              const bad = fault({ status: 400, message: `${place} is damaged`, param: place });
              const receipt = { duration_s: 1, first_token_s: null, completion_tokens: 0, prompt_tokens: 58, steps: [],
                status: 422, media_tokens: {}, cached_media: 0, num_attempts: 1,
                cache_tokens: { l1: 0, l2: 0, l3: 0, healed: 0 } };
              const text = (values) => waterfall({ ...receipt, ...values }).map((node) => node.textContent).join(" ");
              return { message: bad.message, hint: bad.hint,
                body: fault({ status: 413, message: "the body is larger than this server takes: 9 bytes" }).hint,
                file: fault({ status: 413, message: "too large: 9 bytes (gateway.file_max_bytes)" }).hint,
                failed: text({}), answered: text({ status: 200 }) };
            }"""
        )
        assert found["message"] == '"picture.png" is damaged'
        assert found["hint"] == "Remove the file or take another."
        assert "gateway.max_body_bytes" in found["body"]
        assert "gateway.file_max_bytes" in found["file"]
        assert "computed" not in found["failed"]
        assert "58 prompt tokens" in found["answered"]
