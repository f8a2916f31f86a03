"""Who may call a server under mutual TLS: its credentials, and a guard in front of every method.

The handshake proves that a certificate comes from an authority of `--mtls-ca`; the guard compares
its names with `--mtls-clients`. Health and reflection on the server's port are guarded as well.
"""

import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import grpc
import grpc.aio
from grpc_status import rpc_status
from prometheus_client import CollectorRegistry, Counter

from chiasm import telemetry
from chiasm.errors import ChiasmError, Reason, to_status
from chiasm.rpc.certificates import expiry_of
from chiasm.rpc.mtls import Callers, Material

_LOG_SECONDS: Final = 60.0
_MOST_PEERS: Final = 256
_MOST_NAMES, _NAME_CHARACTERS = 8, 256
_Cause = Literal["name", "expired"]
_TEXTS: Final[Mapping[_Cause, str]] = {
    "name": "The caller's certificate has none of the names that may call this service; its "
    "--mtls-clients lists them.",
    "expired": "The caller's certificate has expired.",
}
_WATCH: Final = "/grpc.health.v1.Health/Watch"
_Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]


@dataclass(frozen=True)
class ServerTls:
    """What a server shows and whom it serves.

    Attributes:
        latest: the files' newest usable state; asked at every handshake, on threads of gRPC's.
        allowed: who may call.
    """

    latest: Callable[[], Material]
    allowed: Callers


def server_credentials(latest: Callable[[], Material]) -> grpc.ServerCredentials:
    """Credentials that demand a client's certificate, TLS 1.2 at least.

    Each handshake uses what `latest` gives then.
    """
    used = latest()

    def changed() -> grpc.ServerCertificateConfiguration:
        nonlocal used
        newest = latest()
        if newest is used:
            return None  # type: ignore[return-value]  # gRPC's word for "as before"
        used = newest
        return _configuration(newest)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(used), changed, require_client_authentication=True
    )


def _configuration(material: Material) -> grpc.ServerCertificateConfiguration:
    pair = (material.key, material.cert)
    return grpc.ssl_server_certificate_configuration([pair], root_certificates=material.ca)


class CallerGuard(grpc.aio.ServerInterceptor):
    """Refuses calls on connections whose certificate has none of the names of `allowed`."""

    def __init__(self, allowed: Callers, registry: CollectorRegistry) -> None:
        self._allowed = allowed
        self._refused = Counter(
            "chiasm_mtls_refused_calls",
            "Calls refused for the caller's certificate, by cause: none of its names may call, or "
            "it has expired since its connection was made.",
            ["cause"],
            registry=registry,
        )
        for cause in _TEXTS:
            self._refused.labels(cause)
        # time.monotonic() at which each was last told of, by its names.
        self._told: OrderedDict[tuple[str, ...], float] = OrderedDict()

    async def intercept_service(
        self, continuation: _Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        watch = handler_call_details.method == _WATCH
        return _guarded(handler, self._check_watch if watch else self._check)

    async def _check_watch(self, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
        # Clients that watch health would call a server that refuses this unhealthy, and never hear
        # why; where it is not implemented they go on to their call, which is told.
        cause = self._fault(context)
        if cause is not None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, _TEXTS[cause])

    async def _check(self, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
        cause = self._fault(context)
        if cause is not None:
            self._refused.labels(cause).inc()
            refusal = ChiasmError(Reason.CALLER_NOT_ALLOWED, _TEXTS[cause])
            await context.abort_with_status(rpc_status.to_status(to_status(refusal)))

    def _fault(self, context: "grpc.aio.ServicerContext[Any, Any]") -> _Cause | None:
        shown: Mapping[str, Iterable[bytes]] = context.auth_context()
        dns, uris = _texts(shown, "peer_dns"), _texts(shown, "peer_uri")
        cause: _Cause = "name"
        if self._allowed.include(frozenset(name.lower() for name in dns), frozenset(uris)):
            # The handshake checks it, but not that of a session which is resumed.
            if time.time() < max(map(expiry_of, shown.get("x509_pem_cert", ())), default=0):
                return None
            cause = "expired"
        self._tell(_printable((*dns, *uris)), context.peer(), cause)
        return cause

    def _tell(self, names: tuple[str, ...], address: str, cause: _Cause) -> None:
        now = time.monotonic()
        if now - self._told.get(names, -_LOG_SECONDS) < _LOG_SECONDS:
            return
        self._told[names] = now
        self._told.move_to_end(names)
        if len(self._told) > _MOST_PEERS:
            self._told.popitem(last=False)
        telemetry.logger().warning("caller not allowed", names=names, peer=address, cause=cause)


def _texts(shown: Mapping[str, Iterable[bytes]], kind: str) -> tuple[str, ...]:
    return tuple(name.decode("utf-8", "backslashreplace") for name in shown.get(kind, ()))


def _printable(names: tuple[str, ...]) -> tuple[str, ...]:
    """A certificate may have any number of names of any length."""
    return tuple(name[:_NAME_CHARACTERS] for name in names[:_MOST_NAMES])


def _guarded(handler: Any, check: Callable[[Any], Awaitable[None]]) -> Any:
    """The handler, with `check` before it: a coroutine for ours and for what answers once."""
    read, write = handler.request_deserializer, handler.response_serializer
    if handler.unary_unary:
        inner = handler.unary_unary

        async def answer(request: Any, context: Any) -> Any:
            await check(context)
            return await inner(request, context)

        return grpc.unary_unary_rpc_method_handler(answer, read, write)
    streams = {
        "unary_stream": grpc.unary_stream_rpc_method_handler,
        "stream_stream": grpc.stream_stream_rpc_method_handler,
    }
    for kind, made in streams.items():
        if getattr(handler, kind):
            return made(_guarded_stream(getattr(handler, kind), check), read, write)
    raise AssertionError("no service has a method that takes a stream and answers once")


def _guarded_stream(inner: Any, check: Callable[[Any], Awaitable[None]]) -> Any:
    async def answer(request: Any, context: Any) -> None:
        await check(context)
        answered = inner(request, context)
        if hasattr(answered, "__aiter__"):
            async for response in answered:
                await context.write(response)
        else:
            await answered

    return answer
