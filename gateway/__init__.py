"""The gateway: OpenAI's JSON over HTTP in, `chiasm.v1.LlmService` over gRPC out.

A request walks `http/observed` (request id, log, metrics, errors), `app` (routes), `http/body`
(bytes within a limit), `openai/parse` (JSON to a checked `openai/schema`), `openai/translate` (to a
GenerateRequest; pictures by `openai/parts`, embeddings by `containers`), `llm` (the call), and back
through `openai/answer` and `http/events`. Nothing here loads torch or knows a model.
"""
