"""Which blocks have equal keys: those of equal histories, and no others."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_service.engine.block_keys import BlockKeys

SIZE = 4


@dataclass(frozen=True)
class _Image:
    start: int
    length: int
    digest: bytes


@dataclass(frozen=True)
class _Case:
    token_ids: tuple[int, ...]
    images: tuple[_Image, ...] = ()
    salt: bytes = b""

    def all_keys(self) -> list[bytes | None]:
        keys = BlockKeys(self.token_ids, self.images, self.salt, SIZE)
        return [keys.key(index) for index in range(len(self.token_ids) // SIZE)]

    def truths(self) -> list[object]:
        """What each block must be told apart by: all content up to its end; None: by nothing."""
        rows = [self._row(place) for place in range(len(self.token_ids))]
        ends = range(SIZE, len(rows) + 1, SIZE)
        return [None if b"" in dict(rows[:end]) else (self.salt, *rows[:end]) for end in ends]

    def _row(self, place: int) -> tuple[bytes | None, int]:
        for image in self.images:
            if image.start <= place < image.start + image.length:
                return image.digest, 1000 * (place - image.start) + self.token_ids[place]
        return None, self.token_ids[place]


@st.composite
def _cases(draw: st.DrawFn) -> _Case:
    tokens = draw(st.lists(st.integers(0, 1), max_size=14))
    images = []
    start = 0
    for _ in range(draw(st.integers(0, 2))):
        start += draw(st.integers(0, 3))
        length = draw(st.integers(1, 6))
        if start + length <= len(tokens):
            images.append(_Image(start, length, draw(st.sampled_from([b"", b"x", b"y", b"xy"]))))
        start += length
    return _Case(tuple(tokens), tuple(images), draw(st.sampled_from([b"", b"s"])))


@st.composite
def _variants(draw: st.DrawFn, case: _Case) -> _Case:
    """The case with one thing changed, or with none."""
    kind = draw(st.sampled_from(["none", "salt", "token", "digest", "start", "length"]))
    if kind == "salt":
        return replace(case, salt=b"other")
    if kind == "token" and case.token_ids:
        place = draw(st.integers(0, len(case.token_ids) - 1))
        changed = (*case.token_ids[:place], 2, *case.token_ids[place + 1 :])
        return replace(case, token_ids=changed)
    if kind not in {"none", "salt", "token"} and case.images:
        first, *rest = case.images
        changed_image = {
            "digest": replace(first, digest=b"z"),
            "start": _Image(first.start + 1, first.length - 1, first.digest),
            "length": replace(first, length=first.length - 1),
        }[kind]
        return replace(case, images=(changed_image, *rest) if changed_image.length else (*rest,))
    return case


@st.composite
def _families(draw: st.DrawFn) -> list[_Case]:
    case = draw(_cases())
    return [case, draw(_cases()), *draw(st.lists(_variants(case), min_size=1, max_size=4))]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(_families())
def test_keys_are_equal_exactly_where_all_before_and_in_the_block_is(cases: list[_Case]) -> None:
    pairs = [
        (truth, key)
        for case in cases
        for truth, key in zip(case.truths(), case.all_keys(), strict=True)
    ]
    assert all((truth is None) == (key is None) for truth, key in pairs)
    named = {pair for pair in pairs if pair[0] is not None}
    assert len({truth for truth, _ in named}) == len({key for _, key in named}) == len(named)


def test_keys_follow_a_growing_answer_and_equal_those_of_the_whole() -> None:
    image = _Image(2, 7, b"picture")
    tokens = [1, 2, *[9] * 7, 3]
    keys = BlockKeys(tokens, (image,), b"tenant", SIZE)
    early = [keys.key(0), keys.key(1)]
    with pytest.raises(IndexError, match="block 2 ends at token 12 of 10"):
        keys.key(2)
    tokens += [4, 5, 6]
    assert [*early, keys.key(2)] == _Case(tuple(tokens), (image,), b"tenant").all_keys()


def test_the_last_block_may_be_asked_for_first() -> None:
    case = _Case(tuple(range(12)), (_Image(3, 6, b"p"),))
    keys = BlockKeys(case.token_ids, case.images, case.salt, SIZE)
    assert [keys.key(2), keys.key(0)] == [case.all_keys()[2], case.all_keys()[0]]


def test_a_key_is_a_whole_digest() -> None:
    assert [len(key or b"") for key in _Case(tuple(range(8))).all_keys()] == [32, 32]


def test_an_image_without_a_digest_takes_the_key_of_its_block_and_of_all_behind() -> None:
    case = _Case(tuple(range(20)), (_Image(1, 3, b"known"), _Image(9, 2, b""), _Image(12, 3, b"k")))
    first, second, *rest = case.all_keys()
    assert None not in (first, second)
    assert rest == [None] * 3


def test_another_picture_place_or_salt_changes_the_key() -> None:
    image = _Image(1, 6, b"red")
    case = _Case((7, *[9] * 6, 8), (image,), b"tenant")
    others = [
        replace(case, images=(replace(image, digest=b"blue"),)),
        replace(case, images=(replace(image, length=5),)),
        replace(case, images=(replace(image, start=2, length=5),)),
        replace(case, images=(_Image(1, 3, b"red"), _Image(4, 3, b"red"))),
        replace(case, images=()),
        replace(case, salt=b"tenant2"),
        replace(case, salt=b""),
    ]
    assert len({one.all_keys()[-1] for one in [case, *others]}) == len(others) + 1
