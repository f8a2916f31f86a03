"""Numbers that both ends of a connection must agree on."""

# Largest unary message in bytes; a larger tensor travels by the streaming form.
MAX_MESSAGE_BYTES = 256 << 20
# Largest embedding in a unary reply: the message limit less room for metadata.
MAX_UNARY_TENSOR_BYTES = MAX_MESSAGE_BYTES - (1 << 20)
# Bytes of a chunk in the streaming form.
CHUNK_BYTES = 2 << 20
# A hung peer is noticed after one interval plus the timeout.
KEEPALIVE_MS = 20_000
PING_TIMEOUT_MS = 5_000
# The least interval that a server tolerates; below the interval of our own clients.
MIN_PING_INTERVAL_MS = 5_000

REQUEST_ID = "x-request-id"
