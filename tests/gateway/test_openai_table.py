"""`docs/openai.md` says of every field what happens to it; here each is sent and looked at."""

import copy
import json
import re
import types
import typing
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import typing_extensions
from openai.types import completion_create_params as completions
from openai.types.chat import completion_create_params as chats

from chiasm.v1 import llm_service_pb2
from gateway.openai.completions import CompletionRequest
from gateway.openai.constraint import Forms
from gateway.openai.schema import ChatRequest
from tests.gateway.gateway_system import System, whole_system
from tests.scripted_llm import MODEL, Script, finished

DOCUMENT = Path(__file__).parents[2] / "docs" / "openai.md"
STOP = llm_service_pb2.FINISH_REASON_STOP
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BASES: dict[str, dict[str, Any]] = {
    CHAT: {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]},
    TEXT: {"model": MODEL, "prompt": "hi"},
}
ROW = re.compile(
    r"^\| `(?P<field>[^`]+)` \| (?P<kind>\w+) \| `(?P<example>[^`]+)` \|(?P<why>.*)\|$"
)
STEP = re.compile(r"[^.\[\]]+|\[\]")


@dataclass(frozen=True)
class Row:
    """A row of a table: a field of the body that `path` takes, and what happens to it."""

    path: str
    field: str
    kind: str
    example: dict[str, Any]
    why: str

    @property
    def name(self) -> str:
        return f"{self.path} {self.field}"

    @property
    def concrete(self) -> str:
        """The field's path in the example, as errors write it."""
        return self.field.replace("[]", "[0]")

    @property
    def body(self) -> dict[str, Any]:
        return copy.deepcopy(BASES[self.path] | self.example)

    @property
    def bare(self) -> dict[str, Any]:
        """The body without the field; a field that every request has takes the usual value."""
        body = self.body
        if self.field in BASES[self.path]:
            return body | {self.field: BASES[self.path][self.field]}
        *steps, last = STEP.findall(self.field)
        within: Any = body
        for step in steps:
            within = within[0] if step == "[]" else within[step]
        del within[last]
        return body


def rows() -> Iterator[Row]:
    path = CHAT
    for line in DOCUMENT.read_text().splitlines():
        if line == "## Completions":
            path = TEXT
        if found := ROW.match(line):
            example = json.loads("{" + found["example"] + "}")
            yield Row(path, found["field"], found["kind"], example, found["why"].strip())


ROWS = list(rows())


def of_kind(kind: str) -> list[Any]:
    return [pytest.param(one, id=one.name) for one in ROWS if one.kind == kind]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def capable() -> AsyncIterator[System]:
    """A gateway before a service that can do all that some model can."""
    async with whole_system() as system:
        system.llm.script = Script(end=finished(STOP, STOP))
        system.llm.card.tool_format = "hermes"
        system.llm.card.template_variables[:] = ["enable_thinking"]
        yield system


@dataclass(frozen=True)
class Outcome:
    """What came of a request."""

    status: int
    answer: Any
    asked: list[bytes]


async def outcome(system: System, path: str, body: dict[str, Any]) -> Outcome:
    system.llm.received.clear()
    answer = await system.http.post(path, json=body)
    received = [one.wired.message.SerializeToString(deterministic=True) + bytes_of(one)
                for one in system.llm.received]  # fmt: skip
    streamed = answer.headers["content-type"].startswith("text/event-stream")
    told = sorted(map(plain, lines(answer.text))) if streamed else plain(answer.text)
    return Outcome(answer.status_code, told, sorted(received))


def bytes_of(received: Any) -> bytes:
    messages = received.message.messages
    parts = [part for message in messages for part in message.parts if part.HasField("image")]
    return b"".join(bytes(received.wired.data(part.image.data)) for part in parts)


def lines(text: str) -> list[str]:
    return [line.removeprefix("data: ") for line in text.split("\n\n") if line]


def plain(text: str) -> str:
    """An answer without what differs from one to the next."""
    return re.sub(r'"(id|created)": ?("[^"]*"|\d+),?', "", text)


def param_of(answer: str) -> str:
    param: str = json.loads(answer)["error"]["param"]
    return param


def is_about(param: str, row: Row) -> bool:
    """Inside a message or a tool, the error may name what stands beside the field: its type."""
    parent = row.concrete.rpartition(".")[0]
    return row.concrete.startswith(param) or bool(parent and param.startswith(parent))


def test_every_line_of_the_tables_is_read() -> None:
    written = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("| `")]
    routes = [line for line in written if re.match(r"\| `(POST|GET) ", line)]
    assert len(written) == len(ROWS) + len(routes)
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert {row.kind for row in ROWS} == {"honoured", "ignored", "refused"}


def test_fields_that_are_not_honoured_say_why_where_they_are_first_named() -> None:
    silent = [row.field for row in ROWS if row.kind != "honoured" and not row.why]
    explained = {row.field for row in ROWS if row.why}
    assert set(silent) - explained <= {"include_stop_str_in_output"}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("row", of_kind("honoured"))
async def test_an_honoured_field_changes_the_request_or_the_answer(
    capable: System, row: Row
) -> None:
    with_it = await outcome(capable, row.path, row.body)
    without = await outcome(capable, row.path, row.bare)
    told = {"model": 404, "messages[].content[].type": 400}.get(row.field, 200)
    assert with_it.status == told, with_it.answer
    assert (with_it.status, with_it.asked, with_it.answer) != (
        without.status, without.asked, without.answer,
    )  # fmt: skip


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("row", of_kind("ignored"))
async def test_an_ignored_field_changes_neither(capable: System, row: Row) -> None:
    with_it = await outcome(capable, row.path, row.body)
    without = await outcome(capable, row.path, row.bare)
    assert with_it.status == 200, with_it.answer
    assert with_it == without


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("row", of_kind("refused"))
async def test_a_refused_field_is_a_400_that_names_it(capable: System, row: Row) -> None:
    with_it = await outcome(capable, row.path, row.body)
    assert with_it.status == 400
    assert with_it.asked == []
    assert is_about(param_of(with_it.answer), row), param_of(with_it.answer)
    if "." not in row.field:
        assert (await outcome(capable, row.path, row.bare)).status == 200


def named(path: str) -> dict[str, Row]:
    return {row.field: row for row in ROWS if row.path == path}


def fields_of(kind: Any, path: str = "", seen: tuple[Any, ...] = ()) -> Iterator[str]:
    """The paths of all fields of a TypedDict and of what is in it."""
    origin, inner = typing_extensions.get_origin(kind), typing_extensions.get_args(kind)
    if origin in {typing_extensions.Required, typing_extensions.NotRequired, typing.Annotated}:
        yield from fields_of(inner[0], path, seen)
    elif origin in {typing.Union, types.UnionType}:
        for one in inner:
            yield from fields_of(one, path, seen)
    elif isinstance(origin, type) and issubclass(origin, Iterable) and len(inner) == 1:
        yield from fields_of(inner[0], f"{path}[]", seen)
    elif typing_extensions.is_typeddict(kind) and kind not in seen:
        for name, field in typing_extensions.get_type_hints(kind).items():
            place = f"{path}.{name}" if path else name
            yield place
            yield from fields_of(field, place, (*seen, kind))


@pytest.mark.parametrize(("path", "params", "least"), [(CHAT, chats, 120), (TEXT, completions, 20)])
def test_no_field_of_openais_own_schema_is_missing(path: str, params: Any, least: int) -> None:
    both = (params.CompletionCreateParamsNonStreaming, params.CompletionCreateParamsStreaming)
    wanted = {field for kind in both for field in fields_of(kind)}
    assert len(wanted) >= least
    table = named(path)
    # What is ignored or refused as a whole needs no row for what is in it.
    closed = tuple(
        end for row in table.values() if row.kind != "honoured"
        for end in (f"{row.field}.", f"{row.field}[]")
    )  # fmt: skip
    assert (
        sorted(field for field in wanted if field not in table and not field.startswith(closed))
        == []
    )


@pytest.mark.parametrize(("path", "model"), [(CHAT, ChatRequest), (TEXT, CompletionRequest)])
def test_no_field_that_the_gateway_reads_is_missing(path: str, model: Any) -> None:
    read = {*model.model_fields, *Forms.model_fields}
    assert sorted(read - named(path).keys()) == []
