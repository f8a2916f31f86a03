"""The content of a message to the parts of a `chiasm.v1.Message`, large bytes without a copy.

Large base64 is decoded in a thread, so that other requests go on.
"""

from dataclasses import dataclass, field
from typing import Any, Final, assert_never

from chiasm import wire
from chiasm.data_url import DataUrlError, parse_data_url
from chiasm.errors import ChiasmError, Reason, sentence
from chiasm.v1 import image_pb2, llm_service_pb2
from gateway.fetch.policy import is_web
from gateway.llm import Card
from gateway.openai.embeds import EmbedsReader, decoded
from gateway.openai.pulled import Data
from gateway.openai.schema import (
    ImageEmbedsPart,
    ImageUrl,
    ImageUrlPart,
    Message,
    Part,
    PixelBounds,
    RefusalPart,
    TextPart,
    UnservedPart,
)
from gateway.settings import PictureLimits

Parts = list[llm_service_pb2.Part]
_ANY_BASE64: Final = "QQ=="

_REASONS: Final = {
    "image_file_too_large": Reason.IMAGE_TOO_LARGE,
    "invalid_image_url": Reason.URL_FORBIDDEN,
}
_DETAILS: Final = {
    "auto": image_pb2.IMAGE_DETAIL_AUTO,
    "low": image_pb2.IMAGE_DETAIL_LOW,
    "high": image_pb2.IMAGE_DETAIL_HIGH,
    "original": image_pb2.IMAGE_DETAIL_ORIGINAL,
}


@dataclass(frozen=True)
class PartReader:
    """Reads the pictures of one request: their bytes go to `buffers`.

    `data` holds the large texts that were decoded before the JSON was parsed, and what was fetched
    by URL; `bounds` are those that the request sets for all of its raw pictures.
    """

    limits: PictureLimits
    card: Card
    buffers: wire.Buffers
    data: Data
    bounds: PixelBounds | None
    sizes: list[int] = field(default_factory=list)

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
            case ImageUrlPart(image_url=image_url, uuid=alias):
                image = None if image_url is None else await self._read_image(image_url, place)
                return llm_service_pb2.Part(image=image, alias=alias)
            case ImageEmbedsPart(image_embeds=given, uuid=alias):
                return await self._read_embeds(given, alias, f"{place}.image_embeds")
            case UnservedPart(type=kind):
                text = f"Parts of type {kind} are not served by this model; leave the part out."
                raise ChiasmError(Reason.UNSUPPORTED, text, place)
            case _:
                assert_never(part)

    async def _read_embeds(
        self, given: str | dict[str, Any] | None, alias: str | None, param: str
    ) -> llm_service_pb2.Part:
        if given is None:
            return llm_service_pb2.Part(alias=alias)
        limit = self.limits.max_embedding_bytes
        reader = EmbedsReader(limit, self.card, self.buffers, self.data)
        match await reader.read(given, param):
            case image_pb2.EmbeddingReference() as reference:
                return llm_service_pb2.Part(reference=reference, alias=alias)
            case embedding:
                return llm_service_pb2.Part(embedding=embedding, alias=alias)

    async def _read_image(self, image_url: ImageUrl, place: str) -> image_pb2.Image:
        if self.card.vision_source == llm_service_pb2.VISION_SOURCE_NONE:
            text = "This deployment encodes no pictures; send image_embeds, or the text alone."
            raise ChiasmError(Reason.UNSUPPORTED, text, place)
        param = f"{place}.image_url.url"
        try:
            data = await self._picture(image_url.url)
        except DataUrlError as error:
            raise _image_fault(error, param) from None
        self.sizes.append(len(data))
        if sum(self.sizes) > self.limits.max_request_image_bytes:
            raise too_many_bytes(self.limits.max_request_image_bytes, param)
        options = image_pb2.ImageOptions(detail=_DETAILS[image_url.detail])
        if self.bounds is not None:
            options.MergeFrom(_bounds(self.bounds))
        return image_pb2.Image(data=self.buffers.put(data), options=options)

    async def _picture(self, url: str) -> bytes:
        limit = self.limits.max_image_bytes
        if is_web(url):
            return self._fetched(url)
        head, _, encoded = url.rpartition(",")
        data = self.data.get(encoded)
        if data is None:
            return (await decoded(len(url), lambda: parse_data_url(url, limit))).data
        parse_data_url(f"{head},{_ANY_BASE64}", limit)  # the head is judged as in any other URL
        if len(data) > limit:
            text = f"the data URL holds more than {limit} bytes; send a smaller file"
            raise DataUrlError("image_file_too_large", text)
        return data

    def _fetched(self, url: str) -> bytes:
        data = self.data.get(url)
        if data is None:
            text = "fetching image URLs is not enabled here; send the picture as a data URL"
            raise DataUrlError("invalid_image_url", text)
        return data


def too_many_bytes(limit: int, param: str | None = None) -> ChiasmError:
    """The raw pictures of a request have more than `limit` bytes together."""
    text = f"The pictures of a request may have {limit} bytes together; send smaller or fewer ones."
    metadata = {"code": "image_file_too_large"}
    return ChiasmError(Reason.IMAGE_TOO_LARGE, text, param, metadata=metadata)


def _bounds(bounds: PixelBounds) -> image_pb2.ImageOptions:
    return image_pb2.ImageOptions(min_pixels=bounds.min_pixels, max_pixels=bounds.max_pixels)


def _image_fault(error: DataUrlError, param: str) -> ChiasmError:
    reason = _REASONS.get(error.code, Reason.IMAGE_INVALID)
    return ChiasmError(reason, sentence(error.message), param, metadata={"code": error.code})
