"""A conversation over pictures, and its forms: HTTP messages and gRPC messages.

Each picture of a conversation is sent as its file or as its embedding; a `Form` says which.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pybase64

from chiasm.conversation import Embedding, Message, Part, assistant, user
from chiasm.tensors import Array

# Whether the picture at a place (0 is the first of the conversation) goes as its embedding.
Form = Callable[[int], bool]
RAW: Form = lambda place: False  # noqa: E731
EMBEDDING: Form = lambda place: True  # noqa: E731
RAW_FIRST: Form = lambda place: place % 2 == 1  # noqa: E731
EMBEDDING_FIRST: Form = lambda place: place % 2 == 0  # noqa: E731

_SAFETENSORS_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_MEDIA = {".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp", ".gif": "gif", ".avif": "avif"}


@dataclass(frozen=True)
class Picture:
    """A picture file and the embedding that an encoder gave for it."""

    path: Path
    embedding: Embedding

    @property
    def name(self) -> str:
        return self.path.name


@dataclass(frozen=True)
class Line:
    """One message: what the person shows and says, or (`by_model`) what the model answered."""

    items: tuple[str | Picture, ...]
    by_model: bool = False


Dialogue = tuple[Line, ...]


def picture_count(dialogue: Dialogue) -> int:
    return sum(isinstance(item, Picture) for line in dialogue for item in line.items)


def http_messages(dialogue: Dialogue, form: Form) -> list[dict[str, Any]]:
    """The `messages` of a chat completion."""
    return [
        {"role": "assistant", "content": items[0]}
        if line.by_model
        else {"role": "user", "content": [http_part(item) for item in items]}
        for line, items in _formed(dialogue, form)
    ]


def grpc_messages(dialogue: Dialogue, form: Form) -> list[Message]:
    """The same for `chiasm.Client`."""
    return [
        (assistant if line.by_model else user)(*items) for line, items in _formed(dialogue, form)
    ]


def http_part(item: Part) -> dict[str, Any]:
    """One part of the content of a chat message."""
    if isinstance(item, Path):
        media = _MEDIA.get(item.suffix.lower(), "png")
        url = f"data:image/{media};base64,{_base64(item.read_bytes())}"
        return {"type": "image_url", "image_url": {"url": url}}
    if isinstance(item, Embedding):
        file = safetensors_file(item.features)
        return {"type": "image_embeds", "image_embeds": _base64(file)}
    return {"type": "text", "text": item}


def safetensors_file(array: Array) -> bytes:
    """A file with one tensor. Format: the README of huggingface/safetensors, "Format"."""
    tensor = {
        "dtype": _SAFETENSORS_TYPES[array.data_type.name],
        "shape": array.shape,
        "data_offsets": (0, array.data.nbytes),
    }
    header = json.dumps({"image_embeds": tensor}).encode()
    # Tensors begin at a multiple of eight bytes.
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + bytes(array.data)


def _formed(dialogue: Dialogue, form: Form) -> Iterator[tuple[Line, list[Part]]]:
    place = 0
    for line in dialogue:
        items: list[Part] = []
        for item in line.items:
            if isinstance(item, Picture):
                items.append(item.embedding if form(place) else item.path)
                place += 1
            else:
                items.append(item)
        yield line, items


def _base64(data: bytes) -> str:
    return pybase64.b64encode(data).decode()
