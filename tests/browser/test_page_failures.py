"""What fails is told with what to do about it, and nothing that is told can run."""

import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import expect

from chiasm.api_keys import digest_of
from chiasm.errors import ChiasmError, Reason
from tests.browser.chat_page import ChatPage
from tests.browser.scripted import Scripted, scripted_gateway, scripted_llm_at
from tests.scripted_llm import MODEL, Script
from tests.system.processes import SAMPLES, start_gateway

pytestmark = [pytest.mark.browser, pytest.mark.timeout(240)]
Open = Callable[..., ChatPage]
ATTACK = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'
OTHER_MODEL = "document.getElementById('model').append(new Option('gone', 'gone'))"


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def test_an_unknown_model_is_told_and_another_can_be_chosen(
    open_at: Open, scripted: Scripted
) -> None:
    page = open_at(scripted.url)
    expect(page.page.get_by_label("Model")).to_have_value(MODEL)
    page.page.evaluate(OTHER_MODEL)
    page.page.get_by_label("Model").select_option("gone")
    page.ask("hi")
    failure = page.last.get_by_role("alert")
    expect(failure).to_contain_text("This model is not served here")
    expect(failure).to_contain_text("model_not_found")
    expect(failure).to_contain_text("req-")
    # The list is read anew, and what is not served is no choice any more.
    expect(page.page.get_by_label("Model")).to_have_value(MODEL)
    page.action("Try again").click()
    expect(page.words).to_have_text("Hello, world")
    expect(failure).to_have_count(0)


def test_a_service_that_is_down_is_waited_for_and_found_again(open_at: Open) -> None:
    port = free_port()
    with start_gateway(port) as gateway:
        page = open_at(f"{gateway.url}/")
        notice = page.page.locator("#notice")
        expect(notice).to_contain_text("The model is not ready")
        again = notice.locator(".retry")
        expect(again).to_have_text("Try again")
        page.question.fill("hi")
        page.question.press("Enter")
        expect(notice).to_contain_text("not_ready")
        expect(page.question).to_have_value("hi")
        with scripted_llm_at(port):
            expect(again).to_be_enabled()
            for _ in range(40):
                if not again.count():
                    break
                if again.is_enabled():
                    again.click()
                page.page.wait_for_timeout(500)
            expect(notice).to_be_empty()
            page.question.press("Enter")
            expect(page.words).to_have_text("Hello, world")


def test_the_wait_that_the_server_asks_is_counted_down(open_at: Open, scripted: Scripted) -> None:
    refusal = ChiasmError(Reason.QUEUE_FULL, "Too many wait.", retry_after=3)
    scripted.llm.script = Script(refusal=refusal)
    page = open_at(scripted.url)
    page.ask("hi")
    again = page.last.locator(".retry")
    expect(again).to_be_disabled()
    expect(again).to_have_text("Try again in 2 s")
    scripted.llm.script = Script()
    expect(again).to_have_text("Try again")
    again.click()
    expect(page.words).to_have_text("Hello, world")


def test_a_fault_names_its_field(open_at: Open, scripted: Scripted, tmp_path: Path) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"")
    page = open_at(scripted.url)
    page.ask("What is it?", broken)
    failure = page.last.get_by_role("alert")
    expect(failure).to_contain_text("messages[0].content[0].image_url")
    expect(failure).to_contain_text("400")


def test_an_answer_that_breaks_off_keeps_its_text_and_says_why(
    open_at: Open, scripted: Scripted
) -> None:
    failure = ChiasmError(Reason.NO_ENCODER, "No encoder is left.")
    scripted.llm.script = Script(texts=["Half of"], failure=failure)
    page = open_at(scripted.url)
    page.ask("hi")
    expect(page.words).to_have_text("Half of")
    expect(page.last.get_by_role("alert")).to_contain_text("No encoder can be reached")


def test_a_gateway_that_is_gone_is_told(open_at: Open) -> None:
    with scripted_gateway() as running:
        page = open_at(running.url)
        expect(page.page.get_by_label("Model")).to_have_value(MODEL)
    page.ask("hi")
    expect(page.last.get_by_role("alert")).to_contain_text("The gateway does not answer")


def test_a_key_is_asked_for_kept_in_the_tab_and_gone_with_it(open_at: Open, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(
        f'[[key]]\nname = "one"\ntenant = "one"\nsha256 = "{digest_of("right").hex()}"\n'
    )
    with scripted_gateway(keys_file=file, open_page=True) as running:
        page = open_at(running.url)
        notice = page.page.locator("#notice")
        expect(notice).to_contain_text("An API key is needed")
        for key in ("wrong", "right"):
            notice.get_by_label("API key").fill(key)
            notice.get_by_role("button", name="Use key").click()
        expect(notice).to_be_empty()
        page.ask("hi")
        expect(page.words).to_have_text("Hello, world")
        page.page.reload()
        expect(page.page.get_by_label("Model")).to_have_value(MODEL)
        assert "right" not in str(page.page.evaluate("JSON.stringify(localStorage)"))
        other = open_at(running.url)
        expect(other.page.locator("#notice")).to_contain_text("An API key is needed")


def test_nothing_that_is_shown_can_run(open_at: Open, scripted: Scripted, tmp_path: Path) -> None:
    picture = tmp_path / "<img src=x onerror='window.hacked=1'>.png"
    picture.write_bytes((SAMPLES / "star.png").read_bytes())
    scripted.llm.script = Script(texts=[ATTACK])
    scripted.llm.card.family_title = ATTACK
    page = open_at(scripted.url)
    page.attach(picture)
    expect(page.page.locator("#pictures li")).to_contain_text("<img src=x onerror=")
    page.question.fill(ATTACK)
    page.question.press("Enter")
    page.wait()
    expect(page.words).to_have_text(ATTACK)
    expect(page.last.locator(".asked p")).to_have_text(ATTACK)
    expect(page.last.locator(".asked .name")).to_have_text(picture.name)
    expect(page.page.locator("#facts")).to_contain_text(ATTACK)

    scripted.llm.script = Script(refusal=ChiasmError(Reason.REQUEST_INVALID, ATTACK, ATTACK))
    page.ask("again")
    expect(page.last.get_by_role("alert")).to_contain_text(ATTACK)
    assert page.page.evaluate("window.hacked") is None
    assert page.page.locator("[onerror]").count() == 0


@pytest.mark.parametrize(
    "fault",
    [
        "document.body.innerHTML = '<b>x</b>'",
        "document.body.setAttribute('onclick', 'window.hacked = 1')",
        "document.createElement('script').textContent = 'window.hacked = 1'",
    ],
)
def test_the_policy_refuses_text_as_code_even_where_the_page_would_be_at_fault(
    open_at: Open, scripted: Scripted, fault: str
) -> None:
    page = open_at(scripted.url)
    name = page.page.evaluate(f"() => {{ try {{ {fault}; }} catch (e) {{ return e.name; }} }}")
    assert name == "TypeError"
    assert page.page.evaluate("window.hacked") is None
    page.expect_refusals("trusted-types")


def test_the_policy_lets_nothing_be_loaded_from_elsewhere(
    open_at: Open, scripted: Scripted
) -> None:
    page = open_at(scripted.url)
    page.page.evaluate("new Image().src = 'https://elsewhere.invalid/x.png'")
    page.page.evaluate("fetch('https://elsewhere.invalid/').catch(() => {})")
    page.expect_refusals("img-src https://elsewhere", "connect-src https://elsewhere")


def test_lines_and_blanks_of_an_answer_are_kept(open_at: Open, scripted: Scripted) -> None:
    text = "one\n\n  two  three\n\tfour"
    scripted.llm.script = replace(Script(), texts=list(text))
    page = open_at(scripted.url)
    page.ask("hi")
    assert page.words.inner_text() == text
