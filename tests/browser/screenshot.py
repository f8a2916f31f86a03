"""Draws docs/page.png: the page with real answers of the demo system.

python -m tests.browser.screenshot [--out FILE] [--dark] [--width 1280] [--height 800] [--compare]
"""

import argparse
from pathlib import Path

from playwright.sync_api import sync_playwright

from tests.browser.chat_page import ChatPage, open_page
from tests.browser.chromium import chromium
from tests.system.processes import DEMO_MODEL, ROOT, SAMPLES
from tests.system.three import three

_NAMED = ("--model-id", "chiasm-demo")


def main() -> None:
    """Starts the demo system, asks, draws, stops."""
    options = _options()
    with (
        three(
            DEMO_MODEL, encoder_flags=(*_NAMED, "--encoder-name", "eye-1"), llm_flags=_NAMED
        ) as system,
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=chromium()) as browser,
        open_page(
            browser,
            f"{system.gateway.url}/",
            viewport={"width": options.width, "height": options.height},
            color_scheme="dark" if options.dark else "light",
            reduced_motion="reduce",
        ) as chat,
    ):
        (_compare if options.compare else _converse)(chat)
        chat.page.mouse.move(640, 690)
        chat.page.evaluate("document.activeElement.blur()")
        chat.page.screenshot(path=options.out, animations="disabled")
        print(f"{options.out}: {options.out.stat().st_size / 1000:.0f} kB")


def _converse(chat: ChatPage) -> None:
    # The first question of a process pays for what is loaded and allocated once.
    chat.ask("Count to 20.")
    chat.button("New chat").click()
    chat.ask("Describe the picture.", SAMPLES / "fish.png")
    chat.ask("What shape is it in the second picture?", SAMPLES / "star.png")


def _compare(chat: ChatPage) -> None:
    chat.ask("Count to 20.")
    chat.button("New chat").click()
    chat.attach(SAMPLES / "circles.png")
    chat.question.fill("Describe the picture.")
    chat.button("Compare").click()
    chat.wait()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "page.png")
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--height", type=int, default=800)
    return parser.parse_args()


if __name__ == "__main__":
    main()
