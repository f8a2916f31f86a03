"""The calls in an answer of the Hermes form, as its text comes. Pure.

The answer kept the grammar of `tools.grammar`, so each call begins and goes on as written here;
only its end may be missing, where the answer was cut.
"""

import re
import secrets
from dataclasses import dataclass
from typing import Final, Literal

OPEN: Final = "<tool_call>"
BEFORE_NAME: Final = '\n{"name": "'
BEFORE_ARGUMENTS: Final = '", "arguments": '
# After the arguments and the object's own brace. No JSON on one line holds a newline.
CLOSE: Final = "\n</tool_call>"
_HEAD: Final = re.compile(
    re.escape(BEFORE_NAME) + "(?P<name>[a-zA-Z0-9_-]+)" + re.escape(BEFORE_ARGUMENTS)
)
_END: Final = "}" + CLOSE


@dataclass(frozen=True)
class CallDelta:
    """What one call gained. `id` and `name` come once, in its first."""

    index: int
    id: str | None
    name: str | None
    arguments: str


@dataclass(frozen=True)
class Call:
    """A whole call; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


class Calls:
    """Tells the calls of one answer from its text."""

    def __init__(self) -> None:
        self.whole: list[Call] = []
        self._state: Literal["text", "head", "arguments"] = "text"
        self._held = ""
        self._id = self._name = ""
        self._arguments: list[str] = []

    @property
    def cut(self) -> bool:
        """Whether a call has begun and not ended."""
        return self._state != "text"

    def push(self, text: str) -> tuple[str, list[CallDelta]]:
        """The text that is no call, and what the calls gained."""
        self._held += text
        texts: list[str] = []
        deltas: list[CallDelta] = []
        while self._step(texts, deltas):
            pass
        return "".join(texts), deltas

    def close(self) -> str:
        """The rest that is text; a call that was cut has none."""
        rest = self._held if self._state == "text" and not self.whole else ""
        self._held = ""
        return rest

    def _step(self, texts: list[str], deltas: list[CallDelta]) -> bool:
        match self._state:
            case "text":
                return self._read_text(texts)
            case "head":
                return self._read_head(deltas)
            case "arguments":
                return self._read_arguments(deltas)

    def _read_text(self, texts: list[str]) -> bool:
        before, found, after = self._held.partition(OPEN)
        if not found:
            keep = _overlap(before, OPEN)
            # Between calls stands a newline that is no answer.
            certain = before[: len(before) - keep]
            if self.whole and not certain.strip():
                return False
            texts.append(certain)
            self._held = before[len(before) - keep :]
            return False
        if not (self.whole and not before.strip()):
            texts.append(before)
        self._held, self._state = after, "head"
        return True

    def _read_head(self, deltas: list[CallDelta]) -> bool:
        head = _HEAD.match(self._held)
        if head is None:
            return False
        self._held, self._state = self._held[head.end() :], "arguments"
        self._id, self._name = f"call_{secrets.token_hex(12)}", head["name"]
        self._arguments = []
        deltas.append(CallDelta(len(self.whole), self._id, self._name, ""))
        return True

    def _read_arguments(self, deltas: list[CallDelta]) -> bool:
        before, found, after = self._held.partition(_END)
        keep = 0 if found else _overlap(before, _END)
        new, self._held = before[: len(before) - keep], before[len(before) - keep :]
        if new:
            self._arguments.append(new)
            deltas.append(CallDelta(len(self.whole), None, None, new))
        if not found:
            return False
        self.whole.append(Call(self._id, self._name, "".join(self._arguments)))
        self._held, self._state = after, "text"
        return True


def _overlap(text: str, sought: str) -> int:
    """Length of the longest end of `text` that begins `sought`, and is not all of it."""
    longest = min(len(text), len(sought) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(sought[:size])), 0)
