"""Identities and options on the wire: the messages of `image.proto` to and from plain values."""

from collections.abc import Mapping

from chiasm import colours
from chiasm.models.contract import ContractError, Detail, PixelOptions
from chiasm.models.identity import EncoderIdentity, feature_type
from chiasm.tensors import BY_NAME, BY_WIRE
from chiasm.v1 import image_pb2

_DETAILS: Mapping["image_pb2.ImageDetail.ValueType", Detail] = {
    image_pb2.IMAGE_DETAIL_UNSPECIFIED: "auto",
    image_pb2.IMAGE_DETAIL_AUTO: "auto",
    image_pb2.IMAGE_DETAIL_LOW: "low",
    image_pb2.IMAGE_DETAIL_HIGH: "high",
    image_pb2.IMAGE_DETAIL_ORIGINAL: "original",
}


def options_from_wire(message: image_pb2.ImageOptions) -> PixelOptions:
    """What a request chose about an image; raises `ContractError` for an unknown detail."""
    detail = _DETAILS.get(message.detail)
    if detail is None:
        raise ContractError("the detail is low, high, auto or original")
    return PixelOptions(
        detail=detail,
        min_pixels=message.min_pixels if message.HasField("min_pixels") else None,
        max_pixels=message.max_pixels if message.HasField("max_pixels") else None,
    )


def options_to_wire(options: PixelOptions) -> image_pb2.ImageOptions:
    """The message of what a request chose about an image."""
    number = max(wire for wire, detail in _DETAILS.items() if detail == options.detail)
    return image_pb2.ImageOptions(
        detail=number,
        min_pixels=options.min_pixels,
        max_pixels=options.max_pixels,
    )


def identity_to_wire(identity: EncoderIdentity) -> image_pb2.EncoderIdentity:
    """The message of an identity."""
    return image_pb2.EncoderIdentity(
        model_id=identity.model_id,
        weights_digest=identity.weights_digest,
        processor_digest=identity.processor_digest,
        data_type=BY_NAME[identity.dtype].wire,
        width=identity.width,
        background=identity.background,
    )


def identity_from_wire(message: image_pb2.EncoderIdentity) -> EncoderIdentity | None:
    """The identity that a message states; None if its type is none that features can have.

    The strings are the sender's: they are clipped, since errors and logs repeat them.
    """
    kind = BY_WIRE.get(message.data_type)
    if kind is None or not kind.floating:
        return None
    return EncoderIdentity(
        model_id=_clipped(message.model_id),
        weights_digest=_clipped(message.weights_digest),
        processor_digest=_clipped(message.processor_digest),
        dtype=feature_type(kind.name),
        width=message.width,
        background=_clipped(message.background) or colours.WHITE,
    )


def _clipped(text: str) -> str:
    return "".join(c for c in text[:128] if c.isprintable())
