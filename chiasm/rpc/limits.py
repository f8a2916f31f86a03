"""Numbers that both ends of a connection must agree on."""

# Largest unary message in bytes; a larger tensor travels by the streaming form.
MAX_MESSAGE_BYTES = 256 << 20
# Largest embedding in a unary reply: the message limit less room for metadata.
MAX_UNARY_TENSOR_BYTES = MAX_MESSAGE_BYTES - (1 << 20)
# Embeddings that are expected to be larger are asked for in chunks: an end then holds little more
# than the tensor itself, where a unary reply is held three times over. `benchmarks.transfer`.
STREAMED_ABOVE_BYTES = 4 << 20
# Bytes of a chunk in the streaming form: what the schema allows, and the least and most that we
# send. An embedding comes in eighths if that is between them: an end holds a few chunks beside it.
MAX_CHUNK_BYTES = 4 << 20
LEAST_CHUNK_BYTES, MOST_CHUNK_BYTES = 256 << 10, 2 << 20
# A hung peer is noticed after one interval plus the timeout.
KEEPALIVE_MS = 20_000
PING_TIMEOUT_MS = 5_000
# The least interval that a server tolerates; below the interval of our own clients.
MIN_PING_INTERVAL_MS = 5_000

REQUEST_ID = "x-request-id"
