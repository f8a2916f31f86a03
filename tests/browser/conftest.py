"""A headless Chromium and the demo system for the tests of the page.

Debian's package `chromium`, or whatever CHIASM_CHROMIUM names; no browser is downloaded.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import pytest
from playwright.sync_api import Browser, sync_playwright

from tests.browser.chat_page import ChatPage, open_page
from tests.browser.chromium import chromium
from tests.browser.scripted import PLAIN_HOST, Scripted, scripted_gateway
from tests.system.processes import DEMO_MODEL
from tests.system.three import Three, three

Open = Callable[..., ChatPage]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if chromium() is None:
        absent = pytest.mark.skip(
            reason="no Chromium: apt install chromium, or set CHIASM_CHROMIUM"
        )
        for item in items:
            if item.get_closest_marker("browser"):
                item.add_marker(absent)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One a module: while it is driven, no test of another kind can have an event loop."""
    rules = f"--host-resolver-rules=MAP {PLAIN_HOST} 127.0.0.1"
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=chromium(), args=[rules])
        yield launched
        launched.close()


@pytest.fixture(scope="session")
def demo() -> Iterator[Three]:
    """The three services with the demo model."""
    with three(DEMO_MODEL) as system:
        yield system


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    with scripted_gateway() as running:
        yield running


@pytest.fixture
def open_at(browser: Browser) -> Iterator[Open]:
    """Opens the page at an address, with a browser context's options; checked in the end."""
    with ExitStack() as stack:

        def opened(url: str, **options: Any) -> ChatPage:
            page: AbstractContextManager[ChatPage] = open_page(browser, url, **options)
            return stack.enter_context(page)

        yield opened


@pytest.fixture
def chat(open_at: Open, demo: Three) -> ChatPage:
    """The page of the demo system, in a window of 1280 by 800."""
    return open_at(f"{demo.gateway.url}/", viewport={"width": 1280, "height": 800})
