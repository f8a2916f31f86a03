"""Asking on the page: pictures by every way in, the answer as it comes, and how it came about."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.browser.chat_page import ChatPage
from tests.browser.scripted import Scripted
from tests.scripted_llm import Script
from tests.system.processes import SAMPLES
from tests.system.three import Three, noise

pytestmark = [pytest.mark.browser, pytest.mark.timeout(240)]
Open = Callable[..., ChatPage]
STAR, FISH = SAMPLES / "star.png", SAMPLES / "fish.png"
COPY = ["clipboard-read", "clipboard-write"]
PUT_PICTURE = """async (base64) => {
  const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  const item = new ClipboardItem({ "image/png": new Blob([bytes], { type: "image/png" }) });
  await navigator.clipboard.write([item]);
}"""


def wide(width: int = 1280) -> dict[str, object]:
    return {"viewport": {"width": width, "height": 800}}


def test_a_dropped_picture_is_shown_asked_about_and_answered_with_its_path(
    chat: ChatPage, tmp_path: Path
) -> None:
    fresh = tmp_path / "noise.png"
    fresh.write_bytes(noise(7))
    chat.drop(fresh)
    item = chat.page.locator("#pictures li")
    expect(item).to_contain_text("noise.png")
    expect(item).to_contain_text("kB")
    expect(item.locator("img")).to_have_js_property("naturalWidth", 40)

    chat.question.fill("What is in the picture?")
    chat.question.press("Enter")
    chat.wait()
    expect(item).to_have_count(0)
    expect(chat.words).not_to_be_empty()
    expect(chat.last.locator(".paths li")).to_contain_text("Encoded now")
    expect(chat.last.locator(".paths li")).to_contain_text("16 tokens")
    timeline = chat.last.get_by_role("img", name=re.compile("^Timeline"))
    for stage in ("queue", "encode", "transfer", "prefill", "decode"):
        expect(chat.last.locator(".legend")).to_contain_text(stage)
        expect(timeline.locator(f".{stage}")).to_be_visible()
        assert f"{stage} " in str(timeline.get_attribute("aria-label"))
    expect(chat.last.locator(".tokens")).to_contain_text("16 picture")


def test_what_was_seen_before_is_told_as_known_and_a_second_turn_has_the_first(
    chat: ChatPage,
) -> None:
    chat.ask("What word is written in the picture?", FISH)
    expect(chat.words).to_have_text("fish")
    chat.ask("What colour is it in the picture?")
    expect(chat.words).to_have_text("purple")
    expect(chat.last.locator(".paths li")).to_contain_text("Known already")
    expect(chat.last.locator(".tokens")).to_contain_text(re.compile("[1-9][0-9]* cached"))

    chat.button("New chat").click()
    expect(chat.turns).to_have_count(0)
    expect(chat.page.get_by_role("heading", name="Show it something.")).to_be_visible()
    expect(chat.question).to_be_focused()


def test_bars_have_the_widths_of_their_stages(open_at: Open, scripted: Scripted) -> None:
    page = open_at(scripted.url, **wide())
    page.ask("hi")
    sizes = {}
    for stage in ("queue", "encode", "transfer", "prefill", "decode"):
        box = page.last.locator(f".stage.{stage}").bounding_box()
        assert box is not None
        sizes[stage] = box["width"]
    # The scripted stages take 1, 3, 2, 10 and 20 ms.
    assert sizes["decode"] == pytest.approx(2 * sizes["prefill"], rel=0.05)
    assert sizes["prefill"] == pytest.approx(5 * sizes["transfer"], rel=0.1)
    assert list(sizes) == sorted(sizes, key=lambda name: page.last.locator(
        f".stage.{name}").evaluate("(bar) => bar.getBoundingClientRect().left"))  # fmt: skip
    expect(page.last.locator(".legend")).to_contain_text("encode3.0 ms")
    expect(page.last.locator(".tokens")).to_contain_text("18 picture, 12 text, 5 cached")


def test_a_pasted_picture_is_taken_and_pasted_text_stays_text(open_at: Open, demo: Three) -> None:
    import base64

    page = open_at(f"{demo.gateway.url}/", rights=COPY, **wide())
    page.page.evaluate(PUT_PICTURE, base64.b64encode(STAR.read_bytes()).decode())
    page.question.press("Control+V")
    expect(page.page.locator("#pictures li")).to_contain_text("pasted-1.png")
    page.page.evaluate("navigator.clipboard.writeText('What shape is it?')")
    page.question.press("Control+V")
    expect(page.question).to_have_value("What shape is it?")
    page.question.press("Enter")
    page.wait()
    expect(page.words).to_have_text("star")


def test_a_picture_can_be_taken_back_and_what_is_no_picture_is_not_taken(
    chat: ChatPage, tmp_path: Path
) -> None:
    note = tmp_path / "note.txt"
    note.write_text("no picture")
    chat.drop(note)
    expect(chat.page.locator("#toast")).to_have_text("Only picture files can be added")
    chat.attach(STAR, FISH)
    chat.button("Remove star.png").click()
    expect(chat.page.locator("#pictures li")).to_have_count(1)
    expect(chat.page.locator("#pictures li")).to_contain_text("fish.png")
    chat.button("Remove fish.png").click()
    expect(chat.button("Send")).to_be_disabled()


def test_a_drawn_picture_is_there_for_who_has_none(chat: ChatPage) -> None:
    chat.button("Try it with a drawn picture").click()
    expect(chat.question).to_have_value("What shape is it?")
    chat.button("Send").click()
    chat.wait()
    expect(chat.words).to_have_text("triangle")


def test_text_shows_as_it_comes_and_escape_stops_it(open_at: Open, scripted: Scripted) -> None:
    scripted.llm.script = Script(texts=[f"{number} " for number in range(200)], pause_seconds=0.1)
    page = open_at(scripted.url, **wide())
    page.question.fill("Count.")
    page.question.press("Enter")
    expect(page.words).to_contain_text("0 1 2")
    expect(page.last.locator(".answer")).to_have_attribute("aria-busy", "true")
    expect(page.button("Send")).to_be_hidden()
    page.page.keyboard.press("Escape")
    page.wait()
    expect(page.last).to_contain_text("Stopped.")
    expect(page.words).not_to_contain_text("199")
    for _ in range(100):
        if scripted.llm.running == 0:
            break
        page.page.wait_for_timeout(50)
    assert scripted.llm.running == 0

    scripted.llm.script = Script()
    page.ask("And now?")
    expect(page.words).to_have_text("Hello, world")
    earlier = [message.parts[0].text for message in scripted.llm.last.message.messages]
    assert earlier[0] == "Count."
    assert earlier[1].startswith("0 1 2")


def test_the_stop_button_stops_and_gives_the_question_back_the_focus(
    open_at: Open, scripted: Scripted
) -> None:
    scripted.llm.script = Script(texts=["word "] * 200, pause_seconds=0.1)
    page = open_at(scripted.url, **wide())
    page.question.fill("Go.")
    page.button("Send").click()
    page.button("Stop").click()
    page.wait()
    expect(page.last).to_contain_text("Stopped.")
    expect(page.question).to_be_focused()


def test_settings_travel_with_the_question(open_at: Open, scripted: Scripted) -> None:
    page = open_at(scripted.url, **wide())
    page.button("Settings").click()
    page.page.get_by_label("System prompt").fill("Be brief.")
    page.page.get_by_label("Temperature").fill("0.7")
    page.page.get_by_label("Most tokens").fill("9")
    page.button("Done").click()
    page.ask("hi")
    asked = scripted.llm.last.message
    assert [message.parts[0].text for message in asked.messages] == ["Be brief.", "hi"]
    assert asked.sampling.temperature == pytest.approx(0.7)
    assert asked.sampling.max_token_count == 9


def test_raw_and_embedding_are_asked_alike_and_compared(chat: ChatPage) -> None:
    chat.attach(FISH)
    chat.question.fill("Describe the picture.")
    chat.button("Compare").click()
    chat.wait()
    expect(chat.last.locator(".verdict")).to_have_text("The same text, character for character")
    raw, embedded = chat.last.locator(".side").all()
    for side in (raw, embedded):
        expect(side.locator(".words")).to_have_text("the word fish in purple")
        expect(side.locator(".tokens")).to_contain_text("0 cached")
        expect(side.locator(".stages")).to_be_visible()
    expect(embedded.locator(".paths")).to_contain_text("By reference")
    expect(raw.locator(".paths")).not_to_contain_text("By reference")
    expect(raw.locator(".sent")).to_contain_text("kB")
    expect(embedded.locator(".sent")).to_contain_text("bytes")
    expect(embedded.locator(".sent")).to_contain_text("16 rows made before")

    chat.ask("What word is it in the picture?")
    expect(chat.words).to_have_text("fish")
    chat.action("Compare raw with embedding").click()
    chat.wait()
    expect(chat.last.locator(".verdict")).to_have_text("The same text, character for character")
    expect(chat.words).to_have_text("fish")
