"""From a conversation to token ids: chat template, tokenizer, placeholders.

What a person writes stays text. Where it spells a special token (an end of turn, an image
placeholder), that spelling is kept out of the rendered template by a stand-in nobody can guess, and
tokenized as the plain characters that it is. Everything else is tokenized in one piece, exactly as
transformers does it.
"""

import copy
import json
import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jinja2
import torch

from chiasm.errors import ChiasmError, Reason
from chiasm.models.contract import ImageForm, Mark
from chiasm.models.language import LanguageHalf
from llm_service.request import Conversation, PastCall, Picture, Text, Turn
from llm_service.tools.hermes import BEFORE_ARGUMENTS, BEFORE_NAME, CLOSE, OPEN

HERMES = "hermes"
_PROBE = "chiasm probe text"
_PROBE_TOOL = "chiasm_probe_tool"
_PROBE_ANSWER = "chiasm probe answer"
_NO_RUN = (0, 0, 0)


@dataclass(frozen=True)
class Run:
    """Image tokens `start` to `start + length` of a prompt.

    They stand for as many rows of picture `picture`, from row `first_row` on.
    """

    picture: int
    first_row: int
    start: int
    length: int


@dataclass(frozen=True, eq=False)
class Layout:
    """A tokenized prompt.

    Attributes:
        runs: where image tokens stand, in order.
        positions: int64 `[3, tokens]`, or None where every token stands at its index.
        position_delta: what a generated token stands off its index, on all axes.
    """

    token_ids: tuple[int, ...]
    runs: tuple[Run, ...]
    image_token_count: int
    positions: torch.Tensor | None = None
    position_delta: int = 0

    @property
    def text_token_count(self) -> int:
        return len(self.token_ids) - self.image_token_count


class PromptBuilder:
    """Renders and tokenizes with one model's template and tokenizer. Thread-safe once built."""

    def __init__(self, model: LanguageHalf) -> None:
        self._tokenizer: Any = model.tokenizer
        self._template = model.chat_template
        self._model = model
        self._marker = re.compile(re.escape(model.marker))
        self._special = _special_pattern(self._tokenizer)
        # transformers switches the treatment of special tokens on the one tokenizer it holds, so
        # that threads would change it under each other: two that never change.
        self._with_special = _frozen_copy(self._tokenizer, special_as_text=False)
        self._as_text = _frozen_copy(self._tokenizer, special_as_text=True)
        self._takes_parts = self._renders_parts()
        self.tool_format = self._tool_format()
        self._longest_token = max(map(len, self._tokenizer.get_vocab()))

    def least_tokens(self, conversation: Conversation) -> int:
        """A bound from below on the prompt's tokens that costs nothing to find.

        Every token stands for so many characters at most; a text of gigabytes need not be tokenized
        to tell that it is too long.
        """
        texts = (part for turn in conversation.turns for part in turn.parts)
        characters = sum(len(part.text) for part in texts if isinstance(part, Text))
        calls = (call for turn in conversation.turns for call in turn.calls)
        characters += sum(len(call.arguments) for call in calls)
        return characters // self._longest_token + len(conversation.pictures)

    def least_of(self, prompt: str | tuple[int, ...]) -> int:
        """As `least_tokens`, of a prompt as it is."""
        return len(prompt) // (self._longest_token if isinstance(prompt, str) else 1)

    def render(self, conversation: Conversation) -> "Rendered":
        """The conversation's text with a marker for each picture.

        Raises REQUEST_INVALID if the template refuses the order of roles or drops a picture, and
        UNSUPPORTED for tools where it has no place for them.
        """
        self._check_tools(conversation)
        spelled = _StandIns(self._special)
        messages = [self._message(turn, spelled) for turn in conversation.turns]
        between = self._marker.split(self._render(messages, conversation, spelled))
        self._check_markers(len(between) - 1, conversation.pictures)
        return Rendered(tuple(between), spelled)

    def lay_out(self, rendered: "Rendered", forms: Sequence[ImageForm]) -> Layout:
        """The prompt with what stands for each picture in place of its marker.

        As transformers' processors do it, that text is put in before anything is tokenized. A run
        of image tokens is tokenized as one and then repeated, which gives the same.
        """
        text, lengths = _with_forms(rendered.between, forms, self._model.image_token)
        token_ids: list[int] = []
        runs: list[Run] = []
        waiting = iter(lengths)
        for token_id in self._tokenize(text, rendered.spelled):
            if token_id == self._model.image_token_id:
                picture, first_row, length = next(waiting, _NO_RUN)
                runs.append(Run(picture, first_row, len(token_ids), length))
                token_ids.extend([token_id] * length)
            else:
                token_ids.append(token_id)
        if [run.length for run in runs] != [length for _, _, length in lengths]:
            # Only with a tokenizer whose image token is no special one.
            raise ChiasmError(
                Reason.REQUEST_INVALID, "A text spells the model's image token.", "messages"
            )
        grids = [form.grid_thw for form in forms if form.grid_thw is not None]
        placed, delta = self._model.positions(token_ids, grids) or (None, 0)
        image_tokens = sum(length for _, _, length in lengths)
        return Layout(tuple(token_ids), tuple(runs), image_tokens, placed, delta)

    def raw(self, prompt: str | tuple[int, ...], *, add_special_tokens: bool = True) -> Layout:
        """A prompt as it is, without pictures. Raises REQUEST_INVALID."""
        if isinstance(prompt, str):
            field = "prompt.text"
            encoding = self._with_special.encode(prompt, add_special_tokens=add_special_tokens)
            token_ids = tuple(encoding.ids)
        else:
            field, token_ids = "prompt.token_ids", prompt
            self._check_ids(token_ids, field)
        if self._model.image_token_id in token_ids:
            text = "A prompt without messages holds no pictures; it spells the image token."
            raise ChiasmError(Reason.REQUEST_INVALID, text, field)
        placed, delta = self._model.positions(token_ids, []) or (None, 0)
        return Layout(token_ids, (), 0, placed, delta)

    def text_of(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, special ones spelled. Raises REQUEST_INVALID."""
        self._check_ids(token_ids, "token_ids")
        text: str = self._with_special.decode(list(token_ids), skip_special_tokens=False)
        return text

    def _check_ids(self, token_ids: Sequence[int], field: str) -> None:
        size = self._model.vocab_size
        wrong = next((one for one in token_ids if not 0 <= one < size), None)
        if wrong is not None:
            text = f"Token ids run from 0 to {size - 1}, but {wrong} came."
            raise ChiasmError(Reason.REQUEST_INVALID, text, field)

    def _check_tools(self, conversation: Conversation) -> None:
        if self.tool_format:
            return
        text = "The model's chat template has no place for tools; leave them out."
        if conversation.tools:
            raise ChiasmError(Reason.UNSUPPORTED, text, "tools.tools_json")
        for number, turn in enumerate(conversation.turns):
            if turn.calls:
                raise ChiasmError(Reason.UNSUPPORTED, text, f"messages[{number}].tool_calls")

    def _message(self, turn: Turn, spelled: "_StandIns") -> dict[str, Any]:
        content = self._content(turn, spelled)
        return {"role": turn.role, "content": content, **_extras(turn, spelled)}

    def _content(self, turn: Turn, spelled: "_StandIns") -> str | list[dict[str, str]]:
        parts = [_template_part(part, spelled) for part in turn.parts]
        if not parts:
            return ""
        if self._takes_parts:
            return parts
        if any(part["type"] == "image" for part in parts):
            raise ChiasmError(
                Reason.REQUEST_INVALID, "The model's chat template takes text only.", "messages"
            )
        return "".join(part["text"] for part in parts)

    def _render(
        self,
        messages: Sequence[dict[str, Any]],
        conversation: Conversation,
        spelled: "_StandIns",
    ) -> str:
        variables = {
            name: spelled.protected(value) for name, value in conversation.variables.items()
        }
        tools = [spelled.protected(one) for one in conversation.tools] or None
        try:
            rendered: str = self._tokenizer.apply_chat_template(
                messages,
                tools=tools,
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=not conversation.continued,
                continue_final_message=conversation.continued,
                **variables,
            )
        except (jinja2.TemplateError, TypeError, KeyError, ValueError) as error:
            raise ChiasmError(
                Reason.REQUEST_INVALID,
                "The model's chat template refuses this conversation: check the order of the roles "
                "and the kinds of content in each.",
                "messages",
            ) from error
        return rendered

    def _renders_parts(self) -> bool:
        try:
            rendered = self._render(
                [{"role": "user", "content": [{"type": "text", "text": _PROBE}]}],
                Conversation((), ""),
                _StandIns(None),
            )
        except ChiasmError:
            return False
        # A template that wants plain strings prints the list itself, quotes and all.
        return _PROBE in rendered and "'type'" not in rendered

    def _tool_format(self) -> str:
        """The form of the model's tool calls; empty where it takes none, or in another form.

        A template is asked by giving it a tool, a call of it and its answer.
        """
        user = Turn("user", (Text(_PROBE),))
        call = Turn("assistant", (), calls=(PastCall("call_1", _PROBE_TOOL, '{"a": 1}'),))
        answer = Turn("tool", (Text(_PROBE_ANSWER),), call_id="call_1")
        tool = {"type": "function", "function": {"name": _PROBE_TOOL, "description": "",
                "parameters": {"type": "object", "properties": {}}}}  # fmt: skip
        conversation = Conversation((user, call, answer), "", (tool,))
        messages = [self._message(turn, _StandIns(None)) for turn in conversation.turns]
        try:
            rendered = self._render(messages, conversation, _StandIns(None))
        except ChiasmError:
            return ""
        shown = f"{OPEN}{BEFORE_NAME}{_PROBE_TOOL}{BEFORE_ARGUMENTS}" + '{"a": 1}}' + CLOSE
        told = rendered.count(_PROBE_TOOL) > 1 and _PROBE_ANSWER in rendered
        writable = OPEN not in {str(one) for one in self._tokenizer.all_special_tokens}
        return HERMES if told and shown in rendered and writable else ""

    def _tokenize(self, rendered: str, spelled: "_StandIns") -> Iterator[int]:
        for piece, is_text in spelled.split(rendered):
            tokenizer = self._as_text if is_text else self._with_special
            yield from tokenizer.encode(piece, add_special_tokens=False).ids

    def _check_markers(self, found: int, pictures: Sequence[Picture]) -> None:
        if found != len(pictures):
            raise ChiasmError(
                Reason.REQUEST_INVALID,
                f"The model's chat template made room for {found} of {len(pictures)} pictures; it "
                "does not take them in every role.",
                "messages",
            )


def _with_forms(
    between: Sequence[str], forms: Sequence[ImageForm], image_token: str
) -> tuple[str, list[tuple[int, int, int]]]:
    """The text with one image token a run, and of each run picture, first row and length."""
    pieces = [between[0]]
    lengths: list[tuple[int, int, int]] = []
    for number, (form, following) in enumerate(zip(forms, between[1:], strict=True)):
        row = 0
        for piece in form.text:
            if isinstance(piece, int):
                lengths.append((number, row, piece))
                row += piece
                pieces.append(image_token)
            else:
                pieces.append(str(number) if piece is Mark.NUMBER else str(piece))
        pieces.append(following)
    return "".join(pieces), lengths


@dataclass
class _StandIns:
    """Stand-ins for the special tokens that user text spells, in one rendering."""

    special: re.Pattern[str] | None
    _mark: str = field(default_factory=lambda: f"\ue000{secrets.token_hex(8)}")
    _literals: list[str] = field(default_factory=list)

    def protect(self, text: str) -> str:
        return self.special.sub(self._replace, text) if self.special else text

    def protected(self, value: Any) -> Any:
        """`value` with all texts in it protected, names of fields too."""
        if isinstance(value, str):
            return self.protect(value)
        if isinstance(value, dict):
            return {self.protect(name): self.protected(one) for name, one in value.items()}
        return [self.protected(one) for one in value] if isinstance(value, list) else value

    def split(self, rendered: str) -> Iterator[tuple[str, bool]]:
        """Pieces of the rendering, each with whether it is text that spells a special token."""
        if not self._literals:
            yield rendered, False
            return
        pattern = re.compile(f"{self._mark}([0-9]+)\ue001")
        for number, piece in enumerate(pattern.split(rendered)):
            if number % 2:
                yield self._literals[int(piece)], True
            elif piece:
                yield piece, False

    def _replace(self, match: re.Match[str]) -> str:
        self._literals.append(match[0])
        return f"{self._mark}{len(self._literals) - 1}\ue001"


@dataclass(frozen=True, eq=False)
class Rendered:
    """A conversation after the chat template: the text between the markers of its pictures."""

    between: tuple[str, ...]
    spelled: _StandIns


def _extras(turn: Turn, spelled: _StandIns) -> dict[str, Any]:
    """What a turn has beside its content, in the names that chat templates use."""
    extras: dict[str, Any] = {}
    if turn.name:
        extras["name"] = spelled.protect(turn.name)
    if turn.call_id:
        extras["tool_call_id"] = spelled.protect(turn.call_id)
    if turn.calls:
        extras["tool_calls"] = [_template_call(call, spelled) for call in turn.calls]
    return extras


def _template_call(call: PastCall, spelled: _StandIns) -> dict[str, Any]:
    """Arguments as an object, where they are one: templates write it as JSON."""
    try:
        arguments = json.loads(call.arguments)
        # An escape may spell half a character, which no tokenizer takes.
        json.dumps(arguments, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        arguments = call.arguments
    function = {"name": call.name, "arguments": arguments}
    return {
        "id": spelled.protect(call.id),
        "type": "function",
        "function": spelled.protected(function),
    }


def _template_part(part: Text | Picture, spelled: _StandIns) -> dict[str, str]:
    if isinstance(part, Picture):
        return {"type": "image"}
    return {"type": "text", "text": spelled.protect(part.text)}


def _frozen_copy(tokenizer: Any, *, special_as_text: bool) -> Any:
    copied = copy.deepcopy(tokenizer.backend_tokenizer)
    copied.encode_special_tokens = special_as_text
    copied.no_truncation()
    copied.no_padding()
    return copied


def _special_pattern(tokenizer: Any) -> re.Pattern[str] | None:
    words = [str(t.content) for t in tokenizer.added_tokens_decoder.values() if t.special]
    # The longest first: `<|im_start|>` before a token that begins it.
    words.sort(key=len, reverse=True)
    return re.compile("|".join(map(re.escape, words))) if words else None
