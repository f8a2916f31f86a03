"""Identities on the wire: `chiasm.v1.EncoderIdentity` to and from `EncoderIdentity`."""

from chiasm.models.identity import EncoderIdentity, feature_type
from chiasm.tensors import BY_NAME, BY_WIRE
from chiasm.v1 import image_pb2


def identity_to_wire(identity: EncoderIdentity) -> image_pb2.EncoderIdentity:
    """The message of an identity."""
    return image_pb2.EncoderIdentity(
        model_id=identity.model_id,
        weights_digest=identity.weights_digest,
        processor_digest=identity.processor_digest,
        data_type=BY_NAME[identity.dtype].wire,
        width=identity.width,
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
    )


def _clipped(text: str) -> str:
    return "".join(c for c in text[:128] if c.isprintable())
