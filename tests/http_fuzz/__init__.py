"""Requests made from the OpenAPI document, sent to a real gateway before a scripted LLM service."""
