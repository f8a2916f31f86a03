"""Several connections to one peer.

The frames of calls on one HTTP/2 connection share its window and its order: a small reply waits
behind the bytes of a large one that were written before it. On a connection of its own it does not.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import grpc.aio

from chiasm.rpc.channel import open_channel
from chiasm.rpc.secure_channel import ClientTls

# Measured by `python -m benchmarks.transfer`: more give nothing on one host.
CONNECTIONS = 2


class Bundle:
    """Channels to `target`, each with a connection of its own, made at the first call
    or by `connect`.

    Close it on the event loop that it was made on.
    """

    def __init__(
        self, target: str, connections: int = CONNECTIONS, tls: ClientTls | None = None
    ) -> None:
        self._channels = [open_channel(target, tls) for _ in range(connections)]
        self._expected = [0] * connections

    def connect(self) -> None:
        """Begins to make all connections, so that no first call on one meets a peer that hangs."""
        for channel in self._channels:
            channel.get_state(try_to_connect=True)

    @contextmanager
    def lent(self, expected_bytes: int) -> Iterator[grpc.aio.Channel]:
        """The channel on which the fewest bytes are expected, for one call that expects so many."""
        at = min(range(len(self._channels)), key=self._expected.__getitem__)
        self._expected[at] += expected_bytes
        try:
            yield self._channels[at]
        finally:
            self._expected[at] -= expected_bytes

    async def close(self) -> None:
        """Closes all at once; running calls fail."""
        for channel in self._channels:
            await channel.close()
