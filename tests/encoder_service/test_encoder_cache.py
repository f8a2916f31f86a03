"""One computation a picture, kept within a bound, and never across tenants."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry

from chiasm.embedding_cache import EmbeddingCache, embedding_key
from chiasm.models.contract import PixelOptions
from chiasm.models.vision import ImageFeatures, VisionHalf
from chiasm.v1 import encoder_service_pb2 as pb
from chiasm.v1 import image_pb2
from encoder_service.app import kept_features
from encoder_service.metrics import EncoderMetrics
from tests.encoder_service.calls import picture, rows_of, serving, settings_for
from tests.encoder_service.gated_tower import GatedTower

Kept = EmbeddingCache[ImageFeatures]


async def test_sixty_four_calls_for_eight_pictures_compute_eight(
    checkpoint: Path, half: VisionHalf
) -> None:
    tower = GatedTower(half)
    pictures = [picture(seed) for seed in range(8)]
    async with serving(settings_for(checkpoint), tower) as service:
        with tower.held():
            calls = [asyncio.create_task(service.encode(pictures[n % 8])) for n in range(64)]
            await service.until_active(64)
            tower.release()
            replies = await asyncio.gather(*calls)
        assert tower.encoded_images == 8
        assert service.figure("cache_lookups_total", result="miss") == 8
        assert service.figure("cache_lookups_total", result="shared") == 56
        assert (await service.load()).active_call_count == 0
    sources = [reply.message.source for reply in replies]
    assert sources.count(pb.ENCODE_SOURCE_COMPUTED) == 8
    assert sources.count(pb.ENCODE_SOURCE_SHARED) == 56
    for n, reply in enumerate(replies):
        assert torch.equal(rows_of(reply), rows_of(replies[n % 8]))


async def test_tenants_and_options_never_share_an_entry(checkpoint: Path) -> None:
    data, high = picture(1), image_pb2.ImageOptions(detail=image_pb2.IMAGE_DETAIL_HIGH)
    auto = image_pb2.ImageOptions(detail=image_pb2.IMAGE_DETAIL_AUTO)
    async with serving(settings_for(checkpoint)) as service:

        async def source(**fields: Any) -> int:
            return (await service.encode(data, **fields)).message.source

        assert await source() == pb.ENCODE_SOURCE_COMPUTED
        assert await source(options=auto) == pb.ENCODE_SOURCE_CACHE
        assert await source(options=high) == pb.ENCODE_SOURCE_COMPUTED
        assert await source(tenant="a") == pb.ENCODE_SOURCE_COMPUTED
        assert await source(tenant="a") == pb.ENCODE_SOURCE_CACHE
        assert service.figure("cache_lookups_total", result="hit") == 2


async def test_a_kept_answer_is_bit_equal_and_a_cache_of_zero_keeps_nothing(
    checkpoint: Path,
) -> None:
    data = picture(1)
    for capacity, second in ((1 << 20, pb.ENCODE_SOURCE_CACHE), (0, pb.ENCODE_SOURCE_COMPUTED)):
        async with serving(settings_for(checkpoint, cache_bytes=capacity)) as service:
            first, again = await service.encode(data), await service.encode(data)
            assert again.message.source == second
            assert torch.equal(rows_of(first), rows_of(again))


async def test_the_cache_of_a_service_stays_within_its_bytes(checkpoint: Path) -> None:
    # An entry is 4 rows of 64 float32 and some overhead.
    async with serving(settings_for(checkpoint, cache_bytes=10_000)) as service:
        for seed in range(9):
            await service.encode(picture(seed))
        assert 0 < service.figure("cache_bytes") <= 10_000
        entries = service.figure("cache_entries")
        assert entries + service.figure("cache_evictions_total") == 9
        newest = await service.encode(picture(8))
        oldest = await service.encode(picture(0))
    assert newest.message.source == pb.ENCODE_SOURCE_CACHE
    assert oldest.message.source == pb.ENCODE_SOURCE_COMPUTED


def features(elements: int) -> ImageFeatures:
    return ImageFeatures(torch.zeros(1, elements), (), 1, None, (1, 1))


@pytest.fixture
def small_cache() -> Kept:
    return kept_features(10_000, EncoderMetrics(CollectorRegistry()))


def test_the_least_recently_used_entry_leaves_first(small_cache: Kept) -> None:
    for name in (b"a", b"b", b"c"):
        small_cache.put(name, features(100))
    assert small_cache.get(b"a") is not None
    small_cache.put(b"d", features(1000))
    assert [bool(small_cache.get(name)) for name in (b"a", b"b", b"c", b"d")] == [
        True, False, False, True,
    ]  # fmt: skip


def test_an_entry_larger_than_the_cache_evicts_nobody(small_cache: Kept) -> None:
    small_cache.put(b"a", features(100))
    small_cache.put(b"b", features(10_000))
    assert small_cache.get(b"a") is not None
    assert small_cache.get(b"b") is None


def test_an_entry_put_twice_counts_once(small_cache: Kept) -> None:
    small_cache.put(b"a", features(100))
    once = small_cache.byte_count
    small_cache.put(b"a", features(100))
    assert small_cache.byte_count == once


def test_every_field_of_a_key_counts_and_no_two_run_together(half: VisionHalf) -> None:
    options = PixelOptions("auto", None, None)
    base = ("t", half.identity, b"\0" * 32, 5, options)
    other_identity = replace(half.identity, weights_digest="0" * 64)
    black = replace(half.identity, background="#000000")
    keys = {
        embedding_key(*base),
        embedding_key("", *base[1:]),
        embedding_key("t", other_identity, *base[2:]),
        embedding_key("t", black, *base[2:]),
        embedding_key("t", half.identity, b"\1" * 32, 5, options),
        embedding_key("t", half.identity, b"\0" * 32, 6, options),
        embedding_key(*base[:4], PixelOptions("low", None, None)),
        embedding_key(*base[:4], PixelOptions("auto", 7, None)),
        embedding_key(*base[:4], PixelOptions("auto", None, 7)),
        embedding_key(
            "t'" + half.identity.model_id, replace(half.identity, model_id=""), *base[2:]
        ),
    }
    assert len(keys) == 10
    assert {len(key) for key in keys} == {32}
    assert embedding_key(*base) in keys
