"""A browser at the page: opening it, dropping and pasting files, and a watch that nothing there went wrong."""

import asyncio
import base64
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from playwright.async_api import Browser, BrowserContext, Locator, Page, Playwright, async_playwright

CHROMIUM = Path("/usr/bin/chromium")
# Only this browser, quiet: it neither looks for updates nor talks to its maker.
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    # A microphone that beeps, and that is always allowed unless a test says otherwise.
    "--use-fake-device-for-media-stream",
)
TYPES = {".png": "image/png", ".mp4": "video/mp4", ".wav": "audio/wav", ".txt": "text/plain"}

_POLL_S = 0.03

_GIVE_FILES = """(node, [kind, files]) => {
  const data = new DataTransfer();
  for (const {name, type, content} of files) {
    data.items.add(new File([Uint8Array.from(atob(content), (c) => c.charCodeAt(0))], name, {type}));
  }
  if (kind === "paste") {
    node.dispatchEvent(new ClipboardEvent("paste", {clipboardData: data, bubbles: true, cancelable: true}));
  } else {
    for (const step of ["dragenter", "dragover", "drop"]) {
      node.dispatchEvent(new DragEvent(step, {dataTransfer: data, bubbles: true, cancelable: true}));
    }
  }
}"""
_WATCH_POLICY = """addEventListener("securitypolicyviolation",
  (event) => console.error(`policy: ${event.violatedDirective} ${event.blockedURI}`))"""


@asynccontextmanager
async def running_browser() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        browser = await _launched(playwright)
        try:
            yield browser
        finally:
            await browser.close()


async def _launched(playwright: Playwright) -> Browser:
    return await playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS, chromium_sandbox=False)


@dataclass
class Visit:
    """One page in a context of its own. `faults` fills with errors of the console, of scripts and of the content
    policy, and with requests to anywhere else."""

    page: Page
    context: BrowserContext
    url: str
    faults: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    """Path of every request."""

    @property
    def answers(self) -> Locator:
        return self.page.locator(".turn.assistant")

    async def open(self) -> None:
        await self.page.goto(self.url + "/")
        await self.page.wait_for_selector("#pulse:has-text('live')")

    async def ask(self, text: str) -> str:
        """Type, press Enter, and wait for the whole answer."""
        number = await self.answers.count()
        await self.page.fill("#question", text)
        await self.page.press("#question", "Enter")
        return await self.answer(number)

    async def answer(self, number: int) -> str:
        """Text of the answer with that number, once it is whole."""
        await self.page.wait_for_selector(f".turn.assistant:not(.busy) >> nth={number}")
        return await self.answers.nth(number).locator(".body").inner_text()

    async def give(self, kind: str, *paths: Path, onto: str = "#log") -> None:
        """`drop` or `paste` files, as the browser tells a page of it."""
        files = [
            {"name": path.name, "type": TYPES[path.suffix], "content": base64.b64encode(path.read_bytes()).decode()}
            for path in paths
        ]
        await self.page.locator(onto).evaluate(_GIVE_FILES, [kind, files])

    async def attached(self, count: int) -> None:
        await self.until(f"document.querySelectorAll('#attachments li').length === {count}")

    async def until(self, expression: str, timeout_s: float = 30.0) -> None:
        """Wait for a script's value to be true. Playwright's own way needs `eval`, which the page's policy forbids."""
        for _ in range(round(timeout_s / _POLL_S)):
            if await self.page.evaluate(expression):
                return
            await asyncio.sleep(_POLL_S)
        raise AssertionError(f"not within {timeout_s} s: {expression}")


@asynccontextmanager
async def visiting(browser: Browser, url: str, *, allowed: Sequence[str] = (), **context: Any) -> AsyncIterator[Visit]:
    """A visit that fails at its end for every fault that none of the patterns in `allowed` is found in."""
    opened = await browser.new_context(**context)
    opened.set_default_timeout(30_000)
    try:
        page = await opened.new_page()
        visit = Visit(page, opened, url)
        await opened.add_init_script(_WATCH_POLICY)
        page.on("pageerror", lambda error: visit.faults.append(f"script: {error}"))
        page.on("console", lambda said: visit.faults.append(said.text) if said.type in ("error", "warning") else None)
        page.on("request", lambda request: _watch(visit, request.url))
        yield visit
    finally:
        await opened.close()
    left = [fault for fault in visit.faults if not any(re.search(pattern, fault) for pattern in allowed)]
    assert not left, left


def _watch(visit: Visit, url: str) -> None:
    if url.startswith(("blob:", "data:")):
        return
    if not url.startswith(visit.url + "/"):
        visit.faults.append(f"request to elsewhere: {url}")
    visit.asked.append(urlsplit(url).path)
