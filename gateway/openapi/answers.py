"""What the routes answer, as models. They describe; nothing is checked with them at run time.

A field without a default is always there. What is not named here never comes.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

FinishReason = Literal["stop", "length", "tool_calls"]


class Answer(BaseModel):
    """An object of an answer."""

    model_config = ConfigDict(extra="forbid")


class ErrorDetail(Answer):
    """What went wrong, for people and for programs. `param` is the path of the field at fault."""

    message: str
    type: Literal[
        "invalid_request_error", "authentication_error", "rate_limit_error", "server_error"
    ]
    param: str | None
    code: str | None


class Error(Answer):
    """Any failure."""

    error: ErrorDetail


class Timings(Answer):
    """Milliseconds that the request spent in each stage."""

    queue_ms: float
    fetch_ms: float
    encode_ms: float
    transfer_ms: float
    prefill_ms: float
    decode_ms: float
    total_ms: float


class ImagePath(Answer):
    """The path that one picture took."""

    message: int
    part: int
    source: Literal["cache", "remote", "local", "caller", "reference", "unspecified"]
    encoder: str | None
    tokens: int
    identity_checked: bool
    encoder_cache_hit: bool


class Trace(Answer):
    """Chiasm's own part of an answer."""

    timings: Timings
    images: list[ImagePath]


class PromptTokens(Answer):
    """What the prompt's tokens are. Text and image tokens add up to all of them."""

    cached_tokens: int
    image_tokens: int
    text_tokens: int


class Usage(Answer):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens


class CalledFunction(Answer):
    """A function and its arguments as JSON text; the text may be cut where the answer was."""

    name: str
    arguments: str


class AnsweredCall(Answer):
    """A call that the model makes."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Answer):
    """The model's answer. The content is null where it is calls alone."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[AnsweredCall] = Field(default_factory=list)


class TokenLogprob(Answer):
    """A token and the logarithm of its probability. Bytes that are no whole characters are marked
    in `token`."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenLogprob(TokenLogprob):
    """The token that was drawn, and the likeliest ones."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Answer):
    """Log-probabilities of an answer's tokens."""

    content: list[ChosenLogprob]
    refusal: None


class ChatChoice(Answer):
    """One of `n` answers."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(Answer):
    """A chat's answer."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    chiasm: Trace


class FunctionDelta(Answer):
    """The name comes first and whole, then pieces of the arguments."""

    name: str = ""
    arguments: str


class CallDelta(Answer):
    """What one call gained. Only its first delta has id, type and name."""

    index: int
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionDelta


class ChatDelta(Answer):
    """What an answer gained."""

    role: Literal["assistant"] = "assistant"
    content: str = ""
    refusal: None = None
    tool_calls: list[CallDelta] = Field(default_factory=list)


class ChatChunkChoice(Answer):
    """What one of `n` answers gained; `finish_reason` is told once, in its last chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatCompletionChunk(Answer):
    """The data of one event of a streamed chat. `usage` is there if `include_usage` asks for it,
    and not null only in the last chunk, which then has no choices."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    chiasm: Trace | None = None


class LegacyLogprobs(Answer):
    """Log-probabilities in the form of text completions, one entry a token in each list."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextChoice(Answer):
    """One answer to one prompt; choice c of prompt p has the index p * n + c."""

    index: int
    text: str
    logprobs: LegacyLogprobs | None
    finish_reason: Literal["stop", "length"]


class TextCompletion(Answer):
    """Continued texts. The timings are those of the prompt that took longest."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage
    chiasm: Trace


class TextChunkChoice(TextChoice):
    """What one answer gained; `finish_reason` is told once, in its last chunk."""

    finish_reason: Literal["stop", "length"] | None  # type: ignore[assignment]


class TextCompletionChunk(Answer):
    """The data of one event of a streamed text completion; `usage` as in a chat's."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChunkChoice]
    usage: Usage | None = None
    chiasm: Trace | None = None


class InputTokens(Answer):
    """What the input's tokens are."""

    cached_tokens: int
    cache_write_tokens: int
    image_tokens: int
    text_tokens: int


class OutputTokens(Answer):
    """What the output's tokens are."""

    reasoning_tokens: int


class ResponseUsage(Answer):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: InputTokens
    output_tokens: int
    output_tokens_details: OutputTokens
    total_tokens: int


class ResponseText(Answer):
    """The model's words."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[ChosenLogprob]


class ResponseMessage(Answer):
    """A message of the model."""

    type: Literal["message"]
    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"]
    content: list[ResponseText]


class ResponseCall(Answer):
    """A call that the model makes."""

    type: Literal["function_call"]
    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    call_id: str
    name: str
    arguments: str


class Response(Answer):
    """A response. Further fields echo the request's parameters."""

    model_config = ConfigDict(extra="allow")

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["completed", "incomplete", "failed", "in_progress"]
    error: Any
    incomplete_details: Any
    model: str
    output: list[ResponseMessage | ResponseCall]
    usage: ResponseUsage | None


class ResponseEvent(Answer):
    """The data of one event of a streamed response, as OpenAI names them by `type`."""

    model_config = ConfigDict(extra="allow")

    type: str
    sequence_number: int


class TakenEmbeds(Answer):
    """What embeddings that a caller makes must be like."""

    width: int
    levels: int
    needs: list[Literal["image_grid_thw", "image_sizes"]]
    weights_digest: str
    processor_digest: str
    background: str


class Takes(Answer):
    """What a model takes beside text."""

    family: str
    title: str
    context_length: int
    images: bool
    max_images: int
    image_options: list[str]
    image_embeds: TakenEmbeds
    reference_seconds: int


class Model(Answer):
    """The model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    chiasm: Takes


class ModelList(Answer):
    """All models that are served: one."""

    object: Literal["list"]
    data: list[Model]


class Identity(Answer):
    """Who made features."""

    model_id: str
    weights_digest: str
    processor_digest: str
    dtype: str
    width: int
    background: str


class HeldEmbedding(Answer):
    """Features that are held under `reference`; `data` only if asked for."""

    object: Literal["image_embedding"]
    index: int
    reference: str
    expires_at: int
    row_count: int
    placeholder_count: int
    shape: list[int]
    dtype: str
    identity: Identity | None
    image_size: list[int] | None
    grid_thw: list[int] | None
    source: str
    data: str = ""


class HeldEmbeddings(Answer):
    """One entry a picture, in the request's order."""

    object: Literal["list"]
    model: str
    data: list[HeldEmbedding]


class Vector(Answer):
    """One vector of a picture, as numbers or as the base64 of little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class VectorUsage(Answer):
    """Placeholder tokens of the pictures."""

    prompt_tokens: int
    total_tokens: int


class Vectors(Answer):
    """One entry a picture, in the request's order."""

    object: Literal["list"]
    model: str
    data: list[Vector]
    usage: VectorUsage


class Tokenized(Answer):
    """Tokens of a prompt."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: None


class Detokenized(Answer):
    """Text of tokens."""

    prompt: str


class Version(Answer):
    """The version of Chiasm."""

    version: str


class Health(Answer):
    """The process lives."""

    status: Literal["ok"]


class Ready(Answer):
    """New requests are welcome."""

    status: Literal["ready"]
