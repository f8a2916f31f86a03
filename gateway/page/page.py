"""Serves the page at `/` and its files under `/page/`. They are read once, when routes are made.

The page holds no secret and is given to whoever asks; what it then asks of the API is checked there
as anyone's requests are.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Final

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_INDEX: Final = "index.html"
_MEDIA_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Thumbnails are blobs of the page's own. Trusted types keep text from ever being read as HTML.
_POLICY: Final = "; ".join(
    (
        "default-src 'self'",
        "img-src 'self' blob:",
        "object-src 'none'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS: Final[Mapping[str, str]] = {
    "content-security-policy": _POLICY,
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    # The files of one version belong together: each is asked for anew, and mostly unchanged.
    "cache-control": "no-cache",
}


@dataclass(frozen=True)
class Asset:
    """One file of the page."""

    body: bytes
    media_type: str
    etag: str

    def answer(self, request: Request) -> Response:
        """The file, or 304 if the caller has it."""
        headers = {**HEADERS, "etag": self.etag}
        if _named(request.headers.get("if-none-match", "")) & {self.etag, "*"}:
            return Response(status_code=304, headers=headers)
        return Response(self.body, headers=headers, media_type=self.media_type)


def page_routes() -> list[Route]:
    """`/` and `/page/{name}`."""
    assets = _read_assets()

    async def index(request: Request) -> Response:
        return assets[_INDEX].answer(request)

    async def file(request: Request) -> Response:
        found = assets.get(request.path_params["name"])
        if found is None:
            raise HTTPException(404)
        return found.answer(request)

    return [Route("/", index, methods=["GET"]), Route("/page/{name}", file, methods=["GET"])]


def _read_assets() -> dict[str, Asset]:
    folder = resources.files("gateway.page") / "static"
    return {
        file.name: _asset(file.read_bytes(), media_type)
        for file in folder.iterdir()
        if (media_type := _MEDIA_TYPES.get(f".{file.name.rpartition('.')[2]}"))
    }


def _asset(body: bytes, media_type: str) -> Asset:
    return Asset(body, media_type, f'"{hashlib.sha256(body).hexdigest()[:32]}"')


def _named(header: str) -> set[str]:
    """The tags of `If-None-Match`; weak ones stand for the same bytes here."""
    return {tag.strip().removeprefix("W/") for tag in header.split(",")}
