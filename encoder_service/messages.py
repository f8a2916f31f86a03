"""Protobuf messages to and from the values used here: the one place that knows their fields."""

from dataclasses import dataclass

from chiasm import tensors, torch_tensors
from chiasm.errors import ChiasmError, Reason, sentence
from chiasm.images import FORMATS, ImageLimits
from chiasm.models.contract import ContractError, ImageContract, PixelOptions
from chiasm.models.identity import EncoderIdentity
from chiasm.models.vision import ImageFeatures
from chiasm.models.wire import identity_from_wire, identity_to_wire, options_from_wire
from chiasm.rpc import limits
from chiasm.tensors import Array
from chiasm.v1 import encoder_service_pb2 as pb
from chiasm.v1 import image_pb2
from chiasm.wire import Buffers, Wired, plain
from encoder_service.batcher import StageTimes
from encoder_service.single_flight import Source
from encoder_service.tower import refusal

Request = pb.EncodeImageRequest | pb.EncodeImageStreamRequest

_SOURCES = {
    Source.COMPUTED: pb.ENCODE_SOURCE_COMPUTED,
    Source.SHARED: pb.ENCODE_SOURCE_SHARED,
    Source.CACHE: pb.ENCODE_SOURCE_CACHE,
}


@dataclass(frozen=True)
class Picture:
    """What a caller asks to encode."""

    data: memoryview
    options: PixelOptions
    tenant: str


@dataclass(frozen=True)
class Answer:
    """What a caller gets."""

    features: ImageFeatures
    identity: EncoderIdentity
    content_digest: bytes
    source: Source
    times: StageTimes
    total_seconds: float
    encoder_name: str


def read_picture(request: Wired[Request], most_bytes: int) -> Picture:
    """The picture of a request. Raises ChiasmError with the field that is missing or refused."""
    message = request.message
    if not message.HasField("image"):
        raise ChiasmError(Reason.REQUEST_INVALID, "The request has no image; set it.", "image")
    data = request.data(message.image.data)
    if len(data) > most_bytes:
        # Before its digest is computed: a message may be far larger than any picture.
        text = f"the image file has {len(data)} bytes; the limit is {most_bytes}"
        code = "image_file_too_large"
        raise refusal(Reason.IMAGE_TOO_LARGE, f"{text}; send a smaller file", code)
    return Picture(data, _read_options(message.image.options), message.tenant)


def _read_options(options: image_pb2.ImageOptions) -> PixelOptions:
    try:
        return options_from_wire(options)
    except ContractError as error:
        raise ChiasmError(
            Reason.REQUEST_INVALID, sentence(error.message), "image.options.detail"
        ) from error


def check_expected(request: Request, identity: EncoderIdentity) -> None:
    """Raises ENCODER_MISMATCH with both identities unless the caller expects none or this one."""
    if not request.HasField("expected_identity"):
        return
    expected = identity_from_wire(request.expected_identity)
    if expected == identity:
        return
    wanted = expected.describe() if expected else "one of no floating type"
    raise ChiasmError(
        Reason.ENCODER_MISMATCH,
        f"The caller expects the encoder {wanted}; this one is {identity.describe()}. Ask an "
        "encoder that serves the same checkpoint under the same name and type.",
        "expected_identity",
        metadata={"expected": wanted, "actual": identity.describe()},
    )


def check_unary(reply: Wired[pb.EncodeImageResponse]) -> None:
    """Raises TENSOR_TOO_LARGE above `limits.MAX_UNARY_TENSOR_BYTES`."""
    byte_count = reply.buffers.byte_count
    if byte_count > limits.MAX_UNARY_TENSOR_BYTES:
        raise ChiasmError(
            Reason.TENSOR_TOO_LARGE,
            f"The embedding has {byte_count} bytes and a unary reply takes at most "
            f"{limits.MAX_UNARY_TENSOR_BYTES}; call EncodeImageStream.",
        )


def to_reply(answer: Answer) -> Wired[pb.EncodeImageResponse]:
    """The reply, whole; `chiasm.rpc.embedding_stream` cuts it into chunks where it must."""
    buffers = Buffers()
    embedding = _embedding(answer)
    features, *levels = (tensors.to_wire(array, buffers) for array in _arrays(answer.features))
    embedding.features.CopyFrom(features)
    embedding.levels.extend(levels)
    response = pb.EncodeImageResponse(
        embedding=embedding,
        source=_SOURCES[answer.source],
        timings=_timings(answer),
        encoder_name=answer.encoder_name,
    )
    return Wired(response, buffers)


def to_model(
    contract: ImageContract, family: str, most: ImageLimits, encoder_name: str, version: str
) -> Wired[pb.EncoderServiceGetModelResponse]:
    """The description of the loaded vision half and the limits of the server."""
    return plain(
        pb.EncoderServiceGetModelResponse(
            identity=identity_to_wire(contract.expected_identity),
            family=family,
            level_count=contract.level_count,
            max_image_bytes=most.max_bytes,
            max_image_pixels=most.max_pixels,
            max_unary_bytes=limits.MAX_UNARY_TENSOR_BYTES,
            image_formats=[name.lower() for name in FORMATS],
            encoder_name=encoder_name,
            version=version,
        )
    )


def _arrays(features: ImageFeatures) -> list[Array]:
    return [torch_tensors.from_torch(rows) for rows in (features.rows, *features.levels)]


def _embedding(answer: Answer) -> image_pb2.ImageEmbedding:
    """The embedding without its tensors."""
    features = answer.features
    height, width = features.image_size
    embedding = image_pb2.ImageEmbedding(
        row_count=features.rows.shape[0],
        placeholder_count=features.placeholder_count,
        image_size=image_pb2.ImageSize(height=height, width=width),
        content_digest=answer.content_digest,
        identity=identity_to_wire(answer.identity),
    )
    if features.grid_thw is not None:
        temporal, rows, columns = features.grid_thw
        embedding.grid_thw.CopyFrom(
            image_pb2.GridThw(temporal=temporal, height=rows, width=columns)
        )
    return embedding


def _timings(answer: Answer) -> pb.EncodeTimings:
    return pb.EncodeTimings(
        preprocess_seconds=answer.times.preprocess,
        queue_seconds=answer.times.queue,
        forward_seconds=answer.times.forward,
        total_seconds=answer.total_seconds,
    )
