"""The LLM service: conversations with text, pictures and embeddings in, text out.

settings    what an operator sets            app         starts, proves and stops the service
servicer    the walk of a request            request     checks a message from the wire
prompt      conversation to token ids        embeddings  checks an embedding against the contract
vision/     where raw pictures are encoded   engine/     scheduler, KV blocks, decoder, sampling
"""
