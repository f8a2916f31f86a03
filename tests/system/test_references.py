"""Encoded once and used by name: references, aliases, uploads and vectors, over HTTP and gRPC."""

import base64
import json
import secrets
from typing import Any

import httpx
import numpy as np
import pytest
import safetensors.torch
import torch

from chiasm.client import Answer, Client
from chiasm.conversation import Embedding, Named, Reference, Sampling, assistant, user
from chiasm.errors import ChiasmError, Reason
from chiasm.v1 import llm_service_pb2
from tests.system.three import Json, Three, data_url, noise

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

SHORT = Sampling(temperature=0, max_tokens=8, top_logprobs=3)
WHAT = "What is to be seen in this picture, if anything at all?"
BINARY = {"accept": "application/x-safetensors"}
UPLOAD = {"content-type": "application/x-safetensors"}


def url_part(picture: bytes) -> Json:
    return {"type": "image_url", "image_url": {"url": data_url(picture)}}


def ref_part(reference: str) -> Json:
    return {"type": "image_embeds", "image_embeds": {"ref": reference}}


def fresh() -> bytes:
    """A picture that no other test has sent."""
    return noise(secrets.randbits(40))


async def held(http: httpx.AsyncClient, *items: Any, **more: Any) -> list[Json]:
    """What `POST /v1/image_embeddings` holds of `items`."""
    answer = await http.post("/v1/image_embeddings", json={"input": list(items), **more})
    assert answer.status_code == 200, answer.text
    data: list[Json] = answer.json()["data"]
    return data


async def answered(http: httpx.AsyncClient, system: Three, *content: Json) -> Json:
    """The answer to one user message, with log-probabilities."""
    answer = await http.post("/v1/chat/completions", json=chat(system, *content))
    assert answer.status_code == 200, answer.text
    body: Json = answer.json()
    return body


def chat(system: Three, *content: Json) -> Json:
    return {
        "model": system.model,
        "messages": [{"role": "user", "content": list(content)}],
        "temperature": 0,
        "max_tokens": 8,
        "logprobs": True,
        "top_logprobs": 3,
    }


def said(body: Json) -> Any:
    choice = body["choices"][0]
    return choice["message"]["content"], choice["logprobs"]


def refused(answer: httpx.Response, status: int, code: str, param: str | None) -> str:
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (status, code, param), error
    message: str = error["message"]
    return message


def exact(answer: Answer) -> Any:
    told = answer.choices[0].logprobs
    return answer.token_ids, [[(one.token_id, one.logprob) for one in at.top] for at in told]


def sources(answer: Answer) -> list[str]:
    names = [llm_service_pb2.ImageSource.Name(path.source) for path in answer.image_paths]
    return [name.removeprefix("IMAGE_SOURCE_").lower() for name in names]


async def test_a_reference_answers_as_its_picture_does_in_any_mix(tiny: Three) -> None:
    red, blue = fresh(), fresh()
    async with tiny.http() as http:
        one, two = await held(http, url_part(red), data_url(blue))
        assert one["reference"] != two["reference"]
        ask = {"type": "text", "text": "which?"}
        raw = await answered(http, tiny, url_part(red), ask, url_part(blue))
        mixes = [
            (ref_part(one["reference"]), ask, ref_part(two["reference"])),
            (ref_part(one["reference"]), ask, url_part(blue)),
            (url_part(red), ask, ref_part(two["reference"])),
        ]
        for mix in mixes:
            assert said(await answered(http, tiny, *mix)) == said(raw)
        swapped = (ref_part(two["reference"]), ask, ref_part(one["reference"]))
        assert said(await answered(http, tiny, *swapped)) != said(raw)


async def test_what_is_held_is_described_and_sent_back_as_base64(tiny: Three) -> None:
    picture = fresh()
    async with tiny.http() as http, tiny.client() as client:
        [told] = await held(http, url_part(picture), encoding_format="base64")
        encoded = await client.encode(picture)
        model = await client.get_model()
        rows = np.frombuffer(base64.b64decode(told["data"]), "<f4").reshape(told["shape"])
        assert np.array_equal(rows, encoded.to_numpy())
        assert told["row_count"] == encoded.placeholder_count == len(rows)
        assert (told["object"], told["index"], told["dtype"]) == ("image_embedding", 0, "float32")
        assert told["identity"]["weights_digest"] == model.encoder_identity.weights_digest
        assert told["image_size"] == [40, 40]
        # The very object that a chat part takes.
        raw = {key: told[key] for key in ("data", "dtype", "shape")}
        part = {"type": "image_embeds", "image_embeds": raw}
        ask = {"type": "text", "text": WHAT}
        by_rows = await answered(http, tiny, part, ask)
        by_ref = await answered(http, tiny, ref_part(told["reference"]), ask)
        assert said(by_ref) == said(by_rows)
        # Rows under a name and rows in the request are one entry of the prefix cache.
        assert by_ref["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


async def test_a_binary_body_holds_the_same_bits_and_can_be_sent_back(tiny: Three) -> None:
    pictures = [fresh(), fresh()]
    async with tiny.http() as http, tiny.client() as client:
        body = {"input": [url_part(picture) for picture in pictures]}
        answer = await http.post("/v1/image_embeddings", json=body, headers=BINARY)
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "application/x-safetensors"
        loaded = safetensors.torch.load(answer.content)
        for number, picture in enumerate(pictures):
            expected = (await client.encode(picture)).to_numpy()
            assert np.array_equal(loaded[str(number)].numpy(), expected)
        length = int.from_bytes(answer.content[:8], "little")
        told = json.loads(answer.content[8 : 8 + length])["__metadata__"]
        first = json.loads(told["0"])
        again = await http.post("/v1/image_embeddings", content=answer.content, headers=UPLOAD)
        assert again.status_code == 200, again.text
        # The identity travelled along and was checked, so the content is the same: so is its name.
        assert [one["reference"] for one in again.json()["data"]] == [
            first["reference"],
            json.loads(told["1"])["reference"],
        ]


async def test_an_uploaded_tensor_is_held_and_its_identity_is_not_invented(tiny: Three) -> None:
    picture = fresh()
    async with tiny.http() as http, tiny.client() as client:
        rows = torch.from_numpy(np.array((await client.encode(picture)).to_numpy()))
        for kind in (torch.float32, torch.float16, torch.bfloat16):
            body = safetensors.torch.save({"mine": rows.to(kind)})
            answer = await http.post("/v1/image_embeddings", content=body, headers=UPLOAD)
            assert answer.status_code == 200, answer.text
            [told] = answer.json()["data"]
            assert told["identity"] is None
            assert told["dtype"] == str(kind).removeprefix("torch.")
            by_ref = await answered(http, tiny, ref_part(told["reference"]))
            if kind is torch.float32:
                assert said(by_ref) == said(await answered(http, tiny, url_part(picture)))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda rows: rows[:, :-1].contiguous(), "shape must be"),
        (lambda rows: rows.to(torch.int8), "element type is I8"),
        (lambda rows: torch.full_like(rows, float("nan")), "Row 0"),
        (lambda rows: rows[:3].contiguous(), "rows"),
    ],
)
async def test_an_upload_that_breaks_the_contract_is_refused_by_its_name(
    tiny: Three, change: Any, told: str
) -> None:
    async with tiny.http() as http, tiny.client() as client:
        rows = torch.from_numpy(np.array((await client.encode(noise(7))).to_numpy()))
        body = safetensors.torch.save({"mine": change(rows)})
        answer = await http.post("/v1/image_embeddings", content=body, headers=UPLOAD)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "invalid_image_embeds"), error
        assert told in error["message"]


async def test_a_wrong_identity_in_an_upload_is_a_mismatch(tiny: Three) -> None:
    async with tiny.http() as http:
        body = {"input": [url_part(noise(8))]}
        answer = await http.post("/v1/image_embeddings", json=body, headers=BINARY)
        length = int.from_bytes(answer.content[:8], "little")
        digest = json.loads(json.loads(answer.content[8 : 8 + length])["__metadata__"]["0"])
        digest = digest["identity"]["weights_digest"]
        other = answer.content.replace(digest.encode(), bytes(reversed(digest.encode())))
        told = await http.post("/v1/image_embeddings", content=other, headers=UPLOAD)
        refused(told, 400, "encoder_mismatch", "0")


async def test_an_unknown_reference_says_to_send_the_data_again(tiny: Three) -> None:
    unknown = "emb_" + secrets.token_urlsafe(32)
    async with tiny.http() as http:
        ask = {"type": "text", "text": "which?"}
        body = chat(tiny, ask, ref_part(unknown))
        told = await http.post("/v1/chat/completions", json=body)
        param = "messages[0].content[1].image_embeds.ref"
        assert "Send the data again" in refused(told, 400, "embedding_not_found", param)
        streamed = await http.post("/v1/chat/completions", json=body | {"stream": True})
        refused(streamed, 400, "embedding_not_found", param)
    async with tiny.client() as client:
        with pytest.raises(ChiasmError) as failure:
            await client.generate([user("which?", Reference(unknown))], SHORT)
        assert failure.value.reason is Reason.EMBEDDING_NOT_FOUND
        assert failure.value.field == "messages[0].parts[1].reference"


async def test_another_tenant_is_told_what_an_unknown_reference_is_told(tiny: Three) -> None:
    picture = fresh()
    async with tiny.client(tenant="a") as ours, tiny.client(tenant="b") as theirs:
        reference = await ours.hold(picture)
        unknown = Reference("emb_" + secrets.token_urlsafe(32))
        told = []
        for one in (reference, unknown):
            with pytest.raises(ChiasmError) as failure:
                await theirs.generate([user(one)], SHORT)
            told.append((failure.value.reason, failure.value.message, failure.value.field))
        assert told[0] == told[1]
        named = Named("mine", picture)
        await ours.generate([user(named)], SHORT)
        with pytest.raises(ChiasmError) as failure:
            await theirs.generate([user(Named("mine"))], SHORT)
        assert failure.value.reason is Reason.EMBEDDING_NOT_FOUND
        # The same name with another picture is nobody's business in another tenant.
        await theirs.generate([user(Named("mine", fresh()))], SHORT)


async def test_a_reference_serves_many_turns_and_the_source_is_told(tiny: Three) -> None:
    picture = fresh()
    async with tiny.client() as client:
        reference = await client.hold(picture, return_features=True)
        encoded = await client.encode(picture)
        assert reference.features is not None
        assert bytes(reference.features.data) == bytes(encoded.features.data)
        first = await client.generate([user(reference, WHAT)], SHORT)
        assert sources(first) == ["reference"]
        assert first.image_paths[0].identity_checked
        turns = [user(reference, WHAT), assistant(first.text or "so"), user("and?", picture)]
        second = await client.generate(turns, SHORT)
        assert sources(second) == ["reference", "cache"]
        assert second.usage.cached_token_count > 0
        raw = [user(picture, WHAT), assistant(first.text or "so"), user("and?", encoded)]
        assert exact(await client.generate(raw, SHORT)) == exact(second)


async def test_the_blocking_client_holds_and_pools_too(tiny: Three) -> None:
    picture = fresh()
    with Client(tiny.llm.target, tiny.encoder.target) as client:
        reference = client.hold(picture)
        whole = client.generate([user(picture)], SHORT)
        assert exact(client.generate([user(reference)], SHORT)) == exact(whole)
        assert np.array_equal(client.pool(reference), client.pool(picture))


async def test_a_uuid_stands_for_its_picture_and_never_for_another(tiny: Three) -> None:
    picture, other = fresh(), fresh()
    uuid = secrets.token_hex(8)
    async with tiny.http() as http:
        raw = await answered(http, tiny, url_part(picture) | {"uuid": uuid})
        for kind in ("image_url", "image_embeds"):
            alone = await answered(http, tiny, {"type": kind, kind: None, "uuid": uuid})
            assert said(alone) == said(raw)
        assert said(await answered(http, tiny, url_part(picture) | {"uuid": uuid})) == said(raw)
        body = chat(tiny, url_part(other) | {"uuid": uuid})
        told = await http.post("/v1/chat/completions", json=body)
        assert "another picture" in refused(
            told, 400, "invalid_value", "messages[0].content[0].uuid"
        )
        unknown = {"type": "image_url", "image_url": None, "uuid": secrets.token_hex(8)}
        told = await http.post("/v1/chat/completions", json=chat(tiny, unknown))
        refused(told, 400, "embedding_not_found", "messages[0].content[0].uuid")


async def test_a_name_keeps_its_picture_in_whatever_form_it_comes(tiny: Three) -> None:
    picture, name = fresh(), secrets.token_hex(8)
    async with tiny.client() as client:
        encoded: Embedding = await client.encode(picture)
        first = await client.generate([user(Named(name, encoded))], SHORT)
        assert exact(await client.generate([user(Named(name))], SHORT)) == exact(first)
        # The picture itself has the rows that the name stands for.
        assert exact(await client.generate([user(Named(name, picture))], SHORT)) == exact(first)
        for other in (fresh(), await client.encode(fresh())):
            with pytest.raises(ChiasmError) as failure:
                await client.generate([user(Named(name, other))], SHORT)
            assert failure.value.reason is Reason.REQUEST_INVALID
            assert failure.value.field == "messages[0].parts[0].alias"
        assert exact(await client.generate([user(Named(name))], SHORT)) == exact(first)


async def test_names_within_one_request_agree_and_stand_for_what_came_beside(tiny: Three) -> None:
    picture, other, name = fresh(), fresh(), secrets.token_hex(8)
    async with tiny.client() as client:
        with pytest.raises(ChiasmError) as failure:
            await client.generate([user(Named(name, picture), Named(name, other))], SHORT)
        assert failure.value.field == "messages[0].parts[1].alias"
        with pytest.raises(ChiasmError) as failure:  # nothing of the refused request is kept
            await client.generate([user(Named(name))], SHORT)
        assert failure.value.reason is Reason.EMBEDDING_NOT_FOUND
        twice = await client.generate([user(Named(name, picture), "and", Named(name))], SHORT)
        raw = await client.generate([user(picture, "and", picture)], SHORT)
        assert exact(twice) == exact(raw)


async def test_the_limit_on_pictures_counts_all_kinds_together(tiny: Three) -> None:
    async with tiny.client() as client:
        limit = (await client.get_model()).max_image_count
        reference, picture = await client.hold(noise(1)), noise(2)
        encoded = await client.encode(noise(3))
        await client.generate([user(Named("n", noise(4)))], SHORT)
        parts: list[Any] = [reference, picture, encoded, Named("n")] * limit
        with pytest.raises(ChiasmError) as failure:
            await client.count_tokens([user(*parts[: limit + 1])])
        assert failure.value.reason is Reason.TOO_MANY_IMAGES
        assert (await client.count_tokens([user(*parts[:limit])])).image_token_count > 0


async def test_vectors_of_both_forms_have_length_one_and_follow_the_picture(tiny: Three) -> None:
    picture, other = fresh(), fresh()
    encoded = base64.b64encode(picture).decode()
    async with tiny.http() as http, tiny.client() as client:
        rows = (await client.encode(picture)).to_numpy().astype(np.float64)
        mean = rows.mean(axis=0)
        expected = mean / np.linalg.norm(mean)
        forms: list[Json] = [
            {"messages": [{"role": "user", "content": [url_part(picture)]}]},
            {"input": [{"image": data_url(picture)}, {"image": data_url(other)}]},
            {"input": [{"image": encoded}]},
            {"input": [url_part(picture)]},
            {"input": data_url(picture)},
        ]
        for form in forms:
            body = {"model": tiny.model, **form}
            answer = await http.post("/v1/embeddings", json=body)
            assert answer.status_code == 200, answer.text
            told = answer.json()
            assert told["object"] == "list"
            first = told["data"][0]
            assert (first["object"], first["index"]) == ("embedding", 0)
            np.testing.assert_allclose(first["embedding"], expected, atol=1e-6)
            assert told["usage"]["total_tokens"] == told["usage"]["prompt_tokens"] > 0
            answer = await http.post("/v1/embeddings", json=body | {"encoding_format": "base64"})
            bits = base64.b64decode(answer.json()["data"][0]["embedding"])
            assert np.frombuffer(bits, "<f4").tolist() == pytest.approx(first["embedding"])
        two = (await http.post("/v1/embeddings", json={"model": tiny.model, **forms[1]})).json()
        assert two["data"][0]["embedding"] != two["data"][1]["embedding"]


REFUSED: dict[str, tuple[str, Json, str, str]] = {
    "text": ("embeddings", {"input": "a text"}, "unsupported_parameter", "input"),
    "texts": ("embeddings", {"input": ["a", "b"]}, "unsupported_parameter", "input[0]"),
    "chat with text": (
        "embeddings",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]},
        "unsupported_parameter",
        "messages[0].content[0]",
    ),
    "no input": ("embeddings", {}, "missing_required_parameter", "input"),
    "empty": ("image_embeddings", {"input": []}, "empty_array", "input"),
    "both": (
        "image_embeddings",
        {"input": [url_part(b"x")], "images": [url_part(b"x")]},
        "missing_required_parameter",
        "input",
    ),
    "no picture": (
        "image_embeddings",
        {"input": [url_part(noise(1)), url_part(b"Hello World")]},
        "image_parse_error",
        "input[1].image_url.url",
    ),
    "bare text": (
        "embeddings",
        {"input": [{"image": base64.b64encode(b"Hello World").decode()}]},
        "image_parse_error",
        "input[0].image",
    ),
    "address": (
        "image_embeddings",
        {"images": ["http://127.0.0.1:9/x.png"]},
        "invalid_image_url",
        "images[0]",
    ),
    "part type": (
        "image_embeddings",
        {"input": [{"type": "nothing"}]},
        "invalid_value",
        "input[0].type",
    ),
    "text part": (
        "image_embeddings",
        {"input": [{"type": "text", "text": "hi"}]},
        "invalid_value",
        "input[0]",
    ),
    "format": (
        "image_embeddings",
        {"input": [url_part(noise(1))], "encoding_format": "hex"},
        "invalid_value",
        "encoding_format",
    ),
    "rounded": (
        "image_embeddings",
        {"input": [url_part(noise(1))], "encoding_format": "base64", "dtype": "float16"},
        "unsupported_parameter",
        "dtype",
    ),
    "dimensions": (
        "embeddings",
        {"input": [url_part(noise(1))], "dimensions": 3},
        "unsupported_parameter",
        "dimensions",
    ),
    "too many": (
        "image_embeddings",
        {"input": [url_part(noise(1))] * 17},
        "too_many_images",
        "input",
    ),
}


@pytest.mark.parametrize(("route", "body", "code", "param"), REFUSED.values(), ids=REFUSED.keys())
async def test_what_is_refused_is_told_by_its_path(
    tiny: Three, route: str, body: Json, code: str, param: str
) -> None:
    async with tiny.http() as http:
        told = await http.post(f"/v1/{route}", json={"model": tiny.model, **body})
        refused(told, 400, code, param)
        assert (await http.get("/ready")).status_code == 200


async def test_an_unknown_model_is_a_404_on_both_routes(tiny: Three) -> None:
    async with tiny.http() as http:
        for route in ("image_embeddings", "embeddings"):
            body = {"model": "nope", "input": [url_part(noise(1))]}
            told = await http.post(f"/v1/{route}", json=body)
            refused(told, 404, "model_not_found", "model")


async def test_the_model_says_what_it_takes(tiny: Three) -> None:
    async with tiny.client() as client:
        model = await client.get_model()
    assert model.family_title
    assert (model.needs_grid_thw, model.needs_image_size) == (False, False)
    assert model.layers == "paged"
    assert model.reference_seconds == 3600
