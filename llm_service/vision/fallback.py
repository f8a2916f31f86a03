"""The last rung of the ladder: a local tower for pictures that no encoder answered."""

from chiasm.errors import ChiasmError, Reason
from llm_service.vision.fleet_metrics import FleetMetrics
from llm_service.vision.source import Fetched, Sought, VisionSource


class WithFallback:
    """Asks `fleet`, and `local` where no encoder could be reached; a full fleet stays full."""

    def __init__(self, fleet: VisionSource, local: VisionSource, metrics: FleetMetrics) -> None:
        self._fleet = fleet
        self._local = local
        self._metrics = metrics

    async def encode(self, sought: Sought) -> Fetched:
        try:
            return await self._fleet.encode(sought)
        except ChiasmError as error:
            if error.reason is not Reason.NO_ENCODER:
                raise
        self._metrics.fallbacks.inc()
        return await self._local.encode(sought)

    async def close(self) -> None:
        await self._fleet.close()
        await self._local.close()
