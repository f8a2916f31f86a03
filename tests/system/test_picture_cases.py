"""Pictures and embeddings as users send them, over HTTP and over gRPC to the same services."""

import io
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import PIL.Image
import PIL.ImageOps
import pytest
import torch

from chiasm.conversation import Message, Part, assistant, user
from tests.families.zoo import qwen2_vl
from tests.system.processes import DEMO_MODEL, start_gateway, start_llm
from tests.system.three import Three, noise, three
from tests.system.ways import (
    COLOUR,
    COLOUR_QUESTION,
    DETAILS,
    SEVEN,
    STAR,
    Pixels,
    Way,
    both,
    embedding,
    encoded,
    field,
    plain,
    refused,
    rows_of,
    said,
    saved,
    url,
)

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

CELL = 28  # pixels along a side of what one row stands for in the Qwen2-VL checkpoint
MOST = 60  # its rows for one picture
BLOCK = 16  # tokens of the prefix cache


@pytest.fixture(scope="module")
def grids(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Three]:
    """A family whose pictures take as many rows as their size and the options say."""
    checkpoint = tmp_path_factory.mktemp("checkpoints") / "grids"
    qwen2_vl.build(checkpoint)
    with three(checkpoint) as system:
        yield system


@pytest.fixture(scope="module")
def blind(demo: Three) -> Iterator[Three]:
    """The demo model where no encoder is configured."""
    with start_llm(DEMO_MODEL, "--vision", "none") as llm, start_gateway(llm.port) as gateway:
        yield replace(demo, llm=llm, gateway=gateway)


# Sizes


@both
async def test_a_portrait_stored_sideways_takes_the_grid_of_its_turned_size(
    grids: Three, way: Way
) -> None:
    stored = np.random.default_rng(1).integers(0, 256, (100, 200, 3), np.uint8)
    stored[:, :100] //= 4  # so that the two halves are told apart
    turned = saved(stored, "JPEG", orientation=6)
    opened = PIL.ImageOps.exif_transpose(PIL.Image.open(io.BytesIO(turned)))
    upright, lying = (
        saved(np.asarray(opened)),
        saved(np.asarray(opened.transpose(PIL.Image.Transpose.ROTATE_90))),
    )
    one, other = await encoded(grids, turned), await encoded(grids, upright)
    assert one.message.grid_thw == other.message.grid_thw
    assert one.message.grid_thw.height > one.message.grid_thw.width
    assert bytes(one.features.data) == bytes(other.features.data)
    answers = [await said(grids, way, [user(file, "?")]) for file in (turned, upright, lying)]
    assert answers[0].text == answers[1].text != answers[2].text
    assert answers[0].per_picture == (one.placeholder_count,)
    assert answers[0].prompt_tokens == answers[1].prompt_tokens


SMALL = [(26, 28), (332, 27), (1, 1), (2, 2), (1, 100), (100, 1)]


@both
@pytest.mark.parametrize("size", SMALL)
async def test_a_picture_smaller_than_a_patch_is_enlarged_and_takes_tokens(
    grids: Three, demo: Three, way: Way, size: tuple[int, int]
) -> None:
    for system in (grids, demo):
        answer = await said(system, way, [user(plain(*size), COLOUR_QUESTION)])
        assert answer.image_tokens == sum(answer.per_picture) >= 1
        assert answer.per_picture == ((await encoded(system, plain(*size))).placeholder_count,)


@both
async def test_a_picture_too_thin_to_scale_is_refused_by_its_place(grids: Three, way: Way) -> None:
    told = await refused(grids, way, [user(plain(201, 1), "?")])
    assert "1 x 201" in told.message
    assert told.code == ("image_too_small" if way == "http" else "IMAGE_INVALID")
    assert told.place is not None
    assert told.place.startswith(url("image_url") if way == "http" else field("image"))


@both
async def test_a_photo_of_20_megapixels_is_scaled_to_the_most_rows(grids: Three, way: Way) -> None:
    ramp = np.linspace(0, 255, 5000).astype(np.uint8)
    photo = saved(np.broadcast_to(ramp[None, :, None], (4000, 5000, 3)).copy(), "JPEG")
    answer = await said(grids, way, [user(photo, "?")])
    assert MOST // 2 < answer.image_tokens <= MOST
    bare = await said(grids, way, [user("?")])
    beside = answer.prompt_tokens - answer.image_tokens - bare.prompt_tokens
    assert beside == 2  # the marks before and after a picture


# Options


@both
async def test_each_detail_is_served_and_low_takes_fewer_rows_than_high(
    grids: Three, way: Way
) -> None:
    turns = [user(noise(4, 224), "?")]
    rows = {one: (await said(grids, way, turns, Pixels(one))).image_tokens for one in DETAILS}
    assert 1 <= rows["low"] <= MOST // 4 < rows["high"] <= rows["original"] <= MOST
    assert rows["low"] < rows["auto"] == (await said(grids, way, turns)).image_tokens


@both
async def test_where_the_resolution_is_fixed_every_detail_is_served_alike(
    demo: Three, way: Way
) -> None:
    turns = [user(STAR, COLOUR_QUESTION)]
    for detail in DETAILS:
        answer = await said(demo, way, turns, Pixels(detail), length=None)
        assert (answer.text, answer.image_tokens) == (COLOUR[STAR], 16)


@both
async def test_an_unknown_detail_is_refused_by_its_place(
    grids: Three, demo: Three, way: Way
) -> None:
    for system in (grids, demo):
        told = await refused(system, way, [user(STAR, "?")], Pixels("medium"))
        place = url("image_url.detail") if way == "http" else field("image.options.detail")
        assert told.place == place
        assert "original" in told.message


@both
async def test_bounds_of_pixels_bound_the_rows_of_every_picture(grids: Three, way: Way) -> None:
    small, large = noise(5, 2 * CELL), noise(6, 8 * CELL)
    turns = [user(small, "and", large, "?")]
    assert (await said(grids, way, turns)).per_picture == (4, 49)
    fewer = await said(grids, way, turns, Pixels(most=9 * CELL**2))
    assert fewer.per_picture == (4, 9)
    more = await said(grids, way, turns, Pixels(least=16 * CELL**2))
    assert more.per_picture == (16, 49)
    most = await said(grids, way, turns, Pixels("low", 25 * CELL**2, 25 * CELL**2))
    assert most.per_picture == (25, 25)


@both
@pytest.mark.parametrize("name", ["min_pixels", "max_pixels"])
async def test_bounds_that_cannot_be_kept_to_are_refused_by_name(
    grids: Three, demo: Three, way: Way, name: str
) -> None:
    beyond = 61 * CELL**2  # more than the checkpoint has, and nothing that the demo model takes
    pixels = Pixels(least=beyond) if name == "min_pixels" else Pixels(most=beyond)
    place = f"mm_processor_kwargs.{name}" if way == "http" else field(f"image.options.{name}")
    for system in (grids, demo):
        assert (await refused(system, way, [user(STAR, "?")], pixels)).place == place


@both
async def test_equal_bytes_of_another_detail_are_not_taken_from_the_cache(
    grids: Three, way: Way
) -> None:
    turns = [user(noise(8 if way == "http" else 9, 224), "?")]
    first = {one: await said(grids, way, turns, Pixels(one)) for one in ("low", "high")}
    again = {one: await said(grids, way, turns, Pixels(one)) for one in ("low", "high")}
    assert [answer.sources for answer in first.values()] == [("remote",), ("remote",)]
    assert [answer.sources for answer in again.values()] == [("cache",), ("cache",)]
    for detail, answer in again.items():
        assert answer.image_tokens == first[detail].image_tokens
        assert answer.text == first[detail].text
    assert first["low"].image_tokens < first["high"].image_tokens


# Order and identity


@both
async def test_pictures_stand_in_the_prompt_where_they_stand_in_the_message(
    grids: Three, way: Way
) -> None:
    red, blue = plain(56, 56, (255, 0, 0)), plain(56, 56, (0, 0, 255))
    orders: list[tuple[Part, ...]] = [
        ("A", red, "B", blue),
        ("A", blue, "B", red),
        (red, blue, "A", "B"),
        ("A", "B", red, blue),
    ]
    answers = [await said(grids, way, [user(*order)], length=32) for order in orders]
    assert len({answer.text for answer in answers}) == len(orders)
    assert {answer.per_picture for answer in answers} == {(4, 4)}


@both
async def test_the_answer_to_the_same_question_follows_the_picture(demo: Three, way: Way) -> None:
    for picture in (STAR, SEVEN, STAR):
        answer = await said(demo, way, [user(picture, COLOUR_QUESTION)], length=None)
        assert answer.text == COLOUR[picture]
    assert not torch.equal(await rows_of(demo, STAR), await rows_of(demo, SEVEN))


@both
async def test_a_picture_where_no_encoder_is_configured_is_refused_by_its_place(
    demo: Three, blind: Three, way: Way
) -> None:
    told = await refused(blind, way, [user(STAR, COLOUR_QUESTION)])
    expected = {
        "http": ("unsupported_parameter", "messages[0].content[0]"),
        "grpc": ("UNSUPPORTED", field("image")),
    }
    assert (told.code, told.place) == expected[way]
    turns = [user(await encoded(demo, STAR), COLOUR_QUESTION)]
    assert (await said(blind, way, turns, length=None)).text == COLOUR[STAR]


# Embeddings


@both
async def test_rows_with_and_without_a_batch_axis_are_equal_and_other_shapes_are_named(
    demo: Three, way: Way
) -> None:
    rows = await rows_of(demo, STAR)
    count, width = rows.shape
    for shape in ((count, width), (1, count, width)):
        turns = [user(embedding(rows.reshape(shape)), COLOUR_QUESTION)]
        assert (await said(demo, way, turns, length=None)).text == COLOUR[STAR]
    for wrong in (rows.reshape(count, 1, width), rows[0]):
        told = await refused(demo, way, [user(embedding(wrong), COLOUR_QUESTION)])
        assert str(list(wrong.shape)) in told.message
        assert str(width) in told.message.replace(str(list(wrong.shape)), "")


@both
async def test_embeddings_of_several_lengths_and_turns_answer_as_their_pictures(
    grids: Three, way: Way
) -> None:
    pictures = [noise(seed, side * CELL) for seed, side in ((21, 2), (22, 3), (23, 2))]

    def turns(parts: Sequence[Part]) -> list[Message]:
        return [user("See", *parts[:2], "?"), assistant("ok"), user(parts[2], "and this?")]

    parts = [await encoded(grids, picture) for picture in pictures]
    raw, sent = await said(grids, way, turns(pictures)), await said(grids, way, turns(parts))
    assert raw.per_picture == sent.per_picture == (4, 9, 4)
    assert (sent.text, sent.prompt_tokens) == (raw.text, raw.prompt_tokens)
    assert sent.sources == ("caller",) * 3
    swapped = await said(grids, way, turns([parts[2], parts[1], parts[0]]))
    assert swapped.text != raw.text


@both
async def test_each_float_type_of_one_embedding_gives_its_answer_and_integers_are_refused(
    demo: Three, way: Way
) -> None:
    for picture in (STAR, SEVEN):
        rows = await rows_of(demo, picture)
        for kind in (torch.float32, torch.float16, torch.bfloat16):
            turns = [user(embedding(rows.to(kind)), COLOUR_QUESTION)]
            assert (await said(demo, way, turns, length=None)).text == COLOUR[picture]
    whole = embedding(rows.to(torch.int64))
    told = await refused(demo, way, [user(whole, COLOUR_QUESTION)])
    assert all(name in told.message for name in ("int64", "float32", "float16", "bfloat16"))


@both
async def test_the_same_embedding_again_and_then_a_longer_prompt_finds_more_in_the_cache(
    grids: Three, way: Way
) -> None:
    part = await encoded(grids, noise(31 if way == "http" else 32, 5 * CELL))
    turns = [user(part, "What is to be seen in this picture, if anything?")]
    first, again = await said(grids, way, turns), await said(grids, way, turns)
    longer = [*turns, assistant(first.text), user("And what stands beside it, to the left?")]
    further, last = await said(grids, way, longer), await said(grids, way, longer)
    assert first.text == again.text
    assert further.text == last.text
    assert first.cached_tokens == 0
    assert again.cached_tokens == (first.prompt_tokens - 1) // BLOCK * BLOCK
    assert 0 < again.cached_tokens <= further.cached_tokens < last.cached_tokens
