"""A running service: what it holds, for whom, for how long, and of which families."""

import asyncio
import secrets
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from chiasm.conversation import Embedding, Message, Named, Reference, Sampling, user
from chiasm.errors import ChiasmError, Reason
from chiasm.v1 import encoder_service_pb2, image_pb2
from llm_service.picture_methods import pooled
from llm_service.settings import LlmSettings
from tests.families.zoo import BUILDERS
from tests.llm_service.conftest import Serve
from tests.llm_service.holding.store_server import needs_server, store_server

SHORT = Sampling(temperature=0, max_tokens=6, top_logprobs=2)


def exact(answer: Any) -> Any:
    told = answer.choices[0].logprobs
    return answer.token_ids, [[(one.token_id, one.logprob) for one in at.top] for at in told]


def sent_again(reference: Reference) -> Embedding:
    """What a caller makes of the features that were sent back."""
    assert reference.features is not None
    assert reference.message is not None
    timings = encoder_service_pb2.EncodeTimings()
    return Embedding(
        reference.features, reference.message, "", "", timings, levels=reference.levels
    )


async def refused(client: Any, turns: list[Message]) -> ChiasmError:
    with pytest.raises(ChiasmError) as failure:
        await client.generate(turns, SHORT)
    return failure.value


async def test_a_reference_expires_and_the_answer_says_what_to_do(
    serve: Serve, pictures: list[bytes]
) -> None:
    async with serve(reference_seconds=0.5) as (_, client):
        reference = await client.hold(pictures[0])
        await client.generate([user(Named("cat", pictures[1]))], SHORT)
        await asyncio.sleep(0.6)
        told = await refused(client, [user(reference)])
        assert (told.reason, told.field) == (
            Reason.EMBEDDING_NOT_FOUND,
            "messages[0].parts[0].reference",
        )
        assert "expired" in told.message
        assert "Send the data again" in told.message
        # A name that has expired may name another picture.
        await client.generate([user(Named("cat", pictures[2]))], SHORT)


async def test_references_leave_for_room_and_a_service_without_room_says_so(
    serve: Serve, pictures: list[bytes]
) -> None:
    async with serve(reference_bytes=0) as (_, client):
        with pytest.raises(ChiasmError) as failure:
            await client.hold(pictures[0])
        assert failure.value.reason is Reason.TENSOR_TOO_LARGE
        # A name needs room too, but the answer does not.
        named = await client.generate([user(Named("cat", pictures[0]))], SHORT)
        assert exact(named) == exact(await client.generate([user(pictures[0])], SHORT))


async def test_a_service_without_a_tower_holds_embeddings_and_answers_by_reference(
    serve: Serve, pictures: list[bytes]
) -> None:
    async with serve() as (_, client):
        kept = sent_again(await client.hold(pictures[0], return_features=True))
        expected = exact(await client.generate([user(pictures[0], "so?")], SHORT))
    async with serve(vision="none") as (_, client):
        reference = await client.hold(kept)
        answer = await client.generate([user(reference, "so?")], SHORT)
        assert exact(answer) == expected
        assert answer.image_paths[0].identity_checked
        with pytest.raises(ChiasmError) as failure:
            await client.hold(pictures[0])
        assert (failure.value.reason, failure.value.field) == (Reason.UNSUPPORTED, "part.image")


async def test_rows_of_unknown_origin_stay_so_under_a_reference(
    serve: Serve, pictures: list[bytes]
) -> None:
    async with serve() as (_, client):
        kept = await client.hold(pictures[0], return_features=True)
        assert kept.features is not None
        own = await client.hold(kept.features.to_float32())
        assert own.id != kept.id
        answer = await client.generate([user(own, kept)], SHORT)
        assert [path.identity_checked for path in answer.image_paths] == [False, True]


@pytest.mark.parametrize(
    ("part", "field"),
    [
        ("text", "part.text"),
        (np.zeros((3, 5), np.float32), "part.embedding.features.shape"),
        (b"no picture", "part.image.data"),
        (Reference("emb_" + secrets.token_urlsafe(32)), "part.reference"),
        (Reference("e" * 500), "part.reference"),
        (Named("unknown"), "part.alias"),
        (Named("n" * 257, np.zeros((3, 5), np.float32)), "part.alias"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_what_cannot_be_held_is_told_by_its_field(
    serve: Serve, part: Any, field: str
) -> None:
    async with serve() as (_, client):
        for method in (client.hold, client.pool):
            with pytest.raises(ChiasmError) as failure:
                await method(part)
            assert failure.value.field == field


async def test_a_refused_embedding_leaves_its_name_free(
    serve: Serve, pictures: list[bytes]
) -> None:
    async with serve() as (_, client):
        kept = await client.hold(pictures[0], return_features=True)
        assert kept.features is not None
        bad = kept.features.to_float32().copy()
        bad[1, 2] = np.nan
        told = await refused(client, [user(Named("cat", bad))])
        assert told.field == "messages[0].parts[0].embedding.features.data"
        assert (await refused(client, [user(Named("cat"))])).reason is Reason.EMBEDDING_NOT_FOUND
        await client.generate([user(Named("cat", pictures[1]))], SHORT)


@needs_server
async def test_two_nodes_before_one_store_answer_alike_and_outlive_it(
    serve: Serve, pictures: list[bytes], tmp_path: Path
) -> None:
    with store_server(tmp_path) as server:
        shared: dict[str, Any] = {
            "reference_store": server.url,
            "reference_store_timeout_seconds": 0.3,
        }
        async with serve(**shared) as (_, one), serve(**shared) as (_, two):
            reference = await one.hold(pictures[0])
            await one.generate([user(Named("cat", pictures[1]))], SHORT)
            expected = exact(await one.generate([user(reference, Named("cat"))], SHORT))
            assert exact(await two.generate([user(reference, Named("cat"))], SHORT)) == expected
            told = await refused(two, [user(Named("cat", pictures[2]))])
            assert told.reason is Reason.REQUEST_INVALID
            elsewhere = await one.hold(pictures[3])
            server.kill()
            # What a node holds itself serves on; what it does not is not known, and said to be so.
            assert exact(await two.generate([user(reference, Named("cat"))], SHORT)) == expected
            told = await refused(two, [user(elsewhere)])
            assert (told.reason, told.field) == (
                Reason.NOT_READY,
                "messages[0].parts[0].reference",
            )
            assert told.retry_after
            told = await refused(two, [user(Named("never heard of"))])
            assert (told.reason, told.field) == (Reason.NOT_READY, "messages[0].parts[0].alias")
            later = await two.hold(pictures[3])
            raw = exact(await one.generate([user(pictures[3])], SHORT))
            assert exact(await two.generate([user(later)], SHORT)) == raw


@pytest.mark.parametrize("name", ["qwen3_vl", "llava_next", "qwen2_vl"])
async def test_levels_grids_and_sizes_are_held_and_sent_back_with_the_rows(
    serve: Serve, pictures: list[bytes], tmp_path: Path, name: str
) -> None:
    BUILDERS[name](tmp_path)
    async with serve(model=tmp_path, kv_bytes=64 << 20) as (_, client):
        expected = exact(await client.generate([user(pictures[1], "so?")], SHORT))
        reference = await client.hold(pictures[1], return_features=True)
        assert exact(await client.generate([user(reference, "so?")], SHORT)) == expected
        again = sent_again(reference)
        assert exact(await client.generate([user(again, "so?")], SHORT)) == expected
        assert (await client.hold(again)).id == reference.id
        model = await client.get_model()
        assert len(reference.levels) == model.level_count
        assert reference.message is not None
        assert model.needs_grid_thw == reference.message.HasField("grid_thw")
        bare = image_pb2.ImageEmbedding()
        if model.needs_grid_thw or model.needs_image_size:
            lacking = Embedding(again.features, bare, "", "", again.timings, levels=again.levels)
            assert (await refused(client, [user(lacking)])).reason is Reason.TENSOR_INVALID


def test_a_pooled_vector_is_the_mean_at_length_one_and_zero_stays_zero() -> None:
    rows = torch.tensor([[3.0, 0.0], [3.0, 8.0]])
    torch.testing.assert_close(pooled(rows), torch.tensor([0.6, 0.8], dtype=torch.float64))
    huge = pooled(torch.full((2, 2), 3e38))
    assert torch.isfinite(huge).all()
    assert pooled(torch.zeros(2, 2)).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("url", ["localhost:6379", "http://store", ""])
def test_a_store_that_is_no_address_ends_the_start(url: str) -> None:
    with pytest.raises(ValueError, match="reference_store"):
        LlmSettings(model=Path(), reference_store=url)
