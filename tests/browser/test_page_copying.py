"""Requests copied from the page run elsewhere, whatever their texts and file names hold."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.browser.chat_page import ChatPage
from tests.browser.scripted import PLAIN_HOST, Scripted
from tests.system.processes import SAMPLES
from tests.system.three import Three

pytestmark = [pytest.mark.browser, pytest.mark.timeout(240)]
Open = Callable[..., ChatPage]
RIGHTS = ["clipboard-read", "clipboard-write"]
NASTY_NAME = 'it\'s $(touch hacked) `touch hacked` "x".png'
NASTY_TEXT = 'Say "it\'s" $HOME `id` $(id) \\n \\ 100%\nEND\nüλ🙂 \'\'\' """ {x}'


def run(program: list[str], folder: Path) -> str:
    done = subprocess.run(program, capture_output=True, text=True, cwd=folder, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def copied(page: ChatPage, what: str) -> str:
    page.action(what).click()
    expect(page.page.locator("#toast")).to_contain_text("Copied")
    return page.clipboard()


def test_the_curl_command_gets_the_same_answer(open_at: Open, demo: Three, tmp_path: Path) -> None:
    page = open_at(f"{demo.gateway.url}/", rights=RIGHTS)
    page.ask("What word is written in the picture?", SAMPLES / "fish.png")
    command = copied(page, "Copy as curl")
    assert "base64 < 'fish.png'" in command
    assert len(command) < 1500
    shutil.copy(SAMPLES / "fish.png", tmp_path)
    answer = json.loads(run(["sh", "-c", command], tmp_path))
    assert answer["choices"][0]["message"]["content"] == "fish"


def test_the_python_program_gets_the_same_answer_of_a_second_turn(
    open_at: Open, demo: Three, tmp_path: Path
) -> None:
    page = open_at(f"{demo.gateway.url}/", rights=RIGHTS)
    page.ask("What word is written in the picture?", SAMPLES / "fish.png")
    page.ask("What colour is it in the picture?")
    program = copied(page, "Copy as Python")
    assert '"content": "fish"' in program
    shutil.copy(SAMPLES / "fish.png", tmp_path)
    assert run([sys.executable, "-c", program], tmp_path) == "purple\n"


@pytest.mark.parametrize("what", ["Copy as curl", "Copy as Python"])
def test_copies_say_the_same_whatever_is_in_texts_and_names(
    open_at: Open, scripted: Scripted, tmp_path: Path, what: str
) -> None:
    picture = tmp_path / NASTY_NAME
    shutil.copy(SAMPLES / "star.png", picture)
    page = open_at(scripted.url, rights=RIGHTS)
    page.ask(NASTY_TEXT, picture)
    shown = scripted.llm.last
    program = copied(page, what)
    starter = ["bash", "-c"] if what == "Copy as curl" else [sys.executable, "-c"]
    run([*starter, program], tmp_path)
    again = scripted.llm.last
    assert again is not shown
    assert again.message.messages[0].parts[1].text == NASTY_TEXT
    assert again.image(0, 0) == shown.image(0, 0) == picture.read_bytes()
    assert again.message.sampling == shown.message.sampling
    assert sorted(tmp_path.iterdir()) == [picture]


def test_a_key_is_named_and_never_copied(open_at: Open, scripted: Scripted) -> None:
    page = open_at(scripted.url, rights=RIGHTS)
    page.button("Settings").click()
    page.page.get_by_label("API key").fill("sk-very-secret")
    page.button("Done").click()
    page.ask("hi")
    for what in ("Copy as curl", "Copy as Python"):
        program = copied(page, what)
        assert "sk-very-secret" not in program
        assert "OPENAI_API_KEY" in program
    assert page.page.evaluate("Object.keys(localStorage)") == []
    assert page.page.context.cookies() == []


def test_copying_works_where_the_browser_gives_no_clipboard(
    open_at: Open, scripted: Scripted
) -> None:
    page = open_at(scripted.url.replace("127.0.0.1", PLAIN_HOST))
    assert page.page.evaluate("navigator.clipboard") is None
    page.ask("hi")
    page.action("Copy as curl").click()
    expect(page.page.locator("#toast")).to_contain_text("Copied")
    page.question.press("Control+V")
    assert page.question.input_value().startswith(f"curl -sS 'http://{PLAIN_HOST}:")
