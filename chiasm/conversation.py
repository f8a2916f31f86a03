"""How a Python program writes a conversation, and how it becomes a request.

    [system("Answer with one word."), user("What is this?", Path("cat.png")), assistant("A cat.")]

A part is text (`str`), a picture file (`bytes` or `Path`), an `Embedding` from an encoder, a float
array `[rows, width]` of one's own, or a `Reference` to what the LLM service holds. `Named` gives
the first four a name of one's own; a name alone stands for what was sent under it before.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from chiasm import tensors, wire
from chiasm.errors import ChiasmError, Reason, within
from chiasm.v1 import encoder_service_pb2, image_pb2, llm_service_pb2


@dataclass(frozen=True)
class Embedding:
    """The features of one picture as an encoder gave them.

    Attributes:
        features: shape `[row_count, width]`.
        message: all metadata, without the tensor's bytes.
        source: how the encoder had them: computed, cache or shared.
        encoder_name: the instance that answered.
        timings: stage times, in seconds.
        levels: further feature levels of the families that have them, each shaped as `features`.
    """

    features: tensors.Array
    message: image_pb2.ImageEmbedding
    source: str
    encoder_name: str
    timings: encoder_service_pb2.EncodeTimings
    levels: tuple[tensors.Array, ...] = ()

    @property
    def placeholder_count(self) -> int:
        """Prompt tokens that the picture takes."""
        return self.message.placeholder_count

    def to_numpy(self) -> npt.NDArray[np.float32]:
        """The features as float32, shape `[row_count, width]`."""
        return self.features.to_float32()


@dataclass(frozen=True)
class Reference:
    """Features that the LLM service holds for this tenant.

    Attributes:
        expires_unix_seconds: when it is gone at the latest; 0 if not known.
        message: all metadata, without the tensor's bytes; None if not known.
        features: shape `[row_count, width]`, if they were asked for.
        levels: further feature levels, if there are any and they were asked for.
    """

    id: str
    expires_unix_seconds: int = 0
    message: image_pb2.ImageEmbedding | None = field(default=None, compare=False, repr=False)
    features: tensors.Array | None = field(default=None, compare=False, repr=False)
    levels: tuple[tensors.Array, ...] = field(default=(), compare=False, repr=False)


Picture = bytes | Path | Embedding | npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Named:
    """A picture under a name of the caller's own, or the name alone once it was sent."""

    name: str
    picture: Picture | None = None


Part = str | Picture | Reference | Named


@dataclass(frozen=True)
class Message:
    """One message of a conversation."""

    role: "llm_service_pb2.Role.ValueType"
    parts: tuple[Part, ...]


def system(*parts: Part) -> Message:
    """Instructions."""
    return Message(llm_service_pb2.ROLE_SYSTEM, parts)


def user(*parts: Part) -> Message:
    """What the person says, with pictures where they stand in it."""
    return Message(llm_service_pb2.ROLE_USER, parts)


def assistant(*parts: Part) -> Message:
    """What the model answered before."""
    return Message(llm_service_pb2.ROLE_ASSISTANT, parts)


@dataclass(frozen=True)
class Sampling:
    """How an answer is drawn; None leaves a value to the checkpoint and the service.

    `choices` is how many answers are wanted. `top_logprobs`, 0 to 20, asks for log-probabilities,
    and for those of as many of the likeliest tokens in each token's place.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    choices: int | None = None
    top_logprobs: int | None = None

    def to_wire(self) -> llm_service_pb2.SamplingParameters:
        """The message; absent values stay absent."""
        return llm_service_pb2.SamplingParameters(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            max_token_count=self.max_tokens,
            min_token_count=self.min_tokens,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias,
            choice_count=self.choices,
            logprobs=None if self.top_logprobs is None else True,
            top_logprob_count=self.top_logprobs,
        )


GREEDY = Sampling(temperature=0)


def messages_to_wire(
    messages: Sequence[Message], buffers: wire.Buffers
) -> list[llm_service_pb2.Message]:
    """The messages of a request; pictures and tensors join `buffers` without a copy."""
    return [_message(number, message, buffers) for number, message in enumerate(messages)]


def encode_request(picture: bytes | Path, tenant: str) -> wire.Wired[Any]:
    """The request that encodes one picture file."""
    buffers = wire.Buffers()
    image = image_pb2.Image(data=buffers.put(_file(picture)))
    message = encoder_service_pb2.EncodeImageRequest(image=image, tenant=tenant)
    return wire.Wired(message, buffers)


def hold_request(
    picture: "Picture | Reference | Named", tenant: str, model: str, return_features: bool
) -> wire.Wired[llm_service_pb2.HoldEmbeddingRequest]:
    """The request that holds the features of one picture."""
    buffers = wire.Buffers()
    message = llm_service_pb2.HoldEmbeddingRequest(
        model=model, tenant=tenant, part=_part(picture, buffers), return_features=return_features
    )
    return wire.Wired(message, buffers)


def pool_request(
    picture: "Picture | Reference | Named", tenant: str, model: str
) -> wire.Wired[llm_service_pb2.PoolImageRequest]:
    """The request that makes one vector of a picture."""
    buffers = wire.Buffers()
    message = llm_service_pb2.PoolImageRequest(
        model=model, tenant=tenant, part=_part(picture, buffers)
    )
    return wire.Wired(message, buffers)


def reference_from_wire(
    reply: wire.Wired[llm_service_pb2.HoldEmbeddingResponse],
) -> Reference:
    """The reference of a reply, its features over the reply's own bytes."""
    message, embedding = reply.message, reply.message.embedding
    bare = _without_tensors(embedding)
    name, expires = message.reference.id, message.expires_unix_seconds
    if not embedding.features.data:
        return Reference(name, expires, bare)
    features, *levels = _arrays(embedding, reply.buffers)
    return Reference(name, expires, bare, features, tuple(levels))


def embedding_from_wire(
    reply: wire.Wired[encoder_service_pb2.EncodeImageResponse],
) -> Embedding:
    """The embedding of an encoder's reply, over the reply's own bytes."""
    message = reply.message
    features, *levels = _arrays(message.embedding, reply.buffers)
    bare = _without_tensors(message.embedding)
    source = encoder_service_pb2.EncodeSource.Name(message.source)
    return Embedding(
        features=features,
        message=bare,
        source=source.removeprefix("ENCODE_SOURCE_").lower(),
        encoder_name=message.encoder_name,
        timings=message.timings,
        levels=tuple(levels),
    )


def _arrays(embedding: image_pb2.ImageEmbedding, buffers: wire.Buffers) -> list[tensors.Array]:
    """Features and levels over the message's own bytes."""
    arrays = []
    for number, tensor in enumerate((embedding.features, *embedding.levels)):
        with within(f"embedding.levels[{number - 1}]" if number else "embedding.features"):
            arrays.append(tensors.from_wire(tensor, buffers.get(tensor.data)))
    return arrays


def _without_tensors(embedding: image_pb2.ImageEmbedding) -> image_pb2.ImageEmbedding:
    bare = image_pb2.ImageEmbedding()
    bare.CopyFrom(embedding)
    bare.ClearField("features")
    bare.ClearField("levels")
    return bare


def _message(number: int, message: Message, buffers: wire.Buffers) -> llm_service_pb2.Message:
    parts = []
    for index, part in enumerate(message.parts):
        with within(f"messages[{number}].parts[{index}]"):
            parts.append(_part(part, buffers))
    return llm_service_pb2.Message(role=message.role, parts=parts)


def _part(part: Part, buffers: wire.Buffers) -> llm_service_pb2.Part:
    if isinstance(part, str):
        return llm_service_pb2.Part(text=part)
    if isinstance(part, Reference):
        return llm_service_pb2.Part(reference=image_pb2.EmbeddingReference(id=part.id))
    if isinstance(part, Named):
        named = llm_service_pb2.Part()
        if part.picture is not None:
            named.CopyFrom(_part(part.picture, buffers))
        named.alias = part.name
        return named
    if isinstance(part, Embedding):
        embedding = image_pb2.ImageEmbedding()
        embedding.CopyFrom(part.message)
        embedding.features.CopyFrom(tensors.to_wire(part.features, buffers))
        del embedding.levels[:]
        embedding.levels.extend(tensors.to_wire(level, buffers) for level in part.levels)
        return llm_service_pb2.Part(embedding=embedding)
    if isinstance(part, np.ndarray):
        features = tensors.to_wire(tensors.from_numpy(part), buffers)
        return llm_service_pb2.Part(embedding=image_pb2.ImageEmbedding(features=features))
    return llm_service_pb2.Part(image=image_pb2.Image(data=buffers.put(_file(part))))


def _file(picture: bytes | Path) -> bytes:
    if isinstance(picture, Path):
        return picture.read_bytes()
    if isinstance(picture, bytes):
        return picture
    raise ChiasmError(
        Reason.REQUEST_INVALID,
        "A part is text, a picture's bytes or Path, an Embedding, a numpy array, a Reference or a "
        "Named picture.",
    )
