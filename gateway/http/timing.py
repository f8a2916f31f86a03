"""The `Server-Timing` header: https://www.w3.org/TR/server-timing/"""

from collections.abc import Mapping


def server_timing(milliseconds: Mapping[str, float]) -> dict[str, str]:
    """A header that tells how long each named stage took."""
    told = ", ".join(f"{name};dur={value:.3f}" for name, value in milliseconds.items())
    return {"server-timing": told}
