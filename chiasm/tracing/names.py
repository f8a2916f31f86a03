"""Names of spans and of their attributes, so that dashboards and queries can rely on them.

Where OpenTelemetry's semantic conventions have a name it is theirs: HTTP, RPC, errors, and
generative AI (https://github.com/open-telemetry/semantic-conventions-genai). All others begin with
`chiasm.`. No attribute holds a prompt, an answer, a picture, a URL that a caller sent, or a key.
"""

from typing import Final

# Spans within a process.
PREPARE: Final = "prepare"
VISION: Final = "vision"
PICTURE: Final = "picture"
ASK_ENCODER: Final = "ask encoder"
TRANSFER: Final = "transfer"
ENGINE: Final = "engine"
QUEUE: Final = "queue"
PREFILL: Final = "prefill"
DECODE: Final = "decode"
DECODE_IMAGE: Final = "decode image"
TOWER: Final = "tower"
DOWNLOAD: Final = "picture download"

# Event on `decode`.
FIRST_TOKEN: Final = "first token"  # noqa: S105 - of a text

# Convention: general, HTTP, RPC.
ERROR_TYPE: Final = "error.type"
HTTP_METHOD: Final = "http.request.method"
HTTP_ROUTE: Final = "http.route"
HTTP_STATUS: Final = "http.response.status_code"
RPC_SYSTEM: Final = "rpc.system.name"
RPC_METHOD: Final = "rpc.method"
RPC_STATUS: Final = "rpc.response.status_code"
SERVER_ADDRESS: Final = "server.address"
SERVER_PORT: Final = "server.port"
SERVICE_NAME: Final = "service.name"
SERVICE_NAMESPACE: Final = "service.namespace"
SERVICE_VERSION: Final = "service.version"
SERVICE_INSTANCE: Final = "service.instance.id"

# Convention: generative AI.
OPERATION: Final = "gen_ai.operation.name"
PROVIDER: Final = "gen_ai.provider.name"
REQUEST_MODEL: Final = "gen_ai.request.model"
REQUEST_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
REQUEST_TEMPERATURE: Final = "gen_ai.request.temperature"
REQUEST_TOP_P: Final = "gen_ai.request.top_p"
REQUEST_TOP_K: Final = "gen_ai.request.top_k"
REQUEST_FREQUENCY_PENALTY: Final = "gen_ai.request.frequency_penalty"
REQUEST_PRESENCE_PENALTY: Final = "gen_ai.request.presence_penalty"
REQUEST_SEED: Final = "gen_ai.request.seed"
REQUEST_CHOICES: Final = "gen_ai.request.choice.count"
# Of each choice: stop, length or tool_calls.
FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
# Seconds from the call's arrival.
FIRST_CHUNK_SECONDS: Final = "gen_ai.response.time_to_first_chunk"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
CACHED_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"

# Values.
CHAT: Final = "chat"
TEXT_COMPLETION: Final = "text_completion"
PROVIDER_CHIASM: Final = "chiasm"

# Ours.
REQUEST_ID: Final = "chiasm.request.id"
IMAGE_COUNT: Final = "chiasm.image.count"
IMAGE_TOKENS: Final = "chiasm.usage.image_tokens"
# Place of a picture in the request, from 0.
IMAGE_INDEX: Final = "chiasm.image.index"
# cache, remote, local, caller or reference.
IMAGE_SOURCE: Final = "chiasm.image.source"
IMAGE_ROWS: Final = "chiasm.image.rows"
ENCODER_NAME: Final = "chiasm.encoder.name"
# Whether the encoder had the features: of the LLM service's spans.
ENCODER_CACHE_HIT: Final = "chiasm.encoder.cache_hit"
# computed, shared or cache: of the encoder's spans.
ENCODE_SOURCE: Final = "chiasm.encode.source"
TENSOR_BYTES: Final = "chiasm.tensor.bytes"
