"""Embeddings that callers refer to: put once, named by an unguessable id or the caller's alias.

`holding` is what the rest of the service sees; `memory` is this node's store, `shared` one in Redis
or Valkey that several nodes use, `frame` the bytes that travel there.
"""
