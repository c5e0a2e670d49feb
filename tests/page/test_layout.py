"""The page at every width: nothing is cut or leaves a hole; and the list of requests by keys."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from playwright.async_api import Browser, Route

from epd.types import Finish, FinishReason, Role, Usage
from tests.fakes.gateway import running_gateway
from tests.page.visit import Visit, visiting

WIDTHS = (320, 390, 480, 640, 901, 1150, 1261, 1280, 1366, 1440, 1920)
WIDEST = {"accepted_tokens": 5000, "drafted_tokens": 5000, "requests": 12345, "retractions": 1234}


async def full(route: Route) -> None:
    """The pipeline with the longest values that its cards show."""
    view = await (await route.fetch()).json()
    view |= {"model": "mimo-nano", "uptime_s": 24 * 3600 - 60}
    for stage in view["stages"]:
        for process in stage["processes"]:
            process["counters"] |= WIDEST
            if process["tokens"]:
                process["tokens"] |= {"l1": 1000, "computed": 0}
    await route.fulfill(json=view)


@asynccontextmanager
async def split_pipeline(browser: Browser) -> AsyncIterator[Visit]:
    async with (
        running_gateway(roles=(Role.PREFILL, Role.DECODE)) as stack,
        visiting(browser, stack.url) as visit,
    ):
        yield visit


async def test_at_every_width_labels_are_whole_and_examples_fill_their_rows(browser: Browser) -> None:
    async with split_pipeline(browser) as visit:
        await visit.page.route("**/v1/pipeline*", full)
        await visit.open()
        await visit.page.wait_for_selector(".sample >> nth=3")
        for width in WIDTHS:
            await visit.page.set_viewport_size({"width": width, "height": 800})
            found = await visit.page.evaluate(
                """() => ({
                  cut: [...document.querySelectorAll(".stage dl div")]
                    .filter((row) => row.offsetHeight > 20 || [row, ...row.children].some(
                      (node) => node.scrollWidth > node.clientWidth))
                    .map((row) => row.textContent),
                  columns: getComputedStyle(document.querySelector(".samples")).gridTemplateColumns.split(" ").length,
                  width: document.documentElement.scrollWidth })"""
            )
            columns = found.pop("columns")
            assert 4 % columns == 0, (width, columns)
            assert found == {"cut": [], "width": width}


async def test_a_long_word_of_an_error_stays_within_a_narrow_page(browser: Browser) -> None:
    usage = Usage(prompt_tokens=1, completion_tokens=0)
    finish = Finish(request_id="", reason=FinishReason.FAILED, usage=usage, status=400, code="bad", message="w" * 90)
    phone = {"width": 320, "height": 640}
    async with (
        running_gateway() as stack,
        visiting(browser, stack.url, viewport=phone, allowed=("Failed to load resource",)) as visit,
    ):
        await visit.open()
        stack.worker.finish = finish
        await visit.ask("hello")
        assert await visit.page.locator(".fault").count() == 1
        assert await visit.page.evaluate("document.documentElement.scrollWidth") <= phone["width"]


async def test_the_list_of_requests_is_one_stop_of_tab(browser: Browser) -> None:
    async with split_pipeline(browser) as visit:
        await visit.open()
        for number in range(4):
            await visit.ask(f"question {number}")
            await visit.until(f"document.querySelectorAll('#recent tbody tr').length === {number + 1}")
        page = visit.page
        focused = "[...document.querySelectorAll('#recent button')].indexOf(document.activeElement)"
        stops = "[...document.querySelectorAll('#recent button')].map((node) => node.tabIndex)"
        assert await page.evaluate(stops) == [0, -1, -1, -1]
        await page.focus("#recent button >> nth=0")
        for key, row in [("ArrowDown", 1), ("End", 3), ("ArrowDown", 3), ("ArrowUp", 2), ("Home", 0), ("ArrowUp", 0)]:
            await page.keyboard.press(key)
            assert await page.evaluate(focused) == row, key
        await page.keyboard.press("End")
        await page.keyboard.press("Enter")
        # It is drawn anew: the focus and the one stop stay at the row.
        assert await page.evaluate(focused) == 3
        assert await page.evaluate(stops) == [-1, -1, -1, 0]
        assert await page.get_attribute("#recent button >> nth=3", "aria-pressed") == "true"
        await page.keyboard.press("Tab")
        assert await page.evaluate(focused) == -1
        await page.keyboard.press("Shift+Tab")
        assert await page.evaluate(focused) == 3
