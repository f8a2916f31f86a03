"""Chiasm: vision-language serving with the eye and the brain on separate machines.

`Client` and `AsyncClient` speak to the services directly over gRPC. Importing this package loads
neither torch nor transformers.
"""

import os

# gRPC's core writes notes of its own to standard error; a process of ours writes a line a request.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

__version__ = "0.1.0"
__all__ = ["AsyncClient", "ChiasmError", "Client", "MutualTls", "Reason", "__version__"]


def __getattr__(name: str) -> object:
    # Loaded on first use: a service that only wants `__version__` does not pay for the client.
    if name in {"AsyncClient", "Client", "MutualTls"}:
        from chiasm import client

        return getattr(client, name)
    if name in {"ChiasmError", "Reason"}:
        from chiasm import errors

        return getattr(errors, name)
    raise AttributeError(f"module 'chiasm' has no attribute {name!r}")
