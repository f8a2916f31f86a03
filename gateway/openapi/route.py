"""`GET /openapi.json`."""

import asyncio
import json
from collections.abc import Sequence

from starlette.responses import Response
from starlette.routing import Route

from gateway.http.guarded import ALWAYS_OPEN
from gateway.settings import GatewaySettings


class OpenApi:
    """The document of the application's `routes`, made when it is first asked for."""

    def __init__(self, routes: Sequence[Route], settings: GatewaySettings) -> None:
        self._paths = frozenset(route.path_format for route in routes)
        self._locked = settings.keys_file is not None
        self._open_paths = settings.open_paths | ALWAYS_OPEN
        self._made = b""

    async def answer(self) -> Response:
        """The document."""
        if not self._made:
            self._made = await asyncio.to_thread(self._make)
        return Response(self._made, media_type="application/json")

    def _make(self) -> bytes:
        # Here and not above: most gateways are never asked, and start sooner.
        from gateway.openapi.document import document

        told = document(self._paths, locked=self._locked, open_paths=self._open_paths)
        return json.dumps(told, ensure_ascii=False).encode()
