"""Checks an embedding, whoever sent it, against the model's own contract. Pure; raises ChiasmError.

Nothing of the wire is believed: the type, rank, width, rows, grid, levels and every value are
checked, and the identity if there is one.
"""

import hashlib
from dataclasses import dataclass, replace
from math import prod
from typing import Self

import torch

from chiasm import tensors, torch_tensors
from chiasm.errors import ChiasmError, Reason, sentence, within
from chiasm.models.contract import ContractError, Grid, ImageContract, ImageForm, Size
from chiasm.models.identity import EncoderIdentity
from chiasm.models.wire import identity_from_wire
from chiasm.v1 import image_pb2, tensor_pb2
from llm_service.request import CallerEmbedding


@dataclass(frozen=True, eq=False)
class Rows:
    """Checked features of one picture.

    Attributes:
        rows: `[row_count, width]`, in the type that they came in, read-only.
        form: what stands for them in a prompt.
        levels: extra levels of the families that have them, each shaped as `rows`.
        identity_checked: whether they came with the identity of the right encoder.
        digest: names the rows by content and encoder; empty until `named`.
        image_size: height and width of the picture in pixels, where known. A claim of the sender.
    """

    rows: torch.Tensor
    form: ImageForm
    identity_checked: bool
    levels: tuple[torch.Tensor, ...] = ()
    digest: bytes = b""
    image_size: Size | None = None

    @property
    def byte_count(self) -> int:
        return self.rows.nbytes + sum(level.nbytes for level in self.levels)

    def named(self, identity: EncoderIdentity) -> Self:
        """The same with its digest. Reads every byte: milliseconds, so not on the event loop.

        Args:
            identity: of the model's own encoder, whose features these are or pass for.
        """
        kinds = [f"{part.dtype}{tuple(part.shape)}" for part in (self.rows, *self.levels)]
        form = f"{kinds}{self.form}{identity}".encode()
        digest = hashlib.sha256(len(form).to_bytes(8, "little") + form)
        for part in (self.rows, *self.levels):
            digest.update(part.cpu().contiguous().view(torch.uint8).numpy().data)
        return replace(self, digest=digest.digest())


def check_embedding(embedding: CallerEmbedding, contract: ImageContract) -> Rows:
    """The rows of an embedding that keeps the contract.

    Raises TENSOR_INVALID with the field, what was expected and what came, or ENCODER_MISMATCH.
    """
    message = embedding.message
    identity_checked = _check_identity(message, contract.expected_identity)
    _check_levels(message, contract.level_count)
    with within("features"):
        rows = _read_rows(message.features, embedding.features, contract.width)
    form = _check_rows(message, rows.shape[0], contract)
    with within("features"):
        check_finite(rows)
    levels = tuple(
        _read_level(number, level, data, rows)
        for number, (level, data) in enumerate(zip(message.levels, embedding.levels, strict=True))
    )
    return Rows(rows, form, identity_checked, levels, image_size=_size(message))


def _check_identity(message: image_pb2.ImageEmbedding, expected: EncoderIdentity) -> bool:
    if not message.HasField("identity"):
        return False
    found = identity_from_wire(message.identity)
    if found != expected:
        told = "an unreadable identity" if found is None else found.describe()
        raise ChiasmError(
            Reason.ENCODER_MISMATCH,
            f"The embedding was made by {told}, but this model takes {expected.describe()}. Encode "
            "the picture with an encoder of this model.",
            "identity",
        )
    return True


def _check_levels(message: image_pb2.ImageEmbedding, expected: int) -> None:
    if len(message.levels) != expected:
        raise _invalid(
            f"This model takes {expected} extra levels, but {len(message.levels)} came.", "levels"
        )


def _read_rows(tensor: tensor_pb2.Tensor, data: memoryview, width: int) -> torch.Tensor:
    kind, shape = tensors.checked_form(tensor)
    if not kind.floating:
        raise _invalid(
            f"Features are float32, float16 or bfloat16, but {kind.name} came.", "data_type"
        )
    expected = f"[rows, {width}] or [1, rows, {width}]"
    if len(shape) == 3 and shape[0] != 1:
        raise _invalid(
            f"The shape is {list(shape)}, but one part holds one picture, {expected}; send each "
            "picture as a part of its own.",
            "shape",
        )
    if len(shape) not in {2, 3} or shape[-1] != width:
        raise _invalid(f"The shape must be {expected}, but {list(shape)} came.", "shape")
    array = tensors.from_wire(tensor, data)
    return torch_tensors.to_torch(array).reshape(prod(shape[:-1]), width)


def _read_level(
    number: int, tensor: tensor_pb2.Tensor, data: memoryview, rows: torch.Tensor
) -> torch.Tensor:
    with within(f"levels[{number}]"):
        level = _read_rows(tensor, data, rows.shape[1])
        if len(level) != len(rows):
            raise _invalid(
                f"Every level has {len(rows)} rows, as the features, but {len(level)} came.",
                "shape",
            )
        check_finite(level)
        return level


def _check_rows(
    message: image_pb2.ImageEmbedding, row_count: int, contract: ImageContract
) -> ImageForm:
    if message.row_count not in {0, row_count}:
        raise _invalid(
            f"row_count says {message.row_count}, but the features have {row_count} rows.",
            "row_count",
        )
    try:
        form = contract.of_rows(row_count, _grid(message), _size(message))
    except ContractError as error:
        raise _invalid(sentence(error.message), "features") from error
    if message.placeholder_count not in {0, row_count}:
        raise _invalid(
            f"placeholder_count says {message.placeholder_count}, but such features fill "
            f"{row_count}.",
            "placeholder_count",
        )
    return form


def _grid(message: image_pb2.ImageEmbedding) -> Grid | None:
    if not message.HasField("grid_thw"):
        return None
    grid = message.grid_thw
    return grid.temporal, grid.height, grid.width


def _size(message: image_pb2.ImageEmbedding) -> Size | None:
    if not message.HasField("image_size"):
        return None
    return message.image_size.height, message.image_size.width


def check_finite(rows: torch.Tensor) -> None:
    """Raises TENSOR_INVALID naming the first row that is not finite."""
    if torch_tensors.all_finite(rows):
        return
    at = int((~torch.isfinite(rows)).any(dim=1).nonzero()[0])
    raise _invalid(f"Row {at} holds a value that is NaN or infinite.", "data")


def _invalid(message: str, place: str) -> ChiasmError:
    return ChiasmError(Reason.TENSOR_INVALID, message, place)
