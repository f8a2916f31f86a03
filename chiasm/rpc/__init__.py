"""How Chiasm's processes speak gRPC: one message limit, one keepalive, one shape of server.

limits    numbers that both ends must agree on
channel   opens channels and calls methods on them
context   request id and deadline of the call in hand
server    runs a service: health, reflection, errors, logs, metrics, drain
"""
