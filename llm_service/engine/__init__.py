"""The embedded engine: continuous batching over unmodified transformers decoders.

A request's way through the files: `engine` takes it, `scheduler` decides what each step computes,
`runner` computes it (`attention` reads and writes the paged keys and values that `block_pool`
hands out), `sampler` picks tokens after `penalties`, `sequence`, `text` and `token_bytes` turn them
into events.
"""
