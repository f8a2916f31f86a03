"""Runs a gRPC service: raw bytes in, typed answers or typed errors out, health, metrics, drain.

A service gives its methods as coroutines over `Wired` messages. Everything around them is here and
the same for all: the request id, one log line and one count a call, the map of errors to statuses,
and the order of a stop (see `serve`).
"""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from chiasm import telemetry, wire
from chiasm.errors import INTERNAL_TEXT, ChiasmError, Reason, to_status
from chiasm.rpc import limits
from chiasm.rpc.callers import CallerGuard, ServerTls, server_credentials
from chiasm.rpc.context import accepted_request_id, caller_trace, value_of
from chiasm.rpc.health import MAIN_WATCHES, Health, HealthServicer
from chiasm.tracing import names, spans

Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response", bound=Message)


@dataclass(frozen=True)
class Call:
    """What a method knows of its call besides the message."""

    request_id: str
    # time.monotonic() at which the caller gives up; None: never.
    deadline: float | None
    # Sends the reply's headers: the request is checked and admitted, an answer will come.
    accept: Callable[[], Awaitable[None]]
    # Written by the method, read by the log line of the call. Never holds content.
    notes: dict[str, object]


Unary = Callable[[wire.Wired[Any], Call], Awaitable[wire.Wired[Any]]]
Streaming = Callable[[wire.Wired[Any], Call], AsyncIterator[wire.Wired[Any]]]


@dataclass(frozen=True)
class UnaryMethod(Generic[Request]):
    """A method that answers once."""

    request: type[Request]
    run: Unary


@dataclass(frozen=True)
class StreamMethod(Generic[Request]):
    """A method that answers with a stream."""

    request: type[Request]
    run: Streaming


@dataclass(frozen=True)
class Service:
    """A service to be served: its full name and its methods by name."""

    name: str
    methods: Mapping[str, UnaryMethod[Any] | StreamMethod[Any]]


@dataclass(frozen=True)
class ServerSettings:
    """Where and how long a server serves."""

    host: str
    port: int
    # Seconds of serving on after health says NOT_SERVING, so that callers notice.
    drain_seconds: float
    # Seconds that running calls have to end after that.
    grace_seconds: float
    # Seconds after which a connection is renewed, so that new replicas get their share.
    connection_age_seconds: float


# Methods that services ask of one another all the time, on nobody's behalf: their lines are noise.
_PROBES = frozenset({"GetLoad", "GetModel"})
# That running calls have, once what they wait for has failed, to tell it.
_LAST_WORDS_SECONDS = 1.0


class CallMetrics:
    """Counts and times of calls, in one process's registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.calls = Counter(
            "chiasm_rpc_calls",
            "Calls ended, by method, gRPC status and reason.",
            ["method", "status", "reason"],
            registry=registry,
        )
        self.seconds = Histogram(
            "chiasm_rpc_call_seconds",
            "Time from a call's arrival to its end.",
            ["method"],
            buckets=telemetry.DURATION_BUCKETS,
            registry=registry,
        )
        self.active = Gauge(
            "chiasm_rpc_active_calls", "Calls without an answer yet.", registry=registry
        )


class Server:
    """A listening server. Health starts as NOT_SERVING; `ready` flips it.

    `health` is what the process says of itself on other ports too; None: here alone. With `tls` it
    serves mutual TLS and nothing else.
    """

    def __init__(
        self,
        settings: ServerSettings,
        service: Service,
        registry: CollectorRegistry,
        *,
        health: Health | None = None,
        tls: ServerTls | None = None,
    ) -> None:
        self._settings = settings
        self._name = service.name
        self._metrics = CallMetrics(registry)
        self._health = health or Health(service.name)
        self._tls = tls
        guard = [CallerGuard(tls.allowed, registry)] if tls else []
        self._server = grpc.aio.server(options=_options(settings), interceptors=guard)
        handlers = {name: self._handler(name, method) for name, method in service.methods.items()}
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service.name, handlers),)
        )
        answers = HealthServicer(self._health, MAIN_WATCHES)
        health_pb2_grpc.add_HealthServicer_to_server(answers, self._server)
        names = (service.name, "grpc.health.v1.Health", reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        self.port = 0
        self.draining = False

    async def start(self) -> None:
        """Binds and listens. Raises OSError if the port is taken."""
        address = f"{self._settings.host}:{self._settings.port}"
        try:
            self.port = self._bind(address)
        except RuntimeError:
            raise OSError(f"cannot listen on {address}: is the port taken?") from None
        await self._server.start()

    def _bind(self, address: str) -> int:
        if self._tls is None:
            return self._server.add_insecure_port(address)
        return self._server.add_secure_port(address, server_credentials(self._tls.latest))

    async def ready(self) -> None:
        """Says SERVING: call it when a real answer has worked."""
        self._health.set_ready(True)

    async def unready(self) -> None:
        """Says NOT_SERVING; calls are still served."""
        self._health.set_ready(False)

    async def drain(self) -> None:
        """Says NOT_SERVING, serves on for a while, then refuses new calls and ends the others."""
        self.draining = True
        await self.unready()
        await asyncio.sleep(self._settings.drain_seconds)
        await self._server.stop(self._settings.grace_seconds)

    async def fail(self) -> None:
        """Gives the process up: lets running calls tell what failed them, but no more than that."""
        self.draining = True
        self._health.give_up()
        await self._server.stop(_LAST_WORDS_SECONDS)

    async def abort(self) -> None:
        """Stops at once; running calls are cancelled."""
        self.draining = True
        await self._server.stop(None)

    @property
    def active_calls(self) -> int:
        return int(self._metrics.active._value.get())

    def _handler(
        self, name: str, method: UnaryMethod[Any] | StreamMethod[Any]
    ) -> "grpc.RpcMethodHandler[Any, Any]":
        if isinstance(method, UnaryMethod):
            return grpc.unary_unary_rpc_method_handler(self._unary(name, method))
        return grpc.unary_stream_rpc_method_handler(self._streaming(name, method))

    def _unary(self, name: str, method: UnaryMethod[Any]) -> Callable[..., Awaitable[bytes]]:
        async def answer(received: bytes, context: "grpc.aio.ServicerContext[Any, Any]") -> bytes:
            async with self._observed(name, context) as call:
                response = await method.run(wire.parse(method.request, received), call)
                return wire.serialize(response)
            raise AssertionError("aborted calls do not come here")

        return answer

    def _streaming(self, name: str, method: StreamMethod[Any]) -> Callable[..., Awaitable[None]]:
        async def answer(received: bytes, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
            async with self._observed(name, context) as call:
                responses = method.run(wire.parse(method.request, received), call)
                async with _closing(responses):
                    async for response in responses:
                        await _write(context, wire.serialize(response))

        return answer

    @asynccontextmanager
    async def _observed(
        self, name: str, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> AsyncIterator[Call]:
        sent = context.invocation_metadata()
        request_id = accepted_request_id(value_of(sent, limits.REQUEST_ID))
        headers = ((limits.REQUEST_ID, request_id),)
        accept = _once(lambda: context.send_initial_metadata(headers))
        call = Call(request_id, _deadline_of(context), accept, {})
        path, begins = f"{self._name}/{name}", name not in _PROBES
        with (
            telemetry.request_context(request_id, caller_trace(sent), name=path, begins=begins),
            self._recorded(name, call) as outcome,
        ):
            try:
                yield call
                return
            except asyncio.CancelledError:
                # The caller left, or the server stops. If neither is so a method lost its way, and
                # the caller still waits for a status.
                if _cancelled_from_outside() or self.draining:
                    outcome.tell(ChiasmError(Reason.CANCELLED, "The call was cancelled."))
                    raise
                failure = outcome.bug()
            except ChiasmError as error:
                failure = error
                outcome.tell(error)
            except Exception:
                failure = outcome.bug()
            context.set_trailing_metadata(headers)
            await context.abort_with_status(rpc_status.to_status(to_status(failure)))

    @contextmanager
    def _recorded(self, name: str, call: Call) -> Any:
        outcome = _Outcome(name)
        began = time.monotonic()
        self._metrics.active.inc()
        try:
            yield outcome
        finally:
            self._metrics.active.dec()
            seconds = time.monotonic() - began
            self._metrics.seconds.labels(name).observe(seconds)
            self._metrics.calls.labels(name, outcome.status, outcome.reason).inc()
            outcome.log(seconds, call.notes)
            outcome.tell_span(spans.current(), f"{self._name}/{name}")


class _Outcome:
    """How a call ended, for its log line and its count."""

    def __init__(self, method: str) -> None:
        self._method = method
        self.status, self.reason, self._detail = "OK", "", ""
        self._http_status = 200

    def tell(self, error: ChiasmError) -> None:
        self.status, self.reason = error.grpc_code.name, error.reason.value
        self._detail = str(error)
        self._http_status = error.http_status

    def tell_span(self, span: spans.Span, path: str) -> None:
        if not span.recording:
            return
        span.put({names.RPC_SYSTEM: "grpc", names.RPC_METHOD: path, names.RPC_STATUS: self.status})
        if self.reason:
            spans.refused(span, self.reason, self._http_status)

    def bug(self) -> ChiasmError:
        telemetry.logger().exception("fault", method=self._method)
        failure = ChiasmError(Reason.INTERNAL, INTERNAL_TEXT)
        self.tell(failure)
        return failure

    def log(self, seconds: float, notes: Mapping[str, object]) -> None:
        more = {"reason": self.reason, "detail": self._detail} if self.reason else {}
        probe = self._method in _PROBES and not self.reason
        log = telemetry.logger().debug if probe else telemetry.logger().info
        log(
            "call", method=self._method, status=self.status, ms=round(seconds * 1000, 1),
            **more, **notes,
        )  # fmt: skip


async def serve(server: Server, broken: asyncio.Event | None = None) -> int:
    """Serves until SIGTERM or SIGINT, then drains; a second signal stops at once.

    Returns the process's exit code: 0, or 1 if `broken` was set, which ends the service as it is.
    """
    signals: asyncio.Queue[str] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number.name)
    stopped = asyncio.create_task(signals.get())
    failed = asyncio.create_task((broken or asyncio.Event()).wait())
    await asyncio.wait({stopped, failed}, return_when=asyncio.FIRST_COMPLETED)
    if failed.done():
        stopped.cancel()
        await server.fail()
        return 1
    failed.cancel()
    telemetry.logger().info("draining", cause=stopped.result())
    await _drain_unless_hurried(server, signals)
    return 0


async def _drain_unless_hurried(server: Server, signals: "asyncio.Queue[str]") -> None:
    drained = asyncio.create_task(server.drain())
    hurried = asyncio.create_task(signals.get())
    await asyncio.wait({drained, hurried}, return_when=asyncio.FIRST_COMPLETED)
    if not drained.done():
        drained.cancel()
        await server.abort()
    hurried.cancel()
    await asyncio.gather(drained, hurried, return_exceptions=True)


async def _write(context: "grpc.aio.ServicerContext[Any, Any]", message: bytes) -> None:
    try:
        await context.write(message)
    except grpc.aio.InternalError:
        # The caller left while it was written; gRPC says no more than that it failed.
        raise ChiasmError(Reason.CANCELLED, "The call was cancelled.") from None


@asynccontextmanager
async def _closing(responses: AsyncIterator[Any]) -> AsyncIterator[None]:
    try:
        yield
    finally:
        close = getattr(responses, "aclose", None)
        if close is not None:
            await close()


def _options(settings: ServerSettings) -> list[tuple[str, Any]]:
    age_ms = int(settings.connection_age_seconds * 1000)
    return [
        ("grpc.max_send_message_length", limits.MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", limits.MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", limits.KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", limits.PING_TIMEOUT_MS),
        ("grpc.http2.ping_timeout_ms", limits.PING_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", limits.MIN_PING_INTERVAL_MS),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", limits.MIN_PING_INTERVAL_MS),
        ("grpc.max_connection_age_ms", age_ms),
        # Longer than any generation: a renewed connection must not cut a stream.
        ("grpc.max_connection_age_grace_ms", 3_600_000),
        # A second server on a used port must fail, not share its calls.
        ("grpc.so_reuseport", 0),
    ]


def _once(send: Callable[[], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
    sent = False

    async def send_first_time() -> None:
        nonlocal sent
        if not sent:
            sent = True
            await send()

    return send_first_time


def _deadline_of(context: "grpc.aio.ServicerContext[Any, Any]") -> float | None:
    left = context.time_remaining()
    # Without a deadline gRPC gives the seconds to the end of its clock.
    return None if left is None or left > 1e7 else time.monotonic() + left


def _cancelled_from_outside() -> bool:
    """Whether gRPC cancelled this call; its context does not say that the caller left."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
