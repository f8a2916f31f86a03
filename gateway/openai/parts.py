"""The content of a message to the parts of a `chiasm.v1.Message`, large bytes without a copy.

Base64 above a megabyte is decoded in a thread, so that other requests go on.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar, assert_never

from chiasm import tensors, wire
from chiasm.data_url import DataUrlError, parse_data_url
from chiasm.errors import ChiasmError, Reason
from chiasm.v1 import image_pb2, llm_service_pb2
from gateway.containers import (
    ContainerError,
    ContainerTooLarge,
    EmbeddingArray,
    decode_base64,
    read_embedding,
)
from gateway.llm import Card
from gateway.openai.schema import (
    ImageEmbedsPart,
    ImageUrl,
    ImageUrlPart,
    Message,
    Part,
    RefusalPart,
    TextPart,
)
from gateway.settings import PictureLimits

Parts = list[llm_service_pb2.Part]
T = TypeVar("T")

_IN_THREAD_ABOVE: Final = 1 << 20  # characters of base64
_DETAILS: Final = {
    "auto": image_pb2.IMAGE_DETAIL_AUTO,
    "low": image_pb2.IMAGE_DETAIL_LOW,
    "high": image_pb2.IMAGE_DETAIL_HIGH,
    "original": image_pb2.IMAGE_DETAIL_ORIGINAL,
}
# Tensors that some clients put beside the features; no served family takes them.
_UNSERVED_TENSORS: Final = ("image_grid_thw", "image_sizes", "image_sizes_hw", "deepstack")


@dataclass(frozen=True)
class PartReader:
    """Reads the pictures of one request: their bytes go to `buffers`."""

    limits: PictureLimits
    card: Card
    buffers: wire.Buffers

    async def read(self, message: Message, place: str) -> Parts:
        """The parts of `message`, in order. `place` is its path in the JSON."""
        if message.content is None:
            # The model's templates want a content, be it empty.
            return [] if message.tool_calls else [llm_service_pb2.Part(text="")]
        if isinstance(message.content, str):
            return [llm_service_pb2.Part(text=message.content)]
        return [
            await self._read_part(part, f"{place}.content[{number}]")
            for number, part in enumerate(message.content)
        ]

    async def _read_part(self, part: Part, place: str) -> llm_service_pb2.Part:
        match part:
            case TextPart(text=text) | RefusalPart(refusal=text):
                return llm_service_pb2.Part(text=text)
            case ImageUrlPart(image_url=image_url):
                return llm_service_pb2.Part(image=await self._read_image(image_url, place))
            case ImageEmbedsPart():
                return llm_service_pb2.Part(embedding=await self._read_embeds(part, place))
            case _:
                assert_never(part)

    async def _read_image(self, image_url: ImageUrl, place: str) -> image_pb2.Image:
        param, url = f"{place}.image_url.url", image_url.url
        if url.lstrip()[:8].lower().startswith(("http://", "https://")):
            text = "Fetching image URLs is not enabled here; send the picture as a data URL."
            raise ChiasmError(
                Reason.URL_FORBIDDEN, text, param, metadata={"code": "invalid_image_url"}
            )
        try:
            found = await _decoded(url, lambda: parse_data_url(url, self.limits.max_image_bytes))
        except DataUrlError as error:
            raise _image_fault(error, param) from None
        options = image_pb2.ImageOptions(detail=_DETAILS[image_url.detail])
        return image_pb2.Image(data=self.buffers.put(found.data), options=options)

    async def _read_embeds(self, part: ImageEmbedsPart, place: str) -> image_pb2.ImageEmbedding:
        param, encoded = f"{place}.image_embeds", part.image_embeds
        if isinstance(encoded, dict):
            param, encoded = f"{param}.image_embeds", _only_features(encoded, param)
        limit = self.limits.max_embedding_bytes
        text = encoded
        try:
            array = await _decoded(text, lambda: _read_array(text, limit))
        except ContainerError as error:
            raise _embeds_fault(error, param) from None
        check_shape(array.shape, self.card.encoder_identity.width, param)
        features = tensors.Array(tensors.BY_NAME[array.dtype], array.shape, array.data)
        return image_pb2.ImageEmbedding(features=tensors.to_wire(features, self.buffers))


def check_shape(shape: Sequence[int], width: int, param: str) -> None:
    """Raises TENSOR_INVALID unless `shape` is that of one picture's rows, each of `width`."""
    expected = f"[rows, {width}] or [1, rows, {width}]"
    right_rank = len(shape) == 2 or (len(shape) == 3 and shape[0] == 1)
    if right_rank and shape[-1] == width:
        return
    mend = "" if right_rank else " One part holds the rows of one picture."
    text = f"The embedding's shape must be {expected}, but {list(shape)} came.{mend}"
    raise ChiasmError(Reason.TENSOR_INVALID, text, param)


async def _decoded(encoded: str, decode: Callable[[], T]) -> T:
    if len(encoded) > _IN_THREAD_ABOVE:
        return await asyncio.to_thread(decode)
    return decode()


def _read_array(encoded: str, limit_bytes: int) -> EmbeddingArray:
    # A container takes some kilobytes beside its elements.
    payload = decode_base64(encoded, limit_bytes=2 * limit_bytes)
    return read_embedding(payload, limit_bytes=limit_bytes)


def _only_features(tensors_by_name: dict[str, Any], param: str) -> str:
    for name in _UNSERVED_TENSORS:
        if tensors_by_name.get(name) is not None:
            text = f"The served model takes no {name}; send image_embeds alone."
            raise ChiasmError(Reason.UNSUPPORTED, text, f"{param}.{name}")
    encoded = tensors_by_name.get("image_embeds")
    if not isinstance(encoded, str):
        text = "The object needs image_embeds, the base64 of a file that holds the features."
        raise ChiasmError(Reason.TENSOR_INVALID, text, f"{param}.image_embeds")
    return encoded


def _image_fault(error: DataUrlError, param: str) -> ChiasmError:
    too_large = error.code == "image_file_too_large"
    reason = Reason.IMAGE_TOO_LARGE if too_large else Reason.IMAGE_INVALID
    return ChiasmError(reason, sentence(error.message), param, metadata={"code": error.code})


def _embeds_fault(error: ContainerError, param: str) -> ChiasmError:
    too_large = isinstance(error, ContainerTooLarge)
    reason = Reason.BODY_TOO_LARGE if too_large else Reason.TENSOR_INVALID
    code = "image_embeds_too_large" if too_large else "invalid_image_embeds"
    return ChiasmError(reason, sentence(error.message), param, metadata={"code": code})


def sentence(text: str) -> str:
    """`text` with a capital and a full stop, as all messages of ours have."""
    return f"{text[:1].upper()}{text[1:]}." if not text.endswith(".") else text
