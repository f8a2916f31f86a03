"""One encoder service as the pool sees it: its connections, probes, calls and standing.

A probe states the identity while the encoder is unknown or out, and the load while it is asked: it
is answered at once even where the tower is busy, so that two unanswered ones mean silence. Calls
that wait for a silent encoder are given up, and their pictures tried elsewhere.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from chiasm import telemetry, wire
from chiasm.errors import ChiasmError, Reason
from chiasm.models.contract import ImageContract
from chiasm.models.identity import EncoderIdentity
from chiasm.models.wire import identity_from_wire, identity_to_wire, options_to_wire
from chiasm.rpc import limits
from chiasm.rpc.bundle import CONNECTIONS, Bundle
from chiasm.rpc.channel import EncoderMethods
from chiasm.rpc.context import seconds_left
from chiasm.rpc.embedding_stream import receive_embedding
from chiasm.rpc.secure_channel import ClientTls
from chiasm.tensors import BY_NAME
from chiasm.v1 import encoder_service_pb2, image_pb2
from llm_service.embeddings import Rows, check_embedding
from llm_service.request import CallerEmbedding
from llm_service.vision.attempts import Lie, Silence
from llm_service.vision.source import Fetched, Sought
from llm_service.vision.standing import Answer, Cause, Standing

T = TypeVar("T")
_E = encoder_service_pb2
# Checking so much takes about as long as handing it to a thread.
_SMALL_BYTES = 1 << 20


@dataclass(frozen=True)
class EncoderSettings:
    """How one encoder is watched and asked.

    Attributes:
        silence_seconds: after which an encoder that answers no probe is given up.
        attempt_seconds: longest that one attempt to encode a picture may take.
        connections: HTTP/2 connections, so that a large tensor does not hold back small ones.
        unary_bytes: embeddings above this come in chunks with a checksum.
    """

    silence_seconds: float
    attempt_seconds: float
    connections: int = CONNECTIONS
    unary_bytes: int = limits.STREAMED_ABOVE_BYTES


class Encoder:
    """One encoder service. `on_change` is told of each change of standing."""

    def __init__(
        self,
        address: str,
        contract: ImageContract,
        settings: EncoderSettings,
        on_change: Callable[[Cause | None], None],
        probe_interval: Callable[[], float],
        others_ready: Callable[["Encoder"], bool],
        tls: ClientTls | None = None,
    ) -> None:
        self.address = address
        self.name = address
        self.standing = Standing()
        # What it said it is when it was last found foreign.
        self.found: EncoderIdentity | None = None
        # Rows asked for and not answered yet.
        self.outstanding = 0
        self._contract = contract
        self._identity = identity_to_wire(contract.expected_identity)
        self._settings = settings
        self._on_change = on_change
        self._probe_interval = probe_interval
        self._others_ready = others_ready
        # time.monotonic() of the last sign of life.
        self._heard_at = time.monotonic()
        self._bundle = Bundle(address, settings.connections, tls)
        self._bundle.connect()
        self._calls: set[asyncio.Future[Any]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._probe_now = asyncio.Event()
        self._watching = asyncio.create_task(self._watch())

    async def ask(self, sought: Sought) -> Fetched:
        """The checked rows of a picture, in one attempt.

        Raises Silence, Lie, or the ChiasmError that the encoder told.
        """
        rows = sought.form.row_count
        began = time.monotonic()
        self.outstanding += rows
        owed = self.outstanding
        self._idle.clear()
        try:
            reply = await self._given_up_if_silent(self._call(sought))
        finally:
            self.outstanding -= rows
            if not self.outstanding:
                self._idle.set()
        self._heard_at = time.monotonic()
        fetched = await self._read_aside(reply, sought, began)
        self.standing.answered(Answer(fetched.fetch_seconds, owed))
        return fetched

    def eject(self, cause: Cause, detail: str = "") -> None:
        """Asks it no more until a probe proves it, and says so in the log."""
        if self.standing.eject(cause, time.monotonic()):
            self._tell_ejected(cause, detail)

    def failed(self, detail: str) -> None:
        """Counts a failure that the encoder told of itself; too many in a row eject it."""
        if self.standing.failed(time.monotonic()):
            self._tell_ejected(Cause.FAILING, detail)

    def _tell_ejected(self, cause: Cause, detail: str) -> None:
        telemetry.logger().warning(
            "encoder ejected", encoder=self.address, cause=cause.value, detail=detail
        )
        self._probe_now.set()
        self._on_change(cause)

    async def retire(self) -> None:
        """Lets calls end, then closes; probes go on till then: no call must wait for a hung one."""
        await self._idle.wait()
        await self.close()

    async def close(self) -> None:
        """Closes at once; calls fail."""
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)
        await self._bundle.close()

    async def _watch(self) -> None:
        while True:
            self._probe_now.clear()
            await self._probe()
            wait = self.standing.until_probe(self._probe_interval())
            try:
                async with asyncio.timeout(wait):
                    await self._probe_now.wait()
                # A fault has just shown: what caused it may need a moment to pass.
                await asyncio.sleep(self.standing.until_probe(0))
            except TimeoutError:
                continue

    async def _probe(self) -> None:
        try:
            if self.standing.ready:
                await self._probe_load()
            else:
                await self._probe_identity()
        except ChiasmError as error:
            self._probe_failed(error)
        except Exception:
            # A probe that cannot be read says no more than one that failed.
            telemetry.logger().exception("fault", encoder=self.address)
            self.standing.probe_failed()

    async def _probe_load(self) -> None:
        request = wire.plain(_E.EncoderServiceGetLoadRequest())
        try:
            await self._ask_quickly(EncoderMethods.GET_LOAD, request)
        except ChiasmError as error:
            if error.reason is not Reason.DEADLINE:
                raise
            # Once more: a busy machine may miss one.
            await self._ask_quickly(EncoderMethods.GET_LOAD, request)
        self.standing.proved(time.monotonic())

    async def _probe_identity(self) -> None:
        request = wire.plain(_E.EncoderServiceGetModelRequest())
        reply = (await self._ask_quickly(EncoderMethods.GET_MODEL, request)).message
        found = identity_from_wire(reply.identity)
        if found != self._contract.expected_identity:
            self.standing.probe_failed()
            self._foreign(found)
            return
        self.name = reply.encoder_name[:256] or self.address
        if self.standing.proved(time.monotonic()):
            telemetry.logger().info("encoder ready", encoder=self.address, name=self.name)
            self._on_change(None)

    def _foreign(self, found: EncoderIdentity | None) -> None:
        self.found = found
        if self.standing.state == "foreign":
            return
        self.standing.eject(Cause.FOREIGN, time.monotonic())
        told = "an unreadable identity" if found is None else found.describe()
        telemetry.logger().error(
            "encoder of another model",
            encoder=self.address,
            found=told,
            expected=self._contract.expected_identity.describe(),
        )
        self._on_change(Cause.FOREIGN)

    def _probe_failed(self, error: ChiasmError) -> None:
        self.standing.probe_failed()
        if error.reason is Reason.DEADLINE:
            self.eject(Cause.SILENT, "it answers no probe")
        else:
            self.eject(Cause.UNREACHABLE, str(error))
            # An encoder that drains refuses probes and still answers what it was asked: without
            # another it is waited for. One that hangs may look the same once a connection broke.
            if not (self._is_silent() and self._others_ready(self)):
                return
        for call in tuple(self._calls):
            call.cancel()

    def _is_silent(self) -> bool:
        return time.monotonic() - self._heard_at >= self._settings.silence_seconds

    async def _ask_quickly(self, method: Any, request: wire.Wired[Any]) -> wire.Wired[Any]:
        # Half of the time each: silence is two unanswered probes.
        limit = self._settings.silence_seconds / 2
        with self._bundle.lent(0) as channel:
            answer: wire.Wired[Any] = await method.call(channel, request, timeout=limit)
        self._heard_at = time.monotonic()
        return answer

    async def _given_up_if_silent(self, call: Awaitable[T]) -> T:
        running = asyncio.ensure_future(call)
        self._calls.add(running)
        try:
            return await running
        except asyncio.CancelledError:
            if _left():
                raise
            raise Silence from None
        finally:
            running.cancel()
            self._calls.discard(running)

    async def _call(self, sought: Sought) -> wire.Wired[Any]:
        left = seconds_left(sought.asked.deadline)
        how: dict[str, Any] = {
            "timeout": max(0.001, min(left, self._settings.attempt_seconds)),
            "metadata": ((limits.REQUEST_ID, sought.asked.request_id),),
        }
        expected = self._expected_bytes(sought)
        try:
            with self._bundle.lent(expected) as channel:
                if expected <= self._settings.unary_bytes:
                    request = self._request(_E.EncodeImageRequest, sought)
                    return await EncoderMethods.ENCODE_IMAGE.call(channel, request, **how)
                streamed = self._request(_E.EncodeImageStreamRequest, sought)
                method = EncoderMethods.ENCODE_IMAGE_STREAM
                return await receive_embedding(method.stream(channel, streamed, **how))
        except ChiasmError as error:
            raise _as_attempt(error, sought) from error

    def _expected_bytes(self, sought: Sought) -> int:
        contract = self._contract
        item = BY_NAME[contract.expected_identity.dtype].item_bytes
        return sought.form.row_count * contract.width * item * (1 + contract.level_count)

    def _request(self, kind: Any, sought: Sought) -> wire.Wired[Any]:
        buffers = wire.Buffers()
        image = sought.image
        message = kind(
            image=image_pb2.Image(
                data=buffers.put(image.data), options=options_to_wire(image.options)
            ),
            tenant=sought.asked.tenant,
            expected_identity=self._identity,
        )
        return wire.Wired(message, buffers)

    async def _read_aside(self, reply: wire.Wired[Any], sought: Sought, began: float) -> Fetched:
        """`_read`, off the event loop where there is much to check."""
        if reply.buffers.byte_count <= _SMALL_BYTES:
            return self._read(reply, sought, began)
        return await asyncio.to_thread(self._read, reply, sought, began)

    def _read(self, reply: wire.Wired[Any], sought: Sought, began: float) -> Fetched:
        message = reply.message
        rows = self._checked(message.embedding, reply.buffers, sought)
        taken = time.monotonic() - began
        claimed = message.timings.total_seconds
        return Fetched(
            rows=rows,
            origin="remote",
            encoder_name=message.encoder_name[:256] or self.address,
            encoder_cache_hit=message.source == _E.ENCODE_SOURCE_CACHE,
            # NaN, which JSON has not, and times that cannot be are no times.
            encode_seconds=claimed if 0 <= claimed <= taken else 0.0,
            fetch_seconds=taken,
        )

    def _checked(
        self, embedding: image_pb2.ImageEmbedding, buffers: wire.Buffers, sought: Sought
    ) -> Rows:
        levels = tuple(buffers.get(level.data) for level in embedding.levels)
        features = buffers.get(embedding.features.data)
        try:
            rows = check_embedding(CallerEmbedding(embedding, features, levels), self._contract)
        except ChiasmError as error:
            raise _lie(error) from error
        if not rows.identity_checked:
            raise Lie(_broken("it sent no identity"))
        if embedding.content_digest != sought.digest:
            raise Lie(_broken("it is not about the picture that was asked for"))
        if rows.form != sought.form:
            raise Lie(
                _broken(
                    f"it has {rows.form.row_count} rows, the prompt has room for "
                    f"{sought.form.row_count}"
                )
            )
        return rows


def _left() -> bool:
    """Whether the caller of this task left, rather than that a call was given up."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _as_attempt(error: ChiasmError, sought: Sought) -> Exception:
    if error.reason is Reason.DEADLINE and seconds_left(sought.asked.deadline) > 0:
        return Silence()
    # Our own reader found the stream broken; an encoder cannot say this of a picture.
    if error.reason is Reason.TENSOR_INVALID:
        return _lie(error)
    return error


def _lie(error: ChiasmError) -> Exception:
    if error.reason is Reason.ENCODER_MISMATCH:
        return ChiasmError(error.reason, error.message, metadata={"origin": "encoder"})
    return Lie(_broken(str(error)))


def _broken(detail: str) -> ChiasmError:
    return ChiasmError(Reason.INTERNAL, f"The encoder's answer breaks the contract: {detail}.")
