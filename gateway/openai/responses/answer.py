"""What a response is made of: the echo of its request, items, usage, errors. Pure.

Format: https://platform.openai.com/docs/api-reference/responses/object.
"""

import time
import uuid
from dataclasses import dataclass, field
from typing import Any, Final

from chiasm.errors import ChiasmError
from chiasm.v1 import llm_service_pb2
from gateway.openai.answer import trace_of
from gateway.openai.errors import error_body
from gateway.openai.responses.schema import Choice, ResponsesRequest
from gateway.openai.responses.to_chat import Origins
from gateway.openai.schema import ChatRequest

Json = dict[str, Any]

# JSON has no infinity.
_IMPOSSIBLE: Final = -9999.0
# The codes that OpenAI's schema of a failed response knows, as far as one of ours is meant by them.
_RESPONSE_CODES: Final = frozenset(
    {
        "empty_image_file", "failed_to_download_image", "image_file_too_large", "image_parse_error",
        "image_too_large", "invalid_base64_image", "invalid_image_url",
        "unsupported_image_media_type",
    }
)  # fmt: skip
_CODE_OF_TYPE: Final = {
    "rate_limit_error": "rate_limit_exceeded",
    "invalid_request_error": "invalid_prompt",
}


def new_id(prefix: str) -> str:
    """An id that no other object has."""
    return f"{prefix}_{uuid.uuid4().hex}"


@dataclass(frozen=True)
class Head:
    """What all states of a response share: its id and what it echoes."""

    echo: Json
    id: str = field(default_factory=lambda: new_id("resp"))
    # Unix seconds.
    created_at: int = field(default_factory=lambda: int(time.time()))

    def response(self, status: str, output: list[Json], **told: Any) -> Json:
        """The response in one state; `told` goes over what is null or absent else."""
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created_at,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": output,
            "usage": None,
            **self.echo,
            **told,
        }


def echo_of(request: ResponsesRequest, chat: ChatRequest) -> Json:
    """The parameters of a response. What the request left to the model's defaults is null."""
    parallel = (request.model_extra or {}).get("parallel_tool_calls", True)
    choice = request.tool_choice
    return {
        "model": chat.model,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "temperature": chat.temperature,
        "top_p": chat.top_p,
        "top_logprobs": request.top_logprobs or 0,
        "text": {"format": _format_of(request.text.format), "verbosity": "medium"},
        "tools": [tool.model_dump() for tool in request.tools],
        "tool_choice": choice.model_dump() if isinstance(choice, Choice) else choice or "auto",
        "parallel_tool_calls": parallel,
        "metadata": request.metadata,
        "user": request.user,
        "safety_identifier": request.safety_identifier,
        "prompt_cache_key": request.prompt_cache_key,
        "store": False,
        "background": False,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "service_tier": "default",
        "truncation": "disabled",
    }


def _format_of(given: Json | None) -> Json:
    if given is None:
        return {"type": "text"}
    if given["type"] != "json_schema":
        return {"type": given["type"]}
    kept = {name: given.get(name) for name in ("name", "description", "schema", "strict")}
    return {"type": "json_schema", **kept}


def message_item(item_id: str, status: str, content: list[Json]) -> Json:
    """The model's words."""
    return {
        "id": item_id,
        "type": "message",
        "status": status,
        "role": "assistant",
        "content": content,
    }


def text_part(text: str, logprobs: list[Json]) -> Json:
    """The one part of the model's words."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def call_item(item_id: str, status: str, call_id: str, name: str, arguments: str) -> Json:
    """A call that the caller is to make; `arguments` is JSON text, whole unless incomplete."""
    return {
        "id": item_id,
        "type": "function_call",
        "status": status,
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
    }


def usage_of(usage: llm_service_pb2.Usage) -> Json:
    """Tokens in the names of Responses, the parts of the input among the details."""
    return {
        "input_tokens": usage.prompt_token_count,
        "input_tokens_details": {
            "cached_tokens": usage.cached_token_count,
            # Nobody is billed for writing into the cache.
            "cache_write_tokens": 0,
            "image_tokens": usage.image_token_count,
            "text_tokens": usage.text_token_count,
        },
        "output_tokens": usage.completion_token_count,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_token_count + usage.completion_token_count,
    }


def trace_within(finished: llm_service_pb2.Finished, origins: Origins) -> Json:
    """Chiasm's own part of an answer as a chat has it, `message` counting the input's items."""
    trace = trace_of(finished)
    for image in trace["images"]:
        image["message"] = origins.item_of(image["message"])
    return trace


def logprob_of(told: llm_service_pb2.TokenLogprob) -> Json:
    """A token and its likeliest alternatives."""
    return _token_of(told) | {"top_logprobs": [_token_of(one) for one in told.top]}


def _token_of(told: llm_service_pb2.TokenLogprob) -> Json:
    return {
        "token": told.token.decode(errors="replace"),
        "logprob": max(told.logprob, _IMPOSSIBLE),
        "bytes": list(told.token),
    }


def failure_of(error: ChiasmError) -> Json:
    """The `error` of a failed response: a code of OpenAI's list that says most of it."""
    told = error_body(error)["error"]
    code = told["code"]
    if code not in _RESPONSE_CODES:
        code = _CODE_OF_TYPE.get(told["type"], "server_error")
    return {"code": code, "message": told["message"]}
