"""The form that a request wants its answer in: OpenAI's `response_format`, vLLM's names for more.

    response_format     {"type": "json_schema", "json_schema": {"name": ..., "schema": ...}}
    structured_outputs  {"json" | "json_object" | "regex" | "choice" | "grammar": ...}
    guided_json, guided_regex, guided_choice, guided_grammar    vLLM's older names

A request has one of them. A schema is enforced whether or not `strict` asks for it.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import Discriminator, Field, StringConstraints, Tag, ValidationError

from chiasm.errors import ChiasmError, Reason
from chiasm.v1 import llm_service_pb2
from gateway.openai import paths
from gateway.openai.errors import invalid
from gateway.openai.schema import Body, ChatRequest, Text

_S = llm_service_pb2
_MAX_CHOICES: Final = 1024
_FORMATS: Final = ("text", "json_object", "json_schema")
_ITEM: Final = re.compile(r"\[\d+\]$")
Wanted = tuple[str, llm_service_pb2.OutputConstraint]


def _format_tag(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else None
    return f"<{kind}>" if kind in _FORMATS else None


def _schema_tag(value: Any) -> str | None:
    if isinstance(value, str):
        return "<text>"
    return "<object>" if isinstance(value, dict) else None


Choices = Annotated[list[Text], Field(min_length=1, max_length=_MAX_CHOICES, fail_fast=True)]
SchemaName = Annotated[str, StringConstraints(pattern="^[a-zA-Z0-9_-]{1,64}$")]
# As an object or, as some clients send it, as the text of one.
SchemaOrText = Annotated[
    Annotated[Text, Tag("<text>")] | Annotated[dict[str, Any], Tag("<object>")],
    Discriminator(
        _schema_tag,
        custom_error_type="schema_type",
        custom_error_message="A JSON schema is an object, or the text of one.",
    ),
]


class TextFormat(Body):
    """Free text."""

    type: Literal["text"]

    def wanted(self, place: str) -> Iterator[Wanted]:
        yield from ()


class ObjectFormat(Body):
    """Any JSON object."""

    type: Literal["json_object"]

    def wanted(self, place: str) -> Iterator[Wanted]:
        yield place, _S.OutputConstraint(json_object=True)


class NamedSchema(Body):
    """A schema with the name that OpenAI wants of it."""

    name: SchemaName
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool = False


class SchemaFormat(Body):
    """JSON of a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema

    def wanted(self, place: str) -> Iterator[Wanted]:
        yield f"{place}.json_schema.schema", _json(self.json_schema.json_schema)


ResponseFormat = Annotated[
    Annotated[TextFormat, Tag("<text>")]
    | Annotated[ObjectFormat, Tag("<json_object>")]
    | Annotated[SchemaFormat, Tag("<json_schema>")],
    Discriminator(
        _format_tag,
        custom_error_type=paths.PART_TYPE,
        custom_error_message=f"The type of a response format is one of {', '.join(_FORMATS)}.",
    ),
]


class Kinds(Body):
    """One of these: vLLM's `structured_outputs`, and by other names its older fields."""

    schema_or_text: SchemaOrText | None = Field(None, alias="json")
    json_object: bool = False
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None
    # Not served. JSON is compact in any case, and nothing falls back to another way.
    structural_tag: Any = None
    whitespace_pattern: Any = None
    disable_additional_properties: bool = False

    def wanted(self, place: str) -> Iterator[Wanted]:
        for name in ("structural_tag", "whitespace_pattern", "disable_additional_properties"):
            if getattr(self, name):
                text = f"This version does not serve {name}; leave it out."
                raise ChiasmError(Reason.UNSUPPORTED, text, f"{place}.{name}")
        if self.json_object:
            yield f"{place}.json_object", _S.OutputConstraint(json_object=True)
        yield from _one(f"{place}.json", self.schema_or_text, _json)
        yield from _one(f"{place}.regex", self.regex, _regex)
        yield from _one(f"{place}.choice", self.choice, _choice)
        yield from _one(f"{place}.grammar", self.grammar, _grammar)


class Forms(Body):
    """The fields of a request that tell the form of its answer."""

    response_format: ResponseFormat | None = None
    structured_outputs: Kinds | None = None
    guided_json: SchemaOrText | None = None
    guided_regex: Text | None = None
    guided_choice: Choices | None = None
    guided_grammar: Text | None = None

    def wanted(self) -> Iterator[Wanted]:
        if self.response_format is not None:
            yield from self.response_format.wanted("response_format")
        if self.structured_outputs is not None:
            yield from self.structured_outputs.wanted("structured_outputs")
        yield from _one("guided_json", self.guided_json, _json)
        yield from _one("guided_regex", self.guided_regex, _regex)
        yield from _one("guided_choice", self.guided_choice, _choice)
        yield from _one("guided_grammar", self.guided_grammar, _grammar)


@dataclass(frozen=True)
class Constraint:
    """The form of the answer, and the path of the JSON that told it."""

    message: llm_service_pb2.OutputConstraint
    place: str

    def path(self, field: str) -> str:
        """The path of a field that the LLM service names, `constraint.choice.choices[2]`."""
        item = _ITEM.search(field)
        return self.place + (item[0] if item else "")


def constraint_of(chat: ChatRequest) -> Constraint | None:
    """What the request wants; None for free text.

    Raises REQUEST_INVALID with the path of the fault, or where two forms are wanted; UNSUPPORTED.
    """
    return the_one(_read(chat))


def the_one(forms: Forms) -> Constraint | None:
    """The form that is wanted. Raises REQUEST_INVALID where there are two; UNSUPPORTED."""
    found = list(forms.wanted())
    if not found:
        return None
    place, message = found[0]
    if len(found) > 1:
        other = found[1][0]
        raise invalid(f"An answer has one form, but {place} and {other} came; keep one.", other)
    return Constraint(message, place)


def _read(chat: ChatRequest) -> Forms:
    given = {"response_format": chat.response_format} | (chat.model_extra or {})
    try:
        return Forms.model_validate(given)
    except ValidationError as faults:
        first = faults.errors(include_url=False, include_context=False, include_input=False)[0]
        raise paths.told(first) from None


def _one(
    place: str, value: Any, message: Callable[[Any], llm_service_pb2.OutputConstraint]
) -> Iterator[Wanted]:
    if value is not None:
        yield place, message(value)


def _json(schema: Mapping[str, Any] | str) -> llm_service_pb2.OutputConstraint:
    text = schema if isinstance(schema, str) else json.dumps(schema)
    return _S.OutputConstraint(json_schema=text)


def _regex(regex: str) -> llm_service_pb2.OutputConstraint:
    return _S.OutputConstraint(regex=regex)


def _choice(choices: Sequence[str]) -> llm_service_pb2.OutputConstraint:
    return _S.OutputConstraint(choice=_S.ChoiceList(choices=choices))


def _grammar(grammar: str) -> llm_service_pb2.OutputConstraint:
    return _S.OutputConstraint(grammar=grammar)
