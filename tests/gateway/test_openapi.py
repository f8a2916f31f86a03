"""`GET /openapi.json`: whole, sound, and true of what the gateway answers."""

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import jsonschema
import pytest
import pytest_asyncio
import referencing
import referencing.jsonschema
from starlette.routing import Route

from chiasm.errors import ChiasmError, Reason
from chiasm.v1 import llm_service_pb2
from gateway.app import create_app
from gateway.settings import GatewaySettings
from tests.gateway.gateway_system import System
from tests.scripted_llm import MODEL, Script, finished

pytestmark = pytest.mark.asyncio(loop_scope="module")

_S = llm_service_pb2
STOP, CALLS = _S.FINISH_REASON_STOP, _S.FINISH_REASON_TOOL_CALLS
HI: Any = [{"role": "user", "content": "hi"}]
ROOT = "urn:document"


class Told:
    """The document, and whether a value is as it says."""

    def __init__(self, document: Any) -> None:
        self.document = document
        resource = referencing.jsonschema.DRAFT202012.create_resource(document)
        self._registry = referencing.Registry().with_resource(ROOT, resource)

    def check(self, value: Any, schema: Any) -> None:
        """Raises ValidationError if `value` does not fit `schema` of the document."""
        rooted = json.loads(json.dumps(schema).replace('"#/', f'"{ROOT}#/'))
        validator = jsonschema.Draft202012Validator(rooted, registry=self._registry)
        validator.validate(value)

    def named(self, name: str) -> Any:
        return {"$ref": f"#/components/schemas/{name}"}

    def operations(self) -> Iterator[tuple[str, str, Any]]:
        for path, methods in self.document["paths"].items():
            for method, operation in methods.items():
                yield path, method, operation

    def answer(self, path: str, method: str, status: int) -> Any:
        """The schema of the JSON of an answer."""
        answers = self.document["paths"][path][method]["responses"]
        return answers[str(status)]["content"]["application/json"]["schema"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def told(running_system: System) -> AsyncIterator[Told]:
    answer = await running_system.http.get("/openapi.json")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    yield Told(answer.json())


def bodies(told: Told) -> Iterator[tuple[str, str, Any]]:
    """Path, name of an example, the example."""
    for path, _, operation in told.operations():
        content = operation.get("requestBody", {}).get("content", {})
        for name, example in content.get("application/json", {}).get("examples", {}).items():
            yield path, name, example["value"]


async def test_every_route_and_method_is_in_the_document_and_no_other(told: Told) -> None:
    routes = [route for route in create_app(GatewaySettings()).routes if isinstance(route, Route)]
    served = {
        (route.path_format, method.lower())
        for route in routes
        for method in route.methods or ()
        if method != "HEAD"
    }
    assert {(path, method) for path, method, _ in told.operations()} == served


async def test_every_reference_leads_somewhere_and_every_schema_is_one(told: Told) -> None:
    schemas = told.document["components"]["schemas"]
    text = json.dumps(told.document)
    for piece in text.split('"#/components/schemas/')[1:]:
        assert piece.partition('"')[0] in schemas
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)


async def test_operations_have_names_of_their_own(told: Told) -> None:
    names = [operation["operationId"] for _, _, operation in told.operations()]
    assert len(set(names)) == len(names)


async def test_every_example_is_as_its_schema_says_and_is_answered(
    told: Told, system: System
) -> None:
    count = 0
    for path, name, example in bodies(told):
        operation = told.document["paths"][path]["post"]
        content = operation["requestBody"]["content"]["application/json"]
        told.check(example, content["schema"])
        if path in {"/v1/embeddings", "/v1/image_embeddings"}:  # the script knows no pictures
            continue
        system.llm.card.tool_format = "hermes"
        system.llm.script = Script(end=finished(STOP, STOP))
        sent = example | {"model": MODEL}
        answer = await system.http.post(path, json=sent)
        assert answer.status_code == 200, (path, name, answer.text)
        if not example.get("stream"):
            told.check(answer.json(), told.answer(path, "post", 200))
        count += 1
    assert count >= 9


ANSWERS: dict[str, tuple[str, str, Any]] = {
    "models": ("get", "/v1/models", None),
    "health": ("get", "/health", None),
    "ready": ("get", "/ready", None),
    "version": ("get", "/version", None),
    "tokenize": ("post", "/tokenize", {"prompt": "hi"}),
    "detokenize": ("post", "/detokenize", {"tokens": [104]}),
    "chat": ("post", "/v1/chat/completions", {"model": MODEL, "messages": HI}),
    "text": ("post", "/v1/completions", {"model": MODEL, "prompt": "hi"}),
    "response": ("post", "/v1/responses", {"model": MODEL, "input": "hi"}),
}


@pytest.mark.parametrize(("method", "path", "body"), ANSWERS.values(), ids=ANSWERS.keys())
async def test_answers_are_as_the_document_says(
    told: Told, system: System, method: str, path: str, body: Any
) -> None:
    answer = await system.http.request(method, path, json=body)
    assert answer.status_code == 200, answer.text
    told.check(answer.json(), told.answer(path, method, 200))


async def test_the_model_of_a_name_is_as_the_document_says(told: Told, system: System) -> None:
    answer = await system.http.get(f"/v1/models/{MODEL}")
    told.check(answer.json(), told.answer("/v1/models/{id}", "get", 200))
    answer = await system.http.get("/v1/models/other")
    told.check(answer.json(), told.answer("/v1/models/{id}", "get", 404))


def rich_script() -> Script:
    """An answer with all that an answer can have."""
    other = _S.TokenLogprob(token=b"J", logprob=-2)
    logprob = _S.TokenLogprob(token=b"H", logprob=-1, top=[other])
    begun = _S.ToolCallDelta(call_index=0, id="call_1", name="f", arguments_json="{")
    ended = _S.ToolCallDelta(call_index=0, arguments_json="}")
    end = finished(CALLS)
    end.choices[0].tool_calls.add(id="call_1", name="f", arguments_json="{}")
    return Script(
        deltas=[
            [_S.Delta(text="H", logprobs=[logprob])],
            [_S.Delta(tool_calls=[begun])],
            [_S.Delta(tool_calls=[ended])],
        ],
        end=end,
    )


async def test_calls_and_logprobs_are_as_the_document_says(told: Told, system: System) -> None:
    system.llm.script = rich_script()
    body = (await system.ask(logprobs=True, top_logprobs=1)).json()
    assert body["choices"][0]["message"]["tool_calls"] and body["choices"][0]["logprobs"]["content"]
    told.check(body, told.answer("/v1/chat/completions", "post", 200))
    answer = await system.ask(logprobs=True, stream=True, stream_options={"include_usage": True})
    chunks = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert chunks.pop() == "[DONE]"
    assert len(chunks) == 6
    for chunk in chunks:
        told.check(json.loads(chunk), told.named("ChatCompletionChunk"))


async def test_chunks_of_text_are_as_the_document_says(told: Told, system: System) -> None:
    logprob = _S.TokenLogprob(token=b"H", logprob=-1)
    system.llm.script = Script(deltas=[[_S.Delta(text="H", logprobs=[logprob])]])
    body = {"model": MODEL, "prompt": "hi", "logprobs": 1}
    whole = (await system.http.post("/v1/completions", json=body)).json()
    told.check(whole, told.answer("/v1/completions", "post", 200))
    options = {"stream": True, "stream_options": {"include_usage": True}}
    answer = await system.http.post("/v1/completions", json=body | options)
    chunks = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert chunks.pop() == "[DONE]"
    assert len(chunks) == 3
    for chunk in chunks:
        told.check(json.loads(chunk), told.named("TextCompletionChunk"))


@pytest.mark.parametrize("reason", [one for one in Reason if one is not Reason.CANCELLED])
async def test_every_failure_is_as_the_document_says(
    told: Told, system: System, reason: Reason
) -> None:
    system.llm.script = Script(refusal=ChiasmError(reason, "Told."))
    answer = await system.ask()
    told.check(answer.json(), told.answer("/v1/chat/completions", "post", answer.status_code))
    described = told.document["paths"]["/v1/chat/completions"]["post"]["responses"]
    for name, header in described[str(answer.status_code)]["headers"].items():
        assert name in answer.headers
        if header["schema"]["type"] == "integer":
            told.check(int(answer.headers[name]), header["schema"])


WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "no model": ("ChatRequest", {"messages": HI}),
    "no messages": ("ChatRequest", {"model": MODEL, "messages": []}),
    "role": ("ChatRequest", {"model": MODEL, "messages": [{"role": "boss", "content": "x"}]}),
    "NUL": ("ChatRequest", {"model": MODEL, "messages": [{"role": "user", "content": "\0"}]}),
    "temperature": ("ChatRequest", {"model": MODEL, "messages": HI, "temperature": 3}),
    "top_p": ("ChatRequest", {"model": MODEL, "messages": HI, "top_p": 0}),
    "bias": ("ChatRequest", {"model": MODEL, "messages": HI, "logit_bias": {"x": 1}}),
    "stop": ("ChatRequest", {"model": MODEL, "messages": HI, "stop": ["a"] * 17}),
    "format": ("ChatRequest", {"model": MODEL, "messages": HI, "response_format": {"type": "x"}}),
    "prompt": ("CompletionRequest", {"model": MODEL, "prompt": {}}),
    "echo": ("CompletionRequest", {"model": MODEL, "prompt": [-1]}),
    "tokens": ("DetokenizeRequest", {"tokens": ["a"]}),
    "strings": ("TokenizeRequest", {"prompt": "a", "return_token_strs": True}),
}
PATHS = {
    "ChatRequest": "/v1/chat/completions",
    "CompletionRequest": "/v1/completions",
    "TokenizeRequest": "/tokenize",
    "DetokenizeRequest": "/detokenize",
}


@pytest.mark.parametrize(("name", "body"), WRONG.values(), ids=WRONG.keys())
async def test_what_the_gateway_refuses_the_document_refuses(
    told: Told, system: System, name: str, body: dict[str, Any]
) -> None:
    assert (await system.http.post(PATHS[name], json=body)).status_code == 400
    with pytest.raises(jsonschema.ValidationError):
        told.check(body, told.named(name))


RIGHT: dict[str, tuple[str, dict[str, Any]]] = {
    "null": ("ChatRequest", {"model": MODEL, "messages": HI, "stream": None, "tools": None}),
    "stop text": ("ChatRequest", {"model": MODEL, "messages": HI, "stop": "x"}),
    "unknown": ("ChatRequest", {"model": MODEL, "messages": HI, "invented": [1]}),
    "bias": ("ChatRequest", {"model": MODEL, "messages": HI, "logit_bias": {"5": -100}}),
    "guided": ("ChatRequest", {"model": MODEL, "messages": HI, "guided_choice": ["a", "b"]}),
    "format": ("CompletionRequest", {"model": MODEL, "prompt": "a",
                                     "response_format": {"type": "json_object"}}),
    "prompts": ("CompletionRequest", {"model": MODEL, "prompt": ["a", "b"], "max_tokens": None}),
    "no tokens": ("DetokenizeRequest", {"tokens": []}),
}  # fmt: skip


@pytest.mark.parametrize(("name", "body"), RIGHT.values(), ids=RIGHT.keys())
async def test_what_the_gateway_takes_the_document_takes(
    told: Told, system: System, name: str, body: dict[str, Any]
) -> None:
    answer = await system.http.post(PATHS[name], json=body)
    assert answer.status_code == 200, answer.text
    told.check(body, told.named(name))


async def test_keys_are_asked_for_where_they_are_on() -> None:
    from gateway.openapi.document import document
    from gateway.openapi.operations import OPERATIONS

    paths = [one.path for one in OPERATIONS]
    found = document(paths, locked=True, open_paths=["/health", "/", "/page/"])["paths"]
    needs = {path for path, methods in found.items() for it in methods.values() if it["security"]}
    assert needs == {*paths} - {"/health", "/", "/page/{name}"}
    assert document(paths, locked=False)["components"]["securitySchemes"]["bearer"] == {
        "type": "http", "scheme": "bearer",
    }  # fmt: skip
    open_ones = document(paths, locked=False)["paths"].values()
    assert not any(it["security"] for methods in open_ones for it in methods.values())
