"""The page in a browser, as its reader has it before the eyes."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, ConsoleMessage, Error, Locator, Page, expect

ANSWER_MS = 20_000
_LISTEN = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) =>
  window.violations.push(`${event.violatedDirective} ${event.blockedURI}`));
"""
# A browser's own words for an answer with an error's status.
_REFUSED = re.compile("Failed to load resource: ")


@dataclass
class ChatPage:
    """One tab. `faults` gathers what its console tells, answers with errors' status aside."""

    page: Page
    faults: list[str] = field(default_factory=list)

    @property
    def question(self) -> Locator:
        return self.page.get_by_label("Your question")

    @property
    def turns(self) -> Locator:
        return self.page.locator(".turn")

    @property
    def last(self) -> Locator:
        return self.turns.last

    @property
    def words(self) -> Locator:
        """The text of the last answer."""
        return self.last.locator(".main .words")

    def button(self, name: str) -> Locator:
        return self.page.get_by_role("button", name=name, exact=True)

    def action(self, name: str) -> Locator:
        """A button of the last turn."""
        return self.last.get_by_role("button", name=name, exact=True)

    def attach(self, *files: Path) -> None:
        """Chooses files, as the dialog of the system does."""
        self.page.set_input_files("#files", files)
        expect(self.page.locator("#pictures li")).to_have_count(len(files))

    def drop(self, *files: Path) -> None:
        """Drags files from outside the browser onto the conversation and lets them go there."""
        session = self.page.context.new_cdp_session(self.page)
        names = [str(file) for file in files]
        data: dict[str, Any] = {"items": [], "files": names, "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            event = {"type": kind, "x": 300, "y": 300, "data": data}
            session.send("Input.dispatchDragEvent", event)
        session.detach()

    def ask(self, text: str, *files: Path) -> None:
        """Asks and waits for the end of the answer."""
        if files:
            self.attach(*files)
        self.question.fill(text)
        self.question.press("Enter")
        self.wait()

    def wait(self) -> None:
        """Waits until nothing is under way."""
        expect(self.page.locator("body")).not_to_have_class(re.compile("busy"), timeout=ANSWER_MS)

    def clipboard(self) -> str:
        text: str = self.page.evaluate("navigator.clipboard.readText()")
        return text

    def check_sound(self) -> None:
        """No script failed, and nothing was tried that the page's own policy forbids."""
        assert self.page.evaluate("window.violations") == []
        assert self.faults == []

    def expect_refusals(self, *parts: str) -> None:
        """Waits for violations of the policy, one with each of `parts`, and forgets them."""
        for part in parts:
            self.page.wait_for_function("(part) => violations.join().includes(part)", arg=part)
        self.page.evaluate("violations.length = 0")
        self.faults.clear()

    def _hear(self, message: ConsoleMessage) -> None:
        if message.type in {"error", "warning"} and not _REFUSED.match(message.text):
            self.faults.append(message.text)

    def _hear_error(self, error: Error) -> None:
        self.faults.append(str(error))


@contextmanager
def open_page(
    browser: Browser, url: str, *, rights: Sequence[str] = (), **context: Any
) -> Iterator[ChatPage]:
    """The page in a profile of its own, checked at the end. `rights`: browser permissions."""
    with browser.new_context(permissions=list(rights), **context) as profile:
        profile.set_default_timeout(10_000)
        profile.add_init_script(_LISTEN)
        chat = ChatPage(profile.new_page())
        chat.page.on("console", chat._hear)
        chat.page.on("pageerror", chat._hear_error)
        chat.page.goto(url)
        yield chat
        chat.check_sound()
