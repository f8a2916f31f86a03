"""How Chiasm's processes speak gRPC: one message limit, one keepalive, one shape of server.

limits    numbers that both ends must agree on
channel   opens channels and calls methods on them; `lined_channel` finds who comes late
context   request id and deadline of the call in hand
server    runs a service: health, reflection, errors, logs, metrics, drain
health    what a process says of itself, on its main port and on a plaintext one; `probe` asks it
mtls      settings of mutual TLS; `certificates` reads the files, `callers` guards a server,
          `secure_channel` is a client's
"""
