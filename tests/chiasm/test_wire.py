"""Large fields leave and enter messages without a copy, and the bytes are plain protobuf."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chiasm import wire
from chiasm.errors import ChiasmError, Reason
from chiasm.v1 import encoder_service_pb2, image_pb2, llm_service_pb2, tensor_pb2


def _request(*parts: bytes | str) -> wire.Wired[llm_service_pb2.GenerateRequest]:
    buffers = wire.Buffers()
    message = llm_service_pb2.Message(role=llm_service_pb2.ROLE_USER)
    for part in parts:
        if isinstance(part, str):
            message.parts.add(text=part)
        else:
            message.parts.add(image=image_pb2.Image(data=buffers.put(part)))
    return wire.Wired(llm_service_pb2.GenerateRequest(model="m", messages=[message]), buffers)


def test_a_stock_stub_reads_what_we_write() -> None:
    written = wire.serialize(_request("before", b"\x00" * 300, "between", b"PNG", ""))
    read = llm_service_pb2.GenerateRequest.FromString(written)
    datas = [part.image.data for part in read.messages[0].parts if part.HasField("image")]
    assert (read.model, datas) == ("m", [b"\x00" * 300, b"PNG"])


def test_we_read_what_a_stock_stub_writes_as_views_of_its_bytes() -> None:
    features = tensor_pb2.Tensor(data_type=tensor_pb2.DATA_TYPE_UINT8, shape=[5], data=b"abcde")
    stock = encoder_service_pb2.EncodeImageResponse(
        embedding=image_pb2.ImageEmbedding(features=features, row_count=5), encoder_name="e"
    ).SerializeToString()
    wired = wire.parse(encoder_service_pb2.EncodeImageResponse, stock)
    view = wired.data(wired.message.embedding.features.data)
    assert bytes(view) == b"abcde"
    assert view.obj is stock
    assert (wired.message.embedding.row_count, wired.message.encoder_name) == (5, "e")


@given(st.lists(st.one_of(st.binary(max_size=400), st.text(max_size=50)), max_size=6))
@settings(max_examples=100, deadline=None)
def test_any_message_survives_the_round_trip(parts: list[bytes | str]) -> None:
    written = wire.serialize(_request(*parts))
    back = wire.parse(llm_service_pb2.GenerateRequest, written)
    assert wire.serialize(back) == written
    found = [
        bytes(back.data(part.image.data)) if part.HasField("image") else part.text
        for part in back.message.messages[0].parts
    ]
    assert found == list(parts)


def test_an_empty_large_field_is_empty_and_not_a_ticket() -> None:
    written = wire.serialize(_request(b""))
    read = llm_service_pb2.GenerateRequest.FromString(written)
    assert read.messages[0].parts[0].image.data == b""


def _outcome(received: bytes) -> object:
    try:
        wire.parse(llm_service_pb2.GenerateRequest, received)
    except ChiasmError as error:
        return error.reason
    return "a message"


@given(st.binary(max_size=300))
@settings(max_examples=300, deadline=None)
def test_arbitrary_bytes_are_a_message_or_a_typed_refusal(received: bytes) -> None:
    assert _outcome(received) in {"a message", Reason.REQUEST_INVALID}


@pytest.mark.parametrize("cut", range(1, 40))
def test_a_message_cut_short_is_refused(cut: int) -> None:
    whole = wire.serialize(_request("text", b"x" * 40))
    with pytest.raises(ChiasmError) as caught:
        wire.parse(llm_service_pb2.GenerateRequest, whole[:-cut])
    assert caught.value.reason is Reason.REQUEST_INVALID


def test_the_last_of_two_data_fields_wins_as_protobuf_says() -> None:
    doubled = (
        image_pb2.Image(data=b"first").SerializeToString()
        + image_pb2.Image(data=b"second").SerializeToString()
    )
    wired = wire.parse(image_pb2.Image, doubled)
    assert bytes(wired.data(wired.message.data)) == b"second"
