"""The page for everyone: by keyboard, in small windows, in the dark, without motion."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.browser.chat_page import ChatPage
from tests.browser.scripted import Scripted
from tests.scripted_llm import Script
from tests.system.processes import SAMPLES
from tests.system.three import Three

pytestmark = [pytest.mark.browser, pytest.mark.timeout(240)]
Open = Callable[..., ChatPage]
LUMINANCE = """(node) => {
  const [r, g, b] = getComputedStyle(node).backgroundColor.match(/[0-9.]+/g).map(Number);
  return (0.2126 * r + 0.7152 * g + 0.0722 * b) / 255;
}"""
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
WIDER_THAN_ITS_ROOM = """() => {
  const main = document.getElementById("scroller");
  return main.scrollWidth - main.clientWidth;
}"""


def focused(page: ChatPage) -> str:
    """What has the focus: the name that is read out, or its text."""
    told: str = page.page.evaluate(
        "document.activeElement.getAttribute('aria-label') || document.activeElement.innerText"
        " || document.activeElement.id"
    )
    return told


def test_everything_can_be_done_by_keyboard_alone(chat: ChatPage) -> None:
    keys = chat.page.keyboard
    expect(chat.question).to_be_focused()
    keys.type("Count to 50.")
    keys.press("Shift+Enter")
    expect(chat.question).to_have_value("Count to 50.\n")
    expect(chat.turns).to_have_count(0)
    keys.press("Backspace")
    keys.press("Enter")
    chat.wait()
    expect(chat.words).to_have_text(re.compile("^1 2 .* 49 50$"))
    expect(chat.question).to_be_focused()

    keys.press("Enter")
    expect(chat.turns).to_have_count(1)
    keys.press("Shift+Tab")
    assert focused(chat) == "Copy as Python"
    assert chat.page.evaluate("document.activeElement.matches(':focus-visible')")
    assert chat.page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    for name in ("Copy as curl", "Settings", "New chat"):
        keys.press("Shift+Tab")
        assert focused(chat) == name
    keys.press("Tab")
    keys.press("Enter")
    expect(chat.page.get_by_role("dialog", name="Settings")).to_be_visible()
    keys.press("Escape")
    expect(chat.page.get_by_role("dialog")).to_have_count(0)
    assert focused(chat) == "Settings"


def test_a_word_that_an_input_method_is_composing_is_not_sent(
    open_at: Open, scripted: Scripted
) -> None:
    page = open_at(scripted.url)
    page.question.fill("にほん")
    session = page.page.context.new_cdp_session(page.page)
    session.send("Input.imeSetComposition", {"text": "ご", "selectionStart": 1, "selectionEnd": 1})
    key = {"type": "rawKeyDown", "key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 229}
    session.send("Input.dispatchKeyEvent", key)
    expect(page.turns).to_have_count(0)


@pytest.mark.parametrize("width", [320, 375, 768])
def test_small_windows_need_no_scrolling_sideways(open_at: Open, demo: Three, width: int) -> None:
    page = open_at(f"{demo.gateway.url}/", viewport={"width": width, "height": 740})
    pictures = [SAMPLES / f"{name}.png" for name in ("circles", "fish", "seven", "star")]
    page.attach(*pictures)
    assert page.page.evaluate(OVERFLOW) == 0
    page.question.fill("What is in the third picture? " + "x" * 200)
    page.button("Compare").click()
    page.wait()
    page.ask("Describe the first picture.")
    page.page.evaluate("document.getElementById('model').options[0].text = 'm'.repeat(90)")
    assert page.page.evaluate(OVERFLOW) == 0
    assert page.page.evaluate(WIDER_THAN_ITS_ROOM) == 0
    for button in (page.button("Send"), page.button("Settings"), page.button("Add pictures")):
        box = button.bounding_box()
        assert box is not None
        assert box["x"] >= 0 and box["x"] + box["width"] <= width
    page.button("Settings").click()
    expect(page.page.get_by_label("API key")).to_be_visible()
    assert page.page.evaluate(OVERFLOW) == 0


def test_the_reader_s_scheme_of_colours_is_kept(open_at: Open, scripted: Scripted) -> None:
    dark = open_at(scripted.url, color_scheme="dark")
    light = open_at(scripted.url, color_scheme="light")
    assert dark.page.locator("body").evaluate(LUMINANCE) < 0.15
    assert light.page.locator("body").evaluate(LUMINANCE) > 0.9


def test_nothing_moves_for_who_wants_no_motion(open_at: Open, scripted: Scripted) -> None:
    scripted.llm.script = Script(admission_seconds=30)
    page = open_at(scripted.url, reduced_motion="reduce")
    page.question.fill("hi")
    page.question.press("Enter")
    expect(page.last.locator(".waiting")).to_be_visible()
    assert page.page.evaluate("document.getAnimations().length") == 0
    page.page.keyboard.press("Escape")
    page.wait()


def test_answers_are_read_out_once_they_are_whole(open_at: Open, scripted: Scripted) -> None:
    page = open_at(scripted.url)
    page.ask("hi")
    log = page.page.get_by_role("log", name="Conversation")
    expect(log).to_contain_text("Hello, world")
    expect(page.last.locator(".answer")).not_to_have_attribute("aria-busy", "true")
    expect(page.page.get_by_role("status")).to_have_text("Answered in 7 tokens.")


def test_events_are_read_alike_however_they_are_cut(open_at: Open, scripted: Scripted) -> None:
    page = open_at(scripted.url)
    text = (
        ': ping\r\n\r\ndata: {"a": "é"}\r\n\r\ndata:x\rdata: y\r\rid: 1\ndata\n\ndata: [DONE]\n\n'
    )
    read: Any = page.page.evaluate(
        """async (text) => {
          const { eventParser } = await import("/page/sse.js");
          const found = [];
          for (let cut = 0; cut <= text.length; cut += 1) {
            const take = eventParser();
            found.push([...take(text.slice(0, cut)), ...take(text.slice(cut))]);
          }
          const take = eventParser();
          found.push([...text].flatMap((letter) => take(letter)));
          return found;
        }""",
        text,
    )
    assert len(read) == len(text) + 2
    assert {json.dumps(one) for one in read} == {
        json.dumps(['{"a": "é"}', "x\ny", "", "[DONE]"])
    }  # fmt: skip


def test_the_page_asks_nothing_of_any_other_place(open_at: Open, scripted: Scripted) -> None:
    page = open_at(scripted.url)
    asked: list[str] = []
    page.page.on("request", lambda request: asked.append(request.url))
    page.page.reload()
    page.ask("hi", SAMPLES / "star.png")
    outside = [url for url in asked if not url.startswith((scripted.url, f"blob:{scripted.url}"))]
    assert outside == []
    assert len(asked) > 10
