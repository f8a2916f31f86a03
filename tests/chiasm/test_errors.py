"""One table: each reason has one gRPC status and one HTTP status, and survives the wire."""

import grpc
import pytest

from chiasm import errors
from chiasm.errors import ChiasmError, Reason


def test_every_reason_is_in_the_table() -> None:
    assert set(errors.TABLE) == set(Reason)


def test_a_status_carries_reason_field_hint_and_metadata() -> None:
    sent = ChiasmError(Reason.QUEUE_FULL, "busy", "messages[0]", 1.5, {"code": "x"})
    status = errors.to_status(sent)
    back = errors._from_status(status)
    assert back is not None
    assert (back.reason, back.message, back.field) == (sent.reason, "busy", "messages[0]")
    assert (back.retry_after, back.metadata) == (1.5, {"code": "x"})
    assert status.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]


def test_a_long_message_is_cut_so_that_it_fits_into_metadata() -> None:
    status = errors.to_status(ChiasmError(Reason.INTERNAL, "x" * 100_000, "y" * 100_000))
    assert len(status.SerializeToString()) < 8000


def test_within_builds_the_path_from_the_outside() -> None:
    with (
        pytest.raises(ChiasmError) as caught,
        errors.within("messages[2]"),
        errors.within("parts[1]"),
    ):
        raise ChiasmError(Reason.TENSOR_INVALID, "no", "features")
    assert caught.value.field == "messages[2].parts[1].features"
