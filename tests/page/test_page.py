"""The page on a real deployment: ask about media, watch the stream, stop it, see where the time went."""

import asyncio
import re
from pathlib import Path

import pytest
from playwright.async_api import Browser

from tests.e2e.service import KNOWN_ANSWERS, SAMPLES, Service
from tests.page.visit import Visit, visiting

LONG = "Count from 1 to 90."


@pytest.mark.parametrize("name", ["picture.png", "clip.mp4", "tones.wav"])
async def test_a_dropped_medium_is_shown_sent_and_answered_right(browser: Browser, service: Service, name: str) -> None:
    sample = KNOWN_ANSWERS[name]
    async with visiting(browser, service.url) as visit:
        await visit.open()
        await visit.give("drop", SAMPLES / name)
        await visit.attached(1)
        tag = {"image": "img", "video": "video", "audio": "audio"}[sample.modality]
        await visit.page.wait_for_selector(f"#attachments {tag}")
        # What cannot be seen has a name.
        role = "img" if tag == "img" else "group"
        assert await visit.page.get_by_role(role, name=f"{sample.modality}: {name}", exact=True).count() == 1
        assert await visit.ask(sample.question) == sample.answer
        assert await visit.page.locator("#attachments li").count() == 0
        assert await visit.page.locator(f".turn.user {tag}").count() == 1
        assert await visit.page.locator(".turn.user .text").inner_text() == sample.question
        facts = await visit.answers.nth(0).locator(".facts").inner_text()
        assert re.search(r"first word after .+ tokens in.* \d+ out", facts.replace("\n", " ")), facts


async def test_a_pasted_picture_beside_one_taken_back(browser: Browser, service: Service) -> None:
    sample = KNOWN_ANSWERS["number.png"]
    async with visiting(browser, service.url) as visit:
        await visit.open()
        await visit.give("paste", SAMPLES / "picture.png", onto="#question")
        await visit.give("paste", SAMPLES / sample.file, onto="#question")
        await visit.attached(2)
        await visit.page.click("text=× >> nth=0")
        await visit.attached(1)
        assert await visit.ask(sample.question) == sample.answer


async def test_samples_of_the_page_are_answered_right(browser: Browser, service: Service) -> None:
    async with visiting(browser, service.url) as visit:
        await visit.open()
        for number, name in enumerate(["picture.png", "clip.mp4", "tones.wav", "number.png"]):
            await visit.page.click(f".sample >> nth={number}")
            assert await visit.answer(0) == KNOWN_ANSWERS[name].answer
            await visit.page.click("#new-chat")
            assert await visit.answers.count() == 0


async def test_the_answer_grows_and_is_stopped_in_the_middle(browser: Browser, service: Service) -> None:
    """What came stays, and the engine stops too: nothing is running soon after."""
    async with visiting(browser, service.url) as visit:
        await visit.open()
        page = visit.page
        await page.evaluate(
            """() => { window.lengths = []; new MutationObserver(() => {
                 const body = document.querySelector(".turn.assistant .body");
                 if (body) window.lengths.push(body.textContent.length);
               }).observe(document.getElementById("log"), {subtree: true, childList: true, characterData: true}); }"""
        )
        await page.fill("#question", LONG)
        await page.press("#question", "Enter")
        await visit.until("document.querySelector('.turn.assistant .body')?.textContent.length > 20")
        await page.keyboard.press("Escape")
        text = await visit.answer(0)
        assert text.startswith("1")
        assert "90" not in text
        assert "stopped" in await visit.answers.nth(0).locator(".facts").inner_text()
        lengths = await page.evaluate("[...new Set(window.lengths)]")
        assert len(lengths) >= 3, "it did not grow in steps"
        assert lengths == sorted(lengths)
        await visit.until(
            """async () => { const view = await (await fetch("/v1/pipeline")).json();
                 return view.stages.every((stage) => stage.processes.every((process) => process.running === 0)); }"""
        )
        assert await visit.ask("Count from 1 to 3.") != ""
        assert await visit.answers.count() == 2


async def test_edit_and_try_again(browser: Browser, service: Service) -> None:
    async with visiting(browser, service.url) as visit:
        await visit.open()
        first = await visit.ask("Count from 1 to 4.")
        await visit.page.click(".facts >> text=Try again")
        assert await visit.answer(0) == first
        assert await visit.answers.count() == 1
        await visit.page.click(".facts >> text=Edit")
        assert await visit.page.input_value("#question") == "Count from 1 to 4."
        assert await visit.answers.count() == 0
        assert await visit.ask("Count from 5 to 8.") != first


async def test_a_damaged_file_is_refused_once_and_not_with_every_later_question(
    browser: Browser, service: Service, tmp_path: Path
) -> None:
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"sixteen letters.")
    async with visiting(browser, service.url, allowed=("Failed to load resource",)) as visit:
        await visit.open()
        await visit.give("drop", bad)
        await visit.attached(1)
        await visit.ask("what?")
        assert " 422" in await visit.page.inner_text(".fault code >> nth=0")
        assert await visit.ask("Count from 1 to 3.")
        assert await visit.page.locator(".fault").count() == 1


async def test_the_waterfall_shows_where_the_time_went(browser: Browser, service: Service) -> None:
    async with visiting(browser, service.url) as visit:
        await visit.open()
        page = visit.page
        await visit.give("drop", SAMPLES / "word.png")
        await visit.attached(1)
        await visit.ask(KNOWN_ANSWERS["word.png"].question)
        await page.wait_for_selector(".steps .row[data-stage='decode']")
        stages = await page.eval_on_selector_all(".steps .row", "rows => rows.map((row) => row.dataset.stage)")
        assert {"gateway", "encode", "prefill", "transfer", "decode"} <= set(stages)
        times = await page.locator(".steps .time").all_inner_texts()
        assert all(re.fullmatch(r"[\d.]+ (µs|ms|s)", time) for time in times)
        # Bars lie within their track, in the order of the pipeline.
        places = await page.eval_on_selector_all(
            ".steps .track",
            """tracks => tracks.map((track) => { const bar = track.querySelector(".span").getBoundingClientRect();
                 const whole = track.getBoundingClientRect();
                 return [(bar.left - whole.left) / whole.width, (bar.right - whole.left) / whole.width]; })""",
        )
        assert all(-0.01 <= start <= stop <= 1.03 for start, stop in places), places
        assert [start for start, _ in places] == sorted(start for start, _ in places)
        tokens = await page.locator("#waterfall .legend").inner_text()
        assert re.search(r"[1-9]\d* computed", tokens.replace("\n", " "))
        assert await page.locator("#recent tbody tr").count() >= 1
        # An earlier request is chosen by its row, and the latest again by the button.
        await visit.page.click("#new-chat")
        await visit.ask("Count from 1 to 2.")
        await visit.until("document.querySelectorAll('#recent tbody tr').length >= 2")
        assert await page.locator(".steps .row[data-stage='encode']").count() == 0
        await page.click("#recent tbody tr >> nth=1 >> button")
        await page.wait_for_selector(".steps .row[data-stage='encode']")
        await page.click("#follow")
        await page.wait_for_selector(".steps .row[data-stage='encode']", state="detached")


async def test_stages_queues_and_pools_are_drawn(browser: Browser, service: Service) -> None:
    async with visiting(browser, service.url) as visit:
        await visit.open()
        page = visit.page
        titles = await page.locator(".stage h3").all_inner_texts()
        assert titles == ["Gateway", "Encode", "Prefill", "Decode"]
        processes = await page.locator(".stage .processes li").all_inner_texts()
        assert [text.split(",")[0].split()[0] for text in processes] == [
            "gateway",
            "encoder-0",
            "prefill-0",
            "decode-0",
        ]
        assert await page.locator(".stage .processes li.down").count() == 0
        assert "waiting" in await page.locator(".stage[data-stage='prefill']").inner_text()
        pools = await page.locator("#memory .kind").all_inner_texts()
        assert pools == ["embeddings", "full attention", "window", "full attention", "window"]
        await visit.ask("Count from 1 to 60.")
        await visit.until(
            """[...document.querySelectorAll("#memory .pool .cached")]
                 .some((bar) => bar.getBoundingClientRect().width > 0)"""
        )


async def test_with_the_keyboard_alone(browser: Browser, service: Service) -> None:
    async with visiting(browser, service.url, reduced_motion="reduce") as visit:
        await visit.open()
        page = visit.page
        assert await page.evaluate("document.activeElement.id") == "question"
        await page.keyboard.type("Count from 1 to 3.")
        await page.keyboard.press("Shift+Enter")
        assert await page.input_value("#question") == "Count from 1 to 3.\n"
        await page.keyboard.press("Backspace")
        await page.keyboard.press("Enter")
        first = await visit.answer(0)
        assert first
        # From the question on, every control comes once in the order it is seen, with a visible mark and a name.
        order = []
        for _ in range(4):
            await page.keyboard.press("Tab")
            order.append(await focused(visit))
        names = [name for name, _ in order]
        assert names[:3] == ["Attach", "Record", "Send"]
        assert re.fullmatch(r"\d\d:\d\d:\d\d", names[3]), "the last requests are the last stop"
        assert all(mark for _, mark in order), order
        await page.focus("#open-settings")
        await page.keyboard.press("Enter")
        assert await page.evaluate("document.getElementById('settings').open")
        await page.keyboard.press("Escape")
        assert not await page.evaluate("document.getElementById('settings').open")
        assert await page.evaluate("document.activeElement.id") == "open-settings"
        await page.focus("#recent tbody button >> nth=0")
        await page.keyboard.press("Enter")
        assert await page.get_attribute("#recent tbody button >> nth=0", "aria-pressed") == "true"
        said = await page.evaluate("document.getElementById('said').textContent")
        assert said.strip(), "nothing was read to a screen reader"


async def focused(visit: Visit) -> tuple[str, bool]:
    """Name of what has the focus, and whether one sees that."""
    name, outline = await visit.page.evaluate(
        """() => { const node = document.activeElement; const style = getComputedStyle(node);
             return [node.innerText || node.getAttribute("aria-label") || node.id,
                     style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0]; }"""
    )
    return name, outline


async def test_a_phone_shows_the_panes_one_below_the_other(browser: Browser, service: Service) -> None:
    phone = {"width": 390, "height": 780}
    async with visiting(browser, service.url, viewport=phone, has_touch=True, is_mobile=True) as visit:
        await visit.open()
        assert await visit.ask("Count from 1 to 3.")
        boxes = [await visit.page.locator(name).bounding_box() for name in ("#chat", "#pipeline")]
        chat, pipeline = boxes
        assert chat is not None
        assert pipeline is not None
        assert pipeline["y"] >= chat["y"] + chat["height"] - 1
        assert await visit.page.evaluate("document.documentElement.scrollWidth") <= phone["width"]


async def test_a_large_medium_is_uploaded_once_and_taken_back(
    browser: Browser, service: Service, tmp_path: Path
) -> None:
    """Questions about it carry its id; with the chat it goes from the server."""
    sample = KNOWN_ANSWERS["picture.png"]
    large = tmp_path / "large.png"
    # What follows a picture's end is none of it.
    large.write_bytes((SAMPLES / sample.file).read_bytes() + bytes(5 << 20))
    async with visiting(browser, service.url) as visit:
        await visit.open()
        await visit.page.set_input_files("#files", large)
        await visit.attached(1)
        async with visit.page.expect_request("**/v1/chat/completions") as asked:
            assert await visit.ask(sample.question) == sample.answer
        assert await visit.ask("Count from 1 to 3.")
        assert visit.asked.count("/v1/files") == 1
        image, _ = (await asked.value).post_data_json["messages"][0]["content"]
        file_id = image["image_url"]["file_id"]
        assert service.get(f"/v1/files/{file_id}").status == 200
        async with visit.page.expect_response(f"**/v1/files/{file_id}") as deleted:
            await visit.page.click("#new-chat")
        assert (await deleted.value).status == 200
        assert service.get(f"/v1/files/{file_id}").status == 404


async def test_what_the_browser_records_can_be_heard(browser: Browser, service: Service) -> None:
    """WebM from a microphone has no duration in its header. The browser's false microphone beeps."""
    async with visiting(browser, service.url, permissions=["microphone"]) as visit:
        await visit.open()
        await visit.page.click("#microphone")
        await visit.page.wait_for_selector("#microphone[aria-pressed=true]")
        await asyncio.sleep(1.2)
        await visit.page.click("#microphone")
        await visit.attached(1)
        assert re.search(r"sound|hear|beep", await visit.ask("How many beeps are there?"))
        assert await visit.page.locator(".fault").count() == 0
