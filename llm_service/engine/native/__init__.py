"""Decoder layers in native code, where the decoder is of the Llama kind and runs on the CPU.

A chain of some hundred torch operations reads the weights of a decode step at a third of the
memory's speed. `rows.c` does all layers in one call. It is compiled when the package is built,
where there is a C compiler, and left out where there is none; the engine then runs its steps
through the decoder itself, slower and with the same answers.
"""

from llm_service.engine.native.decoder import NativeDecoder

__all__ = ["NativeDecoder"]
