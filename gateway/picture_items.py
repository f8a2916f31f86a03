"""The pictures of a request that is about pictures alone, each read as a chat's part would be.

input: [part, ...]                 parts as in a chat; a text is the URL of a picture
images: [...]                      the same
input: [{"image": URL or base64}]  as other servers of embeddings take it
messages: [...]                    as vLLM takes it
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from chiasm import wire
from chiasm.errors import ChiasmError, Reason
from chiasm.v1 import llm_service_pb2
from gateway.llm import Card
from gateway.openai.errors import invalid
from gateway.openai.parse import Parsed, checked, read_json
from gateway.openai.parts import too_many_bytes
from gateway.openai.pulled import Data, all_placed, pull
from gateway.openai.translate import Places, translate
from gateway.openai.url_pictures import Room, UrlPictures, all_of
from gateway.settings import PictureLimits

_IN_CHAT: Final = "messages[0].content[0]"
_URL_IN_CHAT: Final = f"{_IN_CHAT}.image_url.url"
_IN_LLM: Final = "messages[0].parts[0]"
_URLS: Final = ("data:", "http://", "https://")
_BOUNDS: Final = "mm_processor_kwargs"


@dataclass(frozen=True)
class Item:
    """One picture as it was sent.

    Attributes:
        part: as a part of a chat, not checked yet.
        place: its path in the request.
        inner: the path that the chat's part has for what lies at `place` itself, or "".
    """

    part: Any
    place: str
    inner: str = ""

    def told(self, error: ChiasmError) -> ChiasmError:
        """`error` about the chat that was made of this item, with the request's own path."""
        field = error.field
        if field is not None and field.startswith(_IN_CHAT):
            within = field[len(_IN_CHAT) :]
            if self.inner and within.startswith(self.inner):
                within = ""
            field = f"{self.place}{within}"
        elif field is not None and not field.startswith(_BOUNDS):
            field = self.place
        return ChiasmError(error.reason, error.message, field, error.retry_after, error.metadata)


@dataclass(frozen=True)
class Asked:
    """One picture as the LLM service takes it."""

    item: Item
    part: llm_service_pb2.Part
    buffers: wire.Buffers
    places: Places | None = None

    @property
    def picture_bytes(self) -> int:
        """Of a raw picture's file; 0 for an embedding."""
        return self.buffers.byte_count if self.part.HasField("image") else 0

    def told(self, error: ChiasmError) -> ChiasmError:
        """The LLM service's error with the request's own path."""
        if error.field is not None and error.field.startswith("part"):
            error.field = _IN_LLM + error.field.removeprefix("part")
        return self.item.told(error if self.places is None else self.places.told(error))


@dataclass(frozen=True)
class Pictures:
    """A JSON body: its fields, its pictures, and the large texts that were decoded beside it."""

    fields: Mapping[str, Any]
    items: list[Item]
    data: Data


async def read_pictures(body: bytearray, *, messages: bool) -> Pictures:
    """The pictures of a JSON body. Raises REQUEST_INVALID or UNSUPPORTED.

    `messages`: a chat is taken too.
    """
    pulled = await pull(body)
    if pulled.data:
        fields = read_json(pulled.body)
        items = list(_items(fields, messages))
        chat = {"messages": [{"content": [item.part for item in items]}]}
        if all_placed(chat, pulled.data):
            return Pictures(fields, items, pulled.data)
    fields = read_json(body)
    return Pictures(fields, list(_items(fields, messages)), {})


async def as_parts(pictures: Pictures, card: Card, urls: UrlPictures, room: Room) -> list[Asked]:
    """What the LLM service is asked about each picture. Raises ChiasmError with the path.

    What is fetched by URL is held in `room`.
    """
    limits = urls.limits
    most = min(limits.max_images, card.max_image_count)
    if len(pictures.items) > most:
        text = f"The request has {len(pictures.items)} pictures; the limit is {most}."
        raise ChiasmError(Reason.TOO_MANY_IMAGES, text, "input")
    bounds = pictures.fields.get(_BOUNDS)
    chats = [_chat(item, pictures.data, bounds, card) for item in pictures.items]
    fetching = [
        _fetched(item, chat, card, urls, room)
        for item, chat in zip(pictures.items, chats, strict=True)
    ]
    chats = await all_of(fetching)
    asked: list[Asked] = []
    size = 0
    for item, chat in zip(pictures.items, chats, strict=True):
        asked.append(await _asked(item, chat, card, limits))
        size += asked[-1].picture_bytes
        if size > limits.max_request_image_bytes:
            raise item.told(too_many_bytes(limits.max_request_image_bytes, _URL_IN_CHAT))
    return asked


def _chat(item: Item, data: Data, bounds: Any, card: Card) -> Parsed:
    value = {
        "model": card.model_id,
        "messages": [{"role": "user", "content": [item.part]}],
        _BOUNDS: bounds,
    }
    try:
        return Parsed(checked(value), data)
    except ChiasmError as error:
        raise item.told(error) from None


async def _fetched(item: Item, chat: Parsed, card: Card, urls: UrlPictures, room: Room) -> Parsed:
    try:
        return await urls.fetched(chat, card, room)
    except ChiasmError as error:
        raise item.told(error) from error.__cause__


async def _asked(item: Item, chat: Parsed, card: Card, limits: PictureLimits) -> Asked:
    try:
        asked = await translate(chat, card, limits)
    except ChiasmError as error:
        raise item.told(error) from None
    (message,) = asked.wired.message.messages
    (part,) = message.parts
    if part.WhichOneof("content") == "text":
        raise invalid("This takes pictures and embeddings of them, no text.", item.place)
    return Asked(item, part, asked.wired.buffers, asked.places)


def _items(fields: Mapping[str, Any], messages: bool) -> Iterator[Item]:
    names = [name for name in ("input", "images", "messages") if fields.get(name) is not None]
    if not messages and "messages" in names:
        names.remove("messages")
    if len(names) != 1:
        known = "input or messages" if messages else "input or images"
        text = f"The request needs {known}, a list of pictures, and not more than one of them."
        raise invalid(text, names[0] if names else "input", "missing_required_parameter")
    name = names[0]
    value = fields[name]
    if name == "messages":
        yield from _of_messages(value)
        return
    if not isinstance(value, list):
        value = [value]
    if not value:
        raise invalid(f"The list {name} is empty; send a picture.", name, "empty_array")
    for number, one in enumerate(value):
        yield _item(one, f"{name}[{number}]" if isinstance(fields[name], list) else name)


def _item(value: Any, place: str) -> Item:
    if isinstance(value, str):
        if not value.lstrip()[:8].lower().startswith(_URLS):
            text = "Texts are not embedded here; send pictures, by a data URL or as parts."
            raise ChiasmError(Reason.UNSUPPORTED, text, place)
        return Item({"type": "image_url", "image_url": {"url": value}}, place, ".image_url.url")
    if isinstance(value, dict) and "image" in value and "type" not in value:
        url = value["image"]
        if isinstance(url, str) and not url.lstrip()[:8].lower().startswith(_URLS):
            url = f"data:image/png;base64,{url}"  # the type is told by content
        part = {"type": "image_url", "image_url": {"url": url}}
        return Item(part, f"{place}.image", ".image_url.url")
    return Item(value, place)


def _of_messages(messages: Any) -> Iterator[Item]:
    """The one picture of a chat: other servers make one vector of all of it, texts included."""
    found: list[Item] = []
    for number, message in enumerate(messages if isinstance(messages, list) else [messages]):
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(content, list):
            text = "Texts are not embedded here; the content is a list with one picture."
            raise ChiasmError(Reason.UNSUPPORTED, text, f"messages[{number}].content")
        for index, part in enumerate(content):
            place = f"messages[{number}].content[{index}]"
            if isinstance(part, dict) and part.get("type") == "text":
                text = "Texts are not embedded here, and none is left out in silence; send the "
                raise ChiasmError(Reason.UNSUPPORTED, text + "picture alone.", place)
            found.append(Item(part, place))
    if len(found) != 1:
        text = f"A chat is made one vector and has one picture, but {len(found)} came; send "
        raise invalid(text + "several pictures as a list under input.", "messages")
    yield found[0]
