"""The form of an answer: what each way to ask for it becomes, and what is refused."""

import json
from typing import Any

import pytest
from pydantic import BaseModel

from chiasm.errors import ChiasmError, Reason
from chiasm.v1 import llm_service_pb2
from tests.gateway.gateway_system import System
from tests.scripted_llm import MODEL, Script

pytestmark = pytest.mark.asyncio(loop_scope="module")

_S = llm_service_pb2
# Names out of alphabetical order, and null as a value: neither may be lost on the way.
SCHEMA = {
    "type": "object",
    "properties": {"z": {"const": None}, "a": {"enum": ["é", None, 1.5]}},
    "required": ["z"],
}


def of_schema(schema: Any) -> llm_service_pb2.OutputConstraint:
    return _S.OutputConstraint(json_schema=json.dumps(schema))


def named(schema: Any = SCHEMA, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema} | more}


CHOICES = _S.OutputConstraint(choice=_S.ChoiceList(choices=["red", "blue"]))
ANY_OBJECT = _S.OutputConstraint(json_object=True)
REGEX = _S.OutputConstraint(regex="[0-9]+")
GRAMMAR = _S.OutputConstraint(grammar='start: "a"')
ASKED: dict[str, tuple[dict[str, Any], llm_service_pb2.OutputConstraint]] = {
    "json_object": ({"response_format": {"type": "json_object"}}, ANY_OBJECT),
    "json_schema": ({"response_format": named()}, of_schema(SCHEMA)),
    "strict": ({"response_format": named(strict=True, description="x")}, of_schema(SCHEMA)),
    "not strict": ({"response_format": named(strict=None)}, of_schema(SCHEMA)),
    "json": ({"structured_outputs": {"json": SCHEMA}}, of_schema(SCHEMA)),
    "json text": ({"structured_outputs": {"json": "{}"}}, _S.OutputConstraint(json_schema="{}")),
    "empty schema": ({"structured_outputs": {"json": {}}}, of_schema({})),
    "object": ({"structured_outputs": {"json_object": True}}, ANY_OBJECT),
    "regex": ({"structured_outputs": {"regex": "[0-9]+", "choice": None}}, REGEX),
    "choice": ({"structured_outputs": {"choice": ["red", "blue"]}}, CHOICES),
    "grammar": (
        {"structured_outputs": {"grammar": 'start: "a"', "disable_fallback": True}}, GRAMMAR
    ),
    "guided_json": ({"guided_json": SCHEMA}, of_schema(SCHEMA)),
    "guided_regex": ({"guided_regex": "[0-9]+", "guided_decoding_backend": "x"}, REGEX),
    "guided_choice": ({"guided_choice": ["red", "blue"]}, CHOICES),
    "guided_grammar": ({"guided_grammar": 'start: "a"'}, GRAMMAR),
}  # fmt: skip
NOTHING: dict[str, dict[str, Any]] = {
    "text": {"response_format": {"type": "text"}},
    "null": {"response_format": None, "structured_outputs": None, "guided_json": None},
    "empty": {"structured_outputs": {}},
    "false": {"structured_outputs": {"json_object": False}},
}
WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "no object": ({"response_format": "json"}, "response_format.type", "invalid_value"),
    "no type": ({"response_format": {}}, "response_format.type", "invalid_value"),
    "unknown type": (
        {"response_format": {"type": "xml"}}, "response_format.type", "invalid_value"
    ),
    "no schema object": (
        {"response_format": {"type": "json_schema"}},
        "response_format.json_schema", "missing_required_parameter",
    ),
    "no schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema", "missing_required_parameter",
    ),
    "no name": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        "response_format.json_schema.name", "missing_required_parameter",
    ),
    "odd name": (
        {"response_format": named(name="a b")},
        "response_format.json_schema.name", "invalid_value",
    ),
    "schema as list": (
        {"response_format": named([])}, "response_format.json_schema.schema", "invalid_type"
    ),
    "json as number": ({"guided_json": 3}, "guided_json", "invalid_type"),
    "regex as number": (
        {"structured_outputs": {"regex": 3}}, "structured_outputs.regex", "invalid_type"
    ),
    "no choice": ({"guided_choice": []}, "guided_choice", "empty_array"),
    "choice of numbers": ({"guided_choice": ["a", 1]}, "guided_choice[1]", "invalid_type"),
    "NUL": ({"guided_regex": "a\0b"}, "guided_regex", "invalid_value"),
    "two at once": (
        {"response_format": {"type": "json_object"}, "guided_regex": "a"},
        "guided_regex", "invalid_value",
    ),
    "two in one": (
        {"structured_outputs": {"regex": "a", "grammar": "start: A"}},
        "structured_outputs.grammar", "invalid_value",
    ),
    "structural tag": (
        {"structured_outputs": {"structural_tag": "{}"}},
        "structured_outputs.structural_tag", "unsupported_parameter",
    ),
    "whitespace": (
        {"guided_json": {}, "guided_whitespace_pattern": " "},
        "guided_whitespace_pattern", "unsupported_parameter",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("fields", "expected"), ASKED.values(), ids=ASKED.keys())
async def test_each_way_to_ask_for_a_form_arrives(
    system: System, fields: dict[str, Any], expected: llm_service_pb2.OutputConstraint
) -> None:
    assert (await system.ask(**fields)).status_code == 200
    assert system.llm.last.message.constraint == expected


@pytest.mark.parametrize("fields", NOTHING.values(), ids=NOTHING.keys())
async def test_free_text_sends_no_constraint(system: System, fields: dict[str, Any]) -> None:
    assert (await system.ask(**fields)).status_code == 200
    assert not system.llm.last.message.HasField("constraint")


@pytest.mark.parametrize(("fields", "param", "code"), WRONG.values(), ids=WRONG.keys())
async def test_a_form_at_fault_is_named(
    system: System, fields: dict[str, Any], param: str, code: str
) -> None:
    answer = await system.ask(**fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code)
    assert system.llm.received == []


@pytest.mark.parametrize(
    ("fields", "field", "param"),
    [
        ({"response_format": named()}, "constraint.json_schema",
         "response_format.json_schema.schema"),
        ({"structured_outputs": {"json": {}}}, "constraint.json_schema", "structured_outputs.json"),
        ({"guided_choice": ["a", "b"]}, "constraint.choice.choices[1]", "guided_choice[1]"),
        ({"guided_grammar": "x"}, "constraint.grammar", "guided_grammar"),
    ],
)  # fmt: skip
async def test_the_llm_services_finding_has_the_path_of_the_request(
    system: System, fields: dict[str, Any], field: str, param: str
) -> None:
    system.llm.script = Script(refusal=ChiasmError(Reason.UNSUPPORTED, "Told.", field))
    error = (await system.ask(**fields)).json()["error"]
    assert (error["param"], error["message"]) == (param, "Told.")


async def test_openais_client_parses_an_answer_into_its_own_type(system: System) -> None:
    class Step(BaseModel):
        said: str
        sure: bool | None

    system.llm.script = Script(texts=('{"said":', '"yes"', ',"sure":null}'))
    answer = await system.openai.chat.completions.parse(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], response_format=Step
    )
    assert answer.choices[0].message.parsed == Step(said="yes", sure=None)
    schema = json.loads(system.llm.last.message.constraint.json_schema)
    assert schema["required"] == ["said", "sure"]
    assert schema["additionalProperties"] is False
