"""The calls in an answer of the Hermes form, as its text comes. Pure.

The answer kept the grammar of `tools.grammar`, so each call begins and goes on as written here;
only its end may be missing, where the answer was cut.
"""

import json
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
    """A call; `arguments` is JSON text, and the beginning of one where the answer was cut."""

    id: str
    name: str
    arguments: str


class Calls:
    """Tells the calls of one answer from its text. `forced`: it is calls and nothing else."""

    def __init__(self, *, forced: bool = False) -> None:
        # The last may be cut: see `cut`.
        self.made: list[Call] = []
        self._forced = forced
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

    def close(self) -> tuple[str, list[CallDelta]]:
        """The rest, as `push` gives it: a mark that never was whole is text, unless forced."""
        held, self._held = self._held, ""
        if self._state == "arguments":
            return "", self._cut(held)
        is_text = self._state == "text" and not self.made and not self._forced
        return held if is_text else "", []

    def _cut(self, held: str) -> list[CallDelta]:
        """The end of arguments that were cut: what was held back may be theirs, or the end's."""
        arguments, rest = "".join(self._arguments), ""
        if held == "}" and not _is_json(arguments):
            rest = held
        self.made.append(Call(self._id, self._name, arguments + rest))
        return [CallDelta(len(self.made) - 1, None, None, rest)] if rest else []

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
            if self.made and not certain.strip():
                return False
            texts.append(certain)
            self._held = before[len(before) - keep :]
            return False
        if not (self.made and not before.strip()):
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
        deltas.append(CallDelta(len(self.made), self._id, self._name, ""))
        return True

    def _read_arguments(self, deltas: list[CallDelta]) -> bool:
        before, found, after = self._held.partition(_END)
        keep = 0 if found else _overlap(before, _END)
        new, self._held = before[: len(before) - keep], before[len(before) - keep :]
        if new:
            self._arguments.append(new)
            deltas.append(CallDelta(len(self.made), None, None, new))
        if not found:
            return False
        self.made.append(Call(self._id, self._name, "".join(self._arguments)))
        self._held, self._state = after, "text"
        return True


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _overlap(text: str, sought: str) -> int:
    """Length of the longest end of `text` that begins `sought`, and is not all of it."""
    longest = min(len(text), len(sought) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(sought[:size])), 0)
