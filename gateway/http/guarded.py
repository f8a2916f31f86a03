"""Before every route: whose key it is, and whether there is room for one request more."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from chiasm.errors import ChiasmError, Reason
from gateway.http.observed import PROBES, Exchange, exchange_of
from gateway.keys.allowance import Charge
from gateway.keys.ring import KeyRing

ALWAYS_OPEN: Final = frozenset({"/health", "/ready"})


class Guarded:
    """The innermost layer. A request without a key takes no room from those that have one.

    Args:
        keys: None lets everybody in.
        open_paths: paths that need no key; one that ends in / with all below it.
        max_active: requests in hand at once, probes aside.
    """

    def __init__(
        self, app: ASGIApp, keys: KeyRing | None, open_paths: frozenset[str], max_active: int
    ) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = open_paths | ALWAYS_OPEN
        self._open_trees = tuple(path for path in open_paths if len(path) > 1 and path[-1] == "/")
        self._max_active = max_active
        self._active = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = exchange_of(scope)
        if self._keys is not None and not self._is_open(scope["path"]):
            _name(exchange, self._keys, scope)
        with self._place(exchange), _counted(exchange):
            await self._app(scope, receive, send)

    def _is_open(self, path: str) -> bool:
        return path in self._open_paths or path.startswith(self._open_trees)

    @contextmanager
    def _place(self, exchange: Exchange) -> Iterator[None]:
        if exchange.route in PROBES:
            yield
            return
        if self._active >= self._max_active:
            text = "The gateway has as many requests in hand as it may; try again shortly."
            raise ChiasmError(Reason.QUEUE_FULL, text, retry_after=1.0)
        self._active += 1
        try:
            yield
        finally:
            self._active -= 1


def _name(exchange: Exchange, keys: KeyRing, scope: Scope) -> None:
    bearer = keys.bearer(Headers(scope=scope).getlist("authorization"), time.time())
    exchange.key_name, exchange.tenant = bearer.key.name, bearer.key.tenant
    exchange.charge = Charge(bearer.allowance)


@contextmanager
def _counted(exchange: Exchange) -> Iterator[None]:
    charge = exchange.charge
    if charge is None:
        yield
        return
    with charge.running(spends=exchange.method == "POST"):
        failed = False
        try:
            yield
        except ChiasmError as error:
            # Who leaves while it is computed has had the work done.
            failed = error.reason is not Reason.CANCELLED
            raise
        except Exception:
            failed = True
            raise
        finally:
            charge.end(_used(exchange, failed))


def _used(exchange: Exchange, failed: bool) -> int | None:
    """Tokens that the route noted; None where the work ended before anybody could tell."""
    counts = [exchange.notes.get(f"{kind}_tokens") for kind in ("prompt", "completion")]
    if any(isinstance(count, int) for count in counts):
        return sum(count for count in counts if isinstance(count, int))
    no_answer = failed or (bool(exchange.reason) and not exchange.first_token_at)
    return 0 if no_answer else None
