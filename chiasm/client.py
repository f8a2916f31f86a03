"""The Python client for internal services: `Client` blocks, `AsyncClient` awaits.

    from chiasm import Client
    from chiasm.conversation import user

    with Client(llm="127.0.0.1:50051", encoder="127.0.0.1:50061") as client:
        picture = client.encode(Path("cat.png"))
        print(client.generate([user("What is this?", picture)]).text)

Every failure is a `chiasm.ChiasmError` with its reason, its field and, where a later try may help,
`retry_after`.
"""

from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from chiasm import wire
from chiasm.conversation import (
    Embedding,
    Message,
    Named,
    Picture,
    Reference,
    Sampling,
    embedding_from_wire,
    encode_request,
    hold_request,
    messages_to_wire,
    pool_request,
    reference_from_wire,
)
from chiasm.errors import ChiasmError, Reason
from chiasm.forms import Form
from chiasm.rpc import limits, mtls
from chiasm.rpc.channel import EncoderMethods, LlmMethods, open_channel, open_sync_channel
from chiasm.rpc.secure_channel import ClientTls
from chiasm.v1 import llm_service_pb2

_S = llm_service_pb2
_DEFAULT_SAMPLING = Sampling()


@dataclass(frozen=True)
class Delta:
    """New text of one choice of a stream, its tokens, and their log-probabilities if asked for."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[llm_service_pb2.TokenLogprob, ...] = ()
    choice: int = 0


@dataclass(frozen=True)
class Choice:
    """One whole answer.

    Attributes:
        finish_reason: stop or length.
        logprobs: one for each token, if asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[llm_service_pb2.TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Answer:
    """The end of a stream, or a whole answer.

    Attributes:
        choices: as many as were asked for.
        usage: prompt, text, image, cached and completion tokens.
        timings: stage times, in seconds.
        image_paths: how the features of each picture were had, in prompt order.
    """

    choices: tuple[Choice, ...]
    usage: llm_service_pb2.Usage
    timings: llm_service_pb2.GenerateTimings
    image_paths: tuple[llm_service_pb2.ImagePath, ...]

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens of the first choice."""
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> str:
        """Why the first choice ended: stop or length."""
        return self.choices[0].finish_reason


@dataclass(frozen=True)
class MutualTls:
    """How a client shows who it is, and whom it expects.

    Files in PEM are read again when they change.

    Attributes:
        cert: the client's certificate with its chain.
        key: its key, not encrypted.
        ca: authorities that the services' certificates must come from.
        llm: DNS name (SAN) in the LLM service's certificate, whatever address is dialled.
        encoder: the same of the encoder's.
    """

    cert: Path
    key: Path
    ca: Path
    llm: str = ""
    encoder: str = ""


class _Security:
    """What the channels of one client need. Raises ValueError for files or names that cannot be."""

    def __init__(self, wanted: MutualTls | None) -> None:
        self._wanted = wanted
        self._latest: Callable[[], mtls.Material] | None = None
        if wanted is not None:
            # Loads a library that plaintext does not need.
            from chiasm.rpc.certificates import Certificates

            files = mtls.Files(wanted.cert, wanted.key, wanted.ca)
            self._latest = Certificates(files).looked

    def of(self, service: Literal["llm", "encoder"]) -> ClientTls | None:
        if self._wanted is None or self._latest is None:
            return None
        names = mtls.server_names(getattr(self._wanted, service))
        if len(names) != 1:
            raise ValueError(f"MutualTls.{service} is one DNS name of the service's certificate")
        return ClientTls(self._latest, names)


@dataclass(frozen=True)
class _Call:
    """What goes with every call of one client."""

    timeout: float | None
    request_id: str | None
    tenant: str

    def options(self) -> dict[str, Any]:
        metadata = ((limits.REQUEST_ID, self.request_id),) if self.request_id else ()
        return {"timeout": self.timeout, "metadata": metadata}


class Client:
    """Speaks to an LLM service, an encoder service, or both. Safe to share between threads.

    `timeout` is the deadline of each call in seconds; None waits for as long as the service does.
    Connections are plaintext, or mutual TLS with `tls`. Raises ValueError where that cannot be.
    """

    def __init__(
        self,
        llm: str | None = None,
        encoder: str | None = None,
        *,
        timeout: float | None = 600,
        tenant: str = "",
        tls: MutualTls | None = None,
    ) -> None:
        security = _Security(tls)
        self._llm = open_sync_channel(llm, security.of("llm")) if llm else None
        self._encoder = None
        if encoder:
            self._encoder = open_sync_channel(encoder, security.of("encoder"))
        self._timeout, self._tenant = timeout, tenant

    def encode(self, picture: bytes | Path, *, request_id: str | None = None) -> Embedding:
        """The embedding of a picture file."""
        channel = _present(self._encoder, "encoder")
        request = encode_request(picture, self._tenant)
        method = EncoderMethods.ENCODE_IMAGE
        return embedding_from_wire(
            method.call_sync(channel, request, **self._call(request_id).options())
        )

    def hold(
        self,
        picture: Picture | Reference | Named,
        *,
        return_features: bool = False,
        model: str = "",
        request_id: str | None = None,
    ) -> Reference:
        """Has the LLM service hold the features of a picture; a part of later conversations."""
        request = hold_request(picture, self._tenant, model, return_features)
        channel = _present(self._llm, "llm")
        options = self._call(request_id).options()
        return reference_from_wire(LlmMethods.HOLD_EMBEDDING.call_sync(channel, request, **options))

    def pool(
        self,
        picture: Picture | Reference | Named,
        *,
        model: str = "",
        request_id: str | None = None,
    ) -> npt.NDArray[np.float32]:
        """The mean of the picture's feature rows, scaled to length 1: `[width]`."""
        request = pool_request(picture, self._tenant, model)
        channel = _present(self._llm, "llm")
        options = self._call(request_id).options()
        reply = LlmMethods.POOL_IMAGE.call_sync(channel, request, **options)
        return np.array(reply.message.values, np.float32)

    def generate(
        self,
        messages: Sequence[Message],
        sampling: Sampling = _DEFAULT_SAMPLING,
        *,
        form: Form | None = None,
        model: str = "",
        request_id: str | None = None,
    ) -> Answer:
        """The whole answer to a conversation, in a form of `chiasm.forms` if one is given."""
        answer: Answer | None = None
        stream = self.stream(messages, sampling, form=form, model=model, request_id=request_id)
        with closing(stream):
            for event in stream:
                if isinstance(event, Answer):
                    answer = event
        return _ended(answer)

    def stream(
        self,
        messages: Sequence[Message],
        sampling: Sampling = _DEFAULT_SAMPLING,
        *,
        form: Form | None = None,
        model: str = "",
        request_id: str | None = None,
    ) -> Generator[Delta | Answer, None, None]:
        """Deltas as they come, then the Answer. Closing the iterator cancels the call."""
        request = _generate_request(messages, sampling, form, model, self._tenant)
        channel = _present(self._llm, "llm")
        options = self._call(request_id).options()
        return _assembled(LlmMethods.GENERATE.stream_sync(channel, request, **options))

    def count_tokens(
        self, messages: Sequence[Message], *, model: str = ""
    ) -> llm_service_pb2.CountTokensResponse:
        """Counts a prompt; nothing is encoded."""
        request = _count_request(messages, model, self._tenant)
        channel = _present(self._llm, "llm")
        options = self._call(None).options()
        return LlmMethods.COUNT_TOKENS.call_sync(channel, request, **options).message

    def get_model(self) -> llm_service_pb2.LlmServiceGetModelResponse:
        """Describes the loaded model and the service's limits."""
        request = wire.plain(_S.LlmServiceGetModelRequest())
        channel = _present(self._llm, "llm")
        options = self._call(None).options()
        return LlmMethods.GET_MODEL.call_sync(channel, request, **options).message

    def close(self) -> None:
        """Closes the connections; running calls are cancelled."""
        for channel in (self._llm, self._encoder):
            if channel is not None:
                channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _call(self, request_id: str | None) -> _Call:
        return _Call(self._timeout, request_id, self._tenant)


class AsyncClient:
    """The awaiting form of `Client`. Make it and close it on one event loop."""

    def __init__(
        self,
        llm: str | None = None,
        encoder: str | None = None,
        *,
        timeout: float | None = 600,
        tenant: str = "",
        tls: MutualTls | None = None,
    ) -> None:
        security = _Security(tls)
        self._llm = open_channel(llm, security.of("llm")) if llm else None
        self._encoder = open_channel(encoder, security.of("encoder")) if encoder else None
        self._timeout, self._tenant = timeout, tenant

    async def encode(self, picture: bytes | Path, *, request_id: str | None = None) -> Embedding:
        """The embedding of a picture file."""
        channel = _present(self._encoder, "encoder")
        request = encode_request(picture, self._tenant)
        options = self._call(request_id).options()
        return embedding_from_wire(
            await EncoderMethods.ENCODE_IMAGE.call(channel, request, **options)
        )

    async def hold(
        self,
        picture: Picture | Reference | Named,
        *,
        return_features: bool = False,
        model: str = "",
        request_id: str | None = None,
    ) -> Reference:
        """Has the LLM service hold the features of a picture; a part of later conversations."""
        request = hold_request(picture, self._tenant, model, return_features)
        channel = _present(self._llm, "llm")
        options = self._call(request_id).options()
        return reference_from_wire(
            await LlmMethods.HOLD_EMBEDDING.call(channel, request, **options)
        )

    async def pool(
        self,
        picture: Picture | Reference | Named,
        *,
        model: str = "",
        request_id: str | None = None,
    ) -> npt.NDArray[np.float32]:
        """The mean of the picture's feature rows, scaled to length 1: `[width]`."""
        request = pool_request(picture, self._tenant, model)
        channel = _present(self._llm, "llm")
        options = self._call(request_id).options()
        reply = await LlmMethods.POOL_IMAGE.call(channel, request, **options)
        return np.array(reply.message.values, np.float32)

    async def generate(
        self,
        messages: Sequence[Message],
        sampling: Sampling = _DEFAULT_SAMPLING,
        *,
        form: Form | None = None,
        model: str = "",
        request_id: str | None = None,
    ) -> Answer:
        """The whole answer to a conversation, in a form of `chiasm.forms` if one is given."""
        answer: Answer | None = None
        stream = self.stream(messages, sampling, form=form, model=model, request_id=request_id)
        async with aclosing(stream):
            async for event in stream:
                if isinstance(event, Answer):
                    answer = event
        return _ended(answer)

    def stream(
        self,
        messages: Sequence[Message],
        sampling: Sampling = _DEFAULT_SAMPLING,
        *,
        form: Form | None = None,
        model: str = "",
        request_id: str | None = None,
    ) -> AsyncGenerator[Delta | Answer, None]:
        """Deltas as they come, then the Answer. Closing the iterator cancels the call."""
        request = _generate_request(messages, sampling, form, model, self._tenant)
        channel = _present(self._llm, "llm")
        options = self._call(request_id).options()
        return _assembled_async(LlmMethods.GENERATE.stream(channel, request, **options))

    async def count_tokens(
        self, messages: Sequence[Message], *, model: str = ""
    ) -> llm_service_pb2.CountTokensResponse:
        """Counts a prompt; nothing is encoded."""
        request = _count_request(messages, model, self._tenant)
        channel = _present(self._llm, "llm")
        options = self._call(None).options()
        return (await LlmMethods.COUNT_TOKENS.call(channel, request, **options)).message

    async def get_model(self) -> llm_service_pb2.LlmServiceGetModelResponse:
        """Describes the loaded model and the service's limits."""
        request = wire.plain(_S.LlmServiceGetModelRequest())
        channel = _present(self._llm, "llm")
        options = self._call(None).options()
        return (await LlmMethods.GET_MODEL.call(channel, request, **options)).message

    async def close(self) -> None:
        """Closes the connections; running calls are cancelled."""
        for channel in (self._llm, self._encoder):
            if channel is not None:
                await channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def _call(self, request_id: str | None) -> _Call:
        return _Call(self._timeout, request_id, self._tenant)


class _Text:
    """Joins the deltas of one stream."""

    def __init__(self) -> None:
        self._deltas: list[Delta] = []

    def read(self, message: llm_service_pb2.GenerateResponse) -> Iterator[Delta | Answer]:
        for delta in message.delta.deltas:
            told = tuple(delta.logprobs)
            read = Delta(delta.text, tuple(delta.token_ids), told, delta.choice_index)
            self._deltas.append(read)
            yield read
        if message.HasField("finished"):
            yield self._answer(message.finished)

    def _choice(self, end: llm_service_pb2.FinishedChoice) -> Choice:
        deltas = [delta for delta in self._deltas if delta.choice == end.choice_index]
        reason = _S.FinishReason.Name(end.reason)
        return Choice(
            text="".join(delta.text for delta in deltas),
            token_ids=tuple(token for delta in deltas for token in delta.token_ids),
            finish_reason=reason.removeprefix("FINISH_REASON_").lower(),
            logprobs=tuple(told for delta in deltas for told in delta.logprobs),
        )

    def _answer(self, end: llm_service_pb2.Finished) -> Answer:
        return Answer(
            choices=tuple(self._choice(choice) for choice in end.choices),
            usage=end.usage,
            timings=end.timings,
            image_paths=tuple(end.image_paths),
        )


def _assembled(responses: Any) -> Generator[Delta | Answer, None, None]:
    text = _Text()
    with closing(responses):
        for response in responses:
            yield from text.read(response.message)


async def _assembled_async(responses: Any) -> AsyncGenerator[Delta | Answer, None]:
    text = _Text()
    async with aclosing(responses):
        async for response in responses:
            for event in text.read(response.message):
                yield event


def _generate_request(
    messages: Sequence[Message], sampling: Sampling, form: Form | None, model: str, tenant: str
) -> wire.Wired[llm_service_pb2.GenerateRequest]:
    buffers = wire.Buffers()
    message = _S.GenerateRequest(
        model=model,
        messages=messages_to_wire(messages, buffers),
        sampling=sampling.to_wire(),
        tenant=tenant,
        constraint=form,
    )
    return wire.Wired(message, buffers)


def _count_request(
    messages: Sequence[Message], model: str, tenant: str
) -> wire.Wired[llm_service_pb2.CountTokensRequest]:
    buffers = wire.Buffers()
    wired = messages_to_wire(messages, buffers)
    return wire.Wired(_S.CountTokensRequest(model=model, messages=wired, tenant=tenant), buffers)


def _present(channel: Any, name: str) -> Any:
    if channel is None:
        raise ValueError(f"this client was made without an address: pass {name}='host:port'")
    return channel


def _ended(answer: Answer | None) -> Answer:
    if answer is None:
        raise ChiasmError(Reason.INTERNAL, "The stream ended without its end.")
    return answer
