"""Cross-origin requests of browsers: https://fetch.spec.whatwg.org/#http-cors-protocol"""

from collections.abc import Sequence
from typing import Final

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from gateway.openai.errors import plain_error

_METHODS: Final = ("GET", "HEAD", "POST", "OPTIONS")


class Cors(CORSMiddleware):
    """Outside of keys and errors, so that a preflight needs no key and a page can read a refusal.

    All headers are allowed, those that clients add by themselves included. There are no cookies, so
    an origin that is let in can do no more than whoever has a key.
    """

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        super().__init__(
            app,
            allow_origins=list(origins),
            allow_methods=_METHODS,
            allow_headers=("*",),
            expose_headers=("*",),
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        answer = super().preflight_response(request_headers)
        if answer.status_code == 200:
            return answer
        text = "This origin or method is not let in; the operator lists origins in --cors-origins."
        kept = {name: value for name, value in answer.headers.items() if _about_cors(name)}
        return JSONResponse(plain_error(400, text, "cors_refused"), 400, kept)


def _about_cors(name: str) -> bool:
    return name == "vary" or name.startswith("access-control-")
