"""What the spans of the LLM service say. No content."""

from chiasm.tracing import names
from chiasm.tracing.spans import Attributes, Span, Value
from chiasm.v1 import llm_service_pb2
from llm_service.engine.values import SamplingParams
from llm_service.vision.source import Fetched

_S = llm_service_pb2


def asked(
    span: Span, message: llm_service_pb2.GenerateRequest, sampling: SamplingParams, choices: int
) -> None:
    """Says of a call's span what it asks for: model and sampling, as they count."""
    if not span.recording:
        return
    told: dict[str, Value | None] = {
        names.OPERATION: names.TEXT_COMPLETION if message.HasField("prompt") else names.CHAT,
        names.PROVIDER: names.PROVIDER_CHIASM,
        names.REQUEST_MODEL: message.model,
        names.REQUEST_TEMPERATURE: sampling.temperature,
        names.REQUEST_TOP_P: sampling.top_p,
        names.REQUEST_TOP_K: sampling.top_k or None,
        names.REQUEST_MAX_TOKENS: sampling.max_tokens,
        names.REQUEST_SEED: sampling.seed,
        names.REQUEST_FREQUENCY_PENALTY: sampling.frequency_penalty or None,
        names.REQUEST_PRESENCE_PENALTY: sampling.presence_penalty or None,
        names.REQUEST_CHOICES: choices if choices > 1 else None,
    }
    span.put({name: value for name, value in told.items() if value is not None})


def first_token(call: Span, arrived: float, now: float) -> None:
    """Says of a call's span when its answer began."""
    call.put({names.FIRST_CHUNK_SECONDS: now - arrived})


def answered(
    call: Span, engine: Span, told: llm_service_pb2.Finished, submitted: float, first_token: float
) -> None:
    """Says of a call's span what its whole answer took, and of the engine's its stages.

    Queue and prefill are the first choice's, which computed the prompt for all.
    """
    if not call.recording:
        return
    usage, times = told.usage, told.timings
    call.put(
        {
            names.INPUT_TOKENS: usage.prompt_token_count,
            names.CACHED_TOKENS: usage.cached_token_count,
            names.OUTPUT_TOKENS: usage.completion_token_count,
            names.IMAGE_TOKENS: usage.image_token_count,
            names.IMAGE_COUNT: len(told.image_paths),
            names.FINISH_REASONS: [_word(_S.FinishReason.Name(one.reason)) for one in told.choices],
        }
    )
    started = submitted + times.queue_seconds
    decoding = started + times.prefill_seconds
    engine.past(names.QUEUE, submitted, started)
    engine.past(names.PREFILL, started, decoding)
    engine.past(
        names.DECODE,
        decoding,
        decoding + times.decode_seconds,
        event=(names.FIRST_TOKEN, first_token),
    )


def of_picture(path: llm_service_pb2.ImagePath) -> Attributes:
    """The way that a picture took."""
    told: dict[str, Value] = {
        names.IMAGE_SOURCE: _word(_S.ImageSource.Name(path.source)),
        names.IMAGE_ROWS: path.placeholder_count,
    }
    if path.source == _S.IMAGE_SOURCE_REMOTE:
        told |= {
            names.ENCODER_NAME: path.encoder_name,
            names.ENCODER_CACHE_HIT: path.encoder_cache_hit,
        }
    return told


def asks(attempt: Span, address: str) -> None:
    """Says which encoder is asked, by the address that discovery gave."""
    if not attempt.recording:
        return
    host, _, port = address.rpartition(":")
    known: dict[str, Value] = {names.RPC_SYSTEM: "grpc"}
    if host and port.isascii() and port.isdigit():
        attempt.put(known | {names.SERVER_ADDRESS: host, names.SERVER_PORT: int(port)})
    else:
        attempt.put(known | {names.SERVER_ADDRESS: address})


def transferred(attempt: Span, fetched: Fetched, ended: float) -> None:
    """Adds to the span of an attempt what it took beside the encoder's own time.

    The request's way is in it too; it stands at the end, where the tensor comes.
    """
    if attempt.recording:
        began = ended - max(0.0, fetched.fetch_seconds - fetched.encode_seconds)
        told: dict[str, Value] = {names.TENSOR_BYTES: fetched.rows.byte_count}
        attempt.past(names.TRANSFER, began, ended, told)


def _word(name: str) -> str:
    """`REMOTE` of `IMAGE_SOURCE_REMOTE`, `TOOL_CALLS` of `FINISH_REASON_TOOL_CALLS`; lower case."""
    for prefix in ("IMAGE_SOURCE_", "FINISH_REASON_"):
        name = name.removeprefix(prefix)
    return name.lower()
