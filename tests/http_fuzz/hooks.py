"""Loaded by schemathesis: requests name the model that is served, or they would all end at 404."""

from typing import Any

import schemathesis

from tests.scripted_llm import MODEL


@schemathesis.hook
def before_call(context: schemathesis.HookContext, case: Any, kwargs: dict[str, Any]) -> None:
    """One in eight keeps the name that was drawn."""
    body = case.body
    named = isinstance(body, dict) and isinstance(body.get("model"), str)
    if named and (len(body["model"]) + len(body)) % 8:
        case.body = body | {"model": MODEL}
