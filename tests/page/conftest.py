"""One browser for all tests of the page; they live on one event loop."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.e2e.service import Service

pytest.importorskip("playwright.async_api", reason="playwright is not installed")

from playwright.async_api import Browser

from tests.page.visit import CHROMIUM, running_browser


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test here runs on the loop that the browser's connection belongs to."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncIterator[Browser]:
    if not CHROMIUM.exists():
        pytest.skip(f"there is no {CHROMIUM}; scripts/install-chromium installs it")
    async with running_browser() as running:
        yield running


@pytest.fixture(scope="session")
def service(epd: Service) -> Service:
    return epd
