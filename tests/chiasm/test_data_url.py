import base64
import time
import tracemalloc
from urllib.parse import quote_from_bytes

import numpy as np
import pytest

from chiasm.data_url import DataUrl, DataUrlError, parse_data_url

LIMIT = 2**20
PNG_START = b"\x89PNG\r\n\x1a\n\xfb\xef\xff\xfe\x00\x10"  # its base64 holds '+', '/' and '='
PLAIN = base64.b64encode(PNG_START + b"\x01").decode()


def refuse(url: str, limit: int = LIMIT) -> DataUrlError:
    with pytest.raises(DataUrlError) as caught:
        parse_data_url(url, limit)
    assert caught.value.message == str(caught.value)
    return caught.value


def test_base64_and_percent_forms_give_the_same_bytes() -> None:
    data = bytes(range(256))
    packed = base64.b64encode(data).decode()
    expected = DataUrl("image/png", data)
    assert parse_data_url(f"data:image/png;base64,{packed}", LIMIT) == expected
    assert parse_data_url(f"data:image/png,{quote_from_bytes(data)}", LIMIT) == expected


@pytest.mark.parametrize(
    ("head", "media_type"),
    [
        ("data:image/vnd.microsoft.icon;base64", "image/vnd.microsoft.icon"),
        ("data:image/x-icon;base64", "image/x-icon"),
        ("data:image/svg+xml;base64", "image/svg+xml"),
        ("data:image/png;charset=utf-8;name=a%2Cb;base64", "image/png"),
        ("data:image/png; BASE64", "image/png"),
        ("DATA:Image/PNG;Base64", "image/png"),
        ("data:;base64", "text/plain"),
        ("  data:image/jpg;base64", "image/jpg"),
    ],
)
def test_head_follows_the_rfc_2397_grammar(head: str, media_type: str) -> None:
    assert parse_data_url(f"{head},{PLAIN}", LIMIT) == DataUrl(media_type, PNG_START + b"\x01")


def test_only_the_first_comma_splits() -> None:
    assert parse_data_url("data:,a,b,,c", LIMIT) == DataUrl("text/plain", b"a,b,,c")


LONG = np.random.default_rng(5).integers(0, 256, 1000, dtype=np.uint8).tobytes()
LONG_64 = base64.b64encode(LONG).decode()


@pytest.mark.parametrize(
    "payload",
    [
        LONG_64.rstrip("="),
        "\r\n".join(LONG_64[at : at + 76] for at in range(0, len(LONG_64), 76)),
        "\t" + LONG_64 + " \n",
        LONG_64.replace("+", "-").replace("/", "_"),
        LONG_64.replace("+", "-").replace("/", "_").rstrip("="),
        LONG_64.replace("+", "%2B").replace("/", "%2f").replace("=", "%3D"),
        "".join(f"%{ord(letter):02x}" for letter in LONG_64),
        "%0D%0A".join(LONG_64[at : at + 76] for at in range(0, len(LONG_64), 76)),
    ],
    ids=[
        "unpadded",
        "wrapped",
        "blanks",
        "url_safe",
        "url_safe_unpadded",
        "escaped",
        "all_escaped",
        "escaped_line_breaks",
    ],
)
def test_untidy_base64_is_read_as_the_tidy_form(payload: str) -> None:
    assert "+" in LONG_64 and "/" in LONG_64 and LONG_64.endswith("==")
    assert parse_data_url(f"data:image/png;base64,{payload}", len(LONG)).data == LONG


@pytest.mark.parametrize(
    "payload",
    [
        "A",
        "AAAAA",
        "AA=A",
        "AAA*",
        "AAAA====AAAA",
        "%zz",
        "AAA%",
        "AAA%4",
        "ÄÄÄÄ",
        "AA\x00A",
        "AAA\ud800",
        "A,AA",
        "{}",
    ],
)
def test_base64_that_cannot_be_read_is_named_so(payload: str) -> None:
    assert refuse(f"data:image/png;base64,{payload}").code == "invalid_base64_image"


@pytest.mark.parametrize(
    "url",
    [
        "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJ",
        "",
        "photo.png",
        "ftp://a.example/x.png",
        "file:///x.png",
        "javascript:alert(1)",
    ],
)
def test_what_is_no_data_url_is_told_which_urls_are_taken(url: str) -> None:
    error = refuse(url)
    assert error.code == "invalid_image_url"
    assert "data URL" in error.message and "http(s) URL" in error.message


@pytest.mark.parametrize(
    "url",
    [
        "data:",
        "data:image/png;base64",
        "data:png;base64,AAAA",
        "data:base64,AAAA",
        "data:image/;base64,AAAA",
        "data:/png;base64,AAAA",
        "data:image/p ng;base64,AAAA",
        "data:image/png,%zz",
        "data:image/png,%4",
        "data:image/png,%",
        "data:image/png,%%41",
        "data:image/png,ü",
        "data:" + "a" * 5000 + ",AAAA",
    ],
)
def test_urls_against_the_grammar_are_refused(url: str) -> None:
    assert refuse(url).code == "invalid_image_url"


@pytest.mark.parametrize(
    "url",
    [
        "data:,",
        "data:image/png;base64,",
        "data:image/png;base64, \r\n",
        "data:image/png;base64,%0A",
        "data:image/png;base64,====",
    ],
)
def test_no_bytes_at_all_are_an_empty_file(url: str) -> None:
    assert refuse(url).code == "empty_image_file"


@pytest.mark.parametrize("count", [1, 2, 3, 99, 100, 101])
@pytest.mark.parametrize("over", [-1, 0, 1, 2, 3])
def test_the_limit_is_exact_in_every_form(count: int, over: int) -> None:
    data = b"\xfb" * (count + over)
    packed = base64.b64encode(data).decode()
    forms = [
        f"data:image/png;base64,{packed}",
        f"data:image/png;base64,{packed.rstrip('=')}",
        f"data:image/png;base64,{'%0A'.join(packed)}",
        f"data:image/png,{quote_from_bytes(data)}",
    ]
    if not data:
        return
    for url in forms:
        if over <= 0:
            assert parse_data_url(url, count).data == data
        else:
            assert refuse(url, count).code == "image_file_too_large"


@pytest.mark.parametrize("payload", ["A" * 16_000_000, "%41" * 5_000_000, " A" * 8_000_000])
def test_oversize_is_refused_before_anything_is_decoded(payload: str) -> None:
    for head in ("data:image/png;base64,", "data:image/png,"):
        url = head + payload
        tracemalloc.start()
        assert refuse(url, 1000).code == "image_file_too_large"
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2.5 * len(url)  # the text's own two copies, nothing decoded


def test_fully_escaped_data_needs_little_scratch_memory() -> None:
    data = np.random.default_rng(3).integers(0, 256, 1_000_000, dtype=np.uint8).tobytes()
    url = "data:image/png," + "".join(f"%{byte:02X}" for byte in data)
    tracemalloc.start()
    parsed = parse_data_url(url, 1_000_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert parsed.data == data
    assert peak < 25_000_000


def test_escapes_across_block_borders_are_whole() -> None:
    for lead in range(4):
        data = b"a" * (2**20 - lead) + b"%,%" * 3
        url = "data:," + data.replace(b"%", b"%25").decode()
        assert parse_data_url(url, 2**21).data == data


def test_messages_repeat_nothing_of_the_url() -> None:
    for url in ("secret-token", "data:secret-token;base64,AAAA", "data:image/png;base64,secret-*"):
        assert "secret" not in refuse(url).message


def test_twenty_megabytes_are_read_within_a_tenth_of_a_second() -> None:
    data = np.random.default_rng(1).integers(0, 256, 20_000_000, dtype=np.uint8).tobytes()
    url = "data:image/jpeg;base64," + base64.b64encode(data).decode()
    took = []
    for _ in range(5):
        start = time.perf_counter()
        parsed = parse_data_url(url, 20 * 2**20)
        took.append(time.perf_counter() - start)
    assert parsed.data == data
    assert min(took) < 0.1  # measured: about a tenth of this
