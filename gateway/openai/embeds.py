"""`image_embeds` of a request to an embedding of `chiasm.v1`, in every form that clients send.

    "<base64 of a file>"                       of torch.save, numpy.save or safetensors
    {"data": "<base64>", "dtype": "float32", "shape": [rows, width]}   little-endian elements
    {"image_embeds": <either of these>, "image_grid_thw": ..., "image_sizes": ...}
    {"ref": "emb_..."}                         one that the service holds

`image_grid_thw` is [t, h, w] and `image_sizes` [height, width], alone or as the only row of a list,
or the base64 of a file of int32 or int64 with those numbers. For models with further feature levels
each row holds the features and then every level, side by side, as vLLM takes them for Qwen3-VL.
"""

import asyncio
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np

from chiasm import tensors, wire
from chiasm.errors import ChiasmError, Reason, sentence
from chiasm.v1 import image_pb2
from gateway.containers import (
    ContainerError,
    ContainerTooLarge,
    EmbeddingArray,
    decode_base64,
    embedding,
    integers,
    raw_dtype,
    raw_shape,
    read_array,
    read_raw,
)
from gateway.llm import Card
from gateway.openai.pulled import Data

T = TypeVar("T")
Embedding = image_pb2.ImageEmbedding | image_pb2.EmbeddingReference

IN_THREAD_ABOVE: Final = 1 << 18  # bytes or characters
_BESIDE: Final = ("image_grid_thw", "image_sizes")
_RAW: Final = ("data", "dtype", "shape")
_REFERENCE: Final = re.compile(r"emb_[A-Za-z0-9_-]{1,128}")
_MAX_NUMBERS: Final = 8  # in a file of integers
_MAX_INTEGER_FILE: Final = 1 << 16  # bytes
_LARGEST: Final = 2**31 - 1
_LONGEST_NAME: Final = 64
_FORMS: Final = (
    "the base64 of a file of torch.save, numpy.save or safetensors, or an object of data, dtype "
    "and shape"
)


@dataclass(frozen=True)
class EmbedsReader:
    """Reads the embeddings of one request: their elements go to `buffers`.

    `data` holds the large texts that were decoded before the JSON was parsed.
    """

    limit_bytes: int
    card: Card
    buffers: wire.Buffers
    data: Data

    async def read(self, given: str | Mapping[str, Any], param: str) -> Embedding:
        """The embedding in `given`, whose path is `param`. Raises ChiasmError with the path."""
        if not self.card.encoder_identity.width:
            text = "The served model takes no pictures and no embeddings of them."
            raise ChiasmError(Reason.UNSUPPORTED, text, param)
        if isinstance(given, str):
            return self._message(*await self._features(given, param))
        fields = {name: value for name, value in given.items() if value is not None}
        if "ref" in fields:
            return _reference(fields, param)
        return await self._read_object(fields, param)

    async def _read_object(self, fields: Mapping[str, Any], param: str) -> Embedding:
        raw = "data" in fields and "image_embeds" not in fields
        _only((*(_RAW if raw else ("image_embeds",)), *_BESIDE), fields, param)
        # Cheap first: numbers that are wrong need no features read.
        grid = self._grid(fields.get("image_grid_thw"), f"{param}.image_grid_thw")
        size = self._size(fields.get("image_sizes"), f"{param}.image_sizes")
        if raw:
            parts = await self._raw(fields, param)
        else:
            parts = await self._nested(fields.get("image_embeds"), f"{param}.image_embeds")
        message = self._message(*parts)
        if grid is not None:
            message.grid_thw.CopyFrom(grid)
        if size is not None:
            message.image_size.CopyFrom(size)
        return message

    async def _nested(self, given: Any, param: str) -> list[EmbeddingArray]:
        if isinstance(given, str):
            return await self._features(given, param)
        if isinstance(given, dict):
            fields = {name: value for name, value in given.items() if value is not None}
            _only(_RAW, fields, param)
            return await self._raw(fields, param)
        raise ChiasmError(Reason.TENSOR_INVALID, f"The object needs image_embeds, {_FORMS}.", param)

    async def _features(self, encoded: str, param: str) -> list[EmbeddingArray]:
        wanted = embedding(self.limit_bytes)
        payload = await self._payload(encoded, param)
        with _located(param):
            array = read_array(payload, wanted)
        return await self._levels(array, param)

    async def _raw(self, fields: Mapping[str, Any], param: str) -> list[EmbeddingArray]:
        wanted = embedding(self.limit_bytes)
        with _located(f"{param}.dtype"):
            dtype = raw_dtype(fields.get("dtype"), wanted)
        with _located(f"{param}.shape"):
            shape = raw_shape(fields.get("shape"), dtype, wanted)
        check_shape(shape, self.card, f"{param}.shape")
        encoded = fields.get("data")
        if not isinstance(encoded, str):
            text = "The object needs data, the base64 of the elements."
            raise ChiasmError(Reason.TENSOR_INVALID, text, f"{param}.data")
        payload = await self._payload(encoded, f"{param}.data")
        with _located(f"{param}.data"):
            array = read_raw(payload, dtype, shape, wanted)
        return await self._levels(array, param)

    async def _payload(self, encoded: str, param: str) -> bytes:
        with _located(param):
            try:
                return await self._decoded(encoded)
            except ContainerTooLarge as error:
                text = f"{error.message}, and {self.limit_bytes} as an array"
                raise ContainerTooLarge(error.container, text) from None

    async def _decoded(self, encoded: str) -> bytes:
        # float64 becomes half as large, and a container takes some kilobytes beside its elements.
        most = 2 * self.limit_bytes
        known = self.data.get(encoded)
        if known is None:
            return await decoded(len(encoded), lambda: decode_base64(encoded, limit_bytes=most))
        if len(known) > most:
            text = f"the embedding has {len(known)} bytes; the limit is {most}"
            raise ContainerTooLarge("base64", text)
        return known

    async def _levels(self, array: EmbeddingArray, param: str) -> list[EmbeddingArray]:
        check_shape(array.shape, self.card, param)
        if not self.card.level_count:
            return [array]
        width = self.card.encoder_identity.width
        return await decoded(array.data.nbytes, lambda: split(array, width))

    def _message(self, *parts: EmbeddingArray) -> image_pb2.ImageEmbedding:
        features, *levels = (
            tensors.to_wire(
                tensors.Array(tensors.BY_NAME[part.dtype], part.shape, part.data), self.buffers
            )
            for part in parts
        )
        return image_pb2.ImageEmbedding(features=features, levels=levels)

    def _grid(self, given: Any, param: str) -> image_pb2.GridThw | None:
        if given is None:
            return None
        time, height, width = _numbers(given, ("t", "h", "w"), param)
        return image_pb2.GridThw(temporal=time, height=height, width=width)

    def _size(self, given: Any, param: str) -> image_pb2.ImageSize | None:
        if given is None:
            return None
        height, width = _numbers(given, ("height", "width"), param)
        return image_pb2.ImageSize(height=height, width=width)


def check_shape(shape: Sequence[int], card: Card, param: str) -> None:
    """Raises TENSOR_INVALID unless `shape` is that of one picture's rows, each of the width that
    the model needs, its levels included."""
    width, levels = card.encoder_identity.width, card.level_count
    total = width * (1 + levels)
    right_rank = len(shape) == 2 or (len(shape) == 3 and shape[0] == 1)
    if right_rank and shape[-1] == total:
        return
    mend = "" if right_rank else " Each part holds the rows of one picture; send several parts."
    parts = f" ({width} features and {levels} levels of as many, side by side)" if levels else ""
    text = (
        f"The embedding's shape must be [rows, {total}] or [1, rows, {total}]{parts}, "
        f"but {list(shape)} came.{mend}"
    )
    raise ChiasmError(Reason.TENSOR_INVALID, text, param)


def split(array: EmbeddingArray, width: int) -> list[EmbeddingArray]:
    """The blocks of `width` columns of `array`, each an array of its own: features, then levels."""
    count = array.shape[-1] // width
    shape = (*array.shape[:-1], width)
    blocks = np.frombuffer(array.data, np.uint8).reshape(array.shape[-2], count, -1)
    return [
        EmbeddingArray(array.dtype, shape, wire.as_bytes_view(block).toreadonly())
        for block in (np.ascontiguousarray(blocks[:, number]) for number in range(count))
    ]


async def decoded(size: int, decode: Callable[[], T]) -> T:
    """What `decode` gives; in a thread where `size` is large, so that other requests go on."""
    return await asyncio.to_thread(decode) if size > IN_THREAD_ABOVE else decode()


def _reference(fields: Mapping[str, Any], param: str) -> image_pb2.EmbeddingReference:
    _only(("ref",), fields, param)
    name = fields["ref"]
    if isinstance(name, str) and _REFERENCE.fullmatch(name):
        return image_pb2.EmbeddingReference(id=name)
    text = "The ref must be the id of an embedding that the service holds, of the form emb_...."
    raise ChiasmError(Reason.TENSOR_INVALID, text, f"{param}.ref")


def _only(known: Sequence[str], fields: Mapping[str, Any], param: str) -> None:
    for name in fields:
        if name in known:
            continue
        sound = name.isascii() and name.isidentifier() and len(name) <= _LONGEST_NAME
        told = f"no {name}" if sound else "none of the object's other names"
        mend = (
            " Put each level's columns behind those of the features."
            if name == "deepstack"
            else f" Beside each other go {', '.join(known)}."
        )
        place = f"{param}.{name}" if sound else param
        raise ChiasmError(Reason.UNSUPPORTED, f"An embedding takes {told} here.{mend}", place)


def _numbers(given: Any, names: tuple[str, ...], param: str) -> tuple[int, ...]:
    found = _in_file(given, param) if isinstance(given, str) else given
    if isinstance(found, list) and len(found) == 1 and isinstance(found[0], list):
        found = found[0]
    form = f"[{', '.join(names)}]"
    if not isinstance(found, list) or len(found) != len(names):
        several = isinstance(found, list) and len(found) > 1 and isinstance(found[0], list)
        came = f"{len(found)} rows" if several else _told(found)
        mend = "; each part holds one picture, so send several parts" if several else ""
        text = f"It must be {form} or [{form}], but {came} came{mend}."
        raise ChiasmError(Reason.TENSOR_INVALID, text, param)
    for number in found:
        if type(number) is not int or not 1 <= number <= _LARGEST:
            text = f"The numbers of {form} are whole and from 1 to {_LARGEST}, but {_told(number)}"
            raise ChiasmError(Reason.TENSOR_INVALID, f"{text} came.", param)
    return tuple(found)


def _told(value: Any) -> str:
    if type(value) is int and abs(value) <= 2**63:
        return str(value)
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return "something else than a number" if not isinstance(value, float) else "a fraction"


def _in_file(encoded: str, param: str) -> list[Any]:
    wanted = integers(_MAX_NUMBERS)
    with _located(param):
        payload = decode_base64(encoded, limit_bytes=_MAX_INTEGER_FILE, what=wanted.what)
        array = read_array(payload, wanted)
    numbers: list[Any] = np.frombuffer(array.data, "<i8").reshape(array.shape).tolist()
    return numbers


@contextmanager
def _located(param: str) -> Iterator[None]:
    """Turns a ContainerError into one that names the path."""
    try:
        yield
    except ContainerError as error:
        raise fault(error, param) from None


def fault(error: ContainerError, param: str | None) -> ChiasmError:
    """What the caller is told of bytes that hold no embedding; `param` is None for a whole body."""
    too_large = isinstance(error, ContainerTooLarge)
    reason = Reason.BODY_TOO_LARGE if too_large else Reason.TENSOR_INVALID
    code = "image_embeds_too_large" if too_large else "invalid_image_embeds"
    return ChiasmError(reason, sentence(error.message), param, metadata={"code": code})
