"""The http(s) pictures of a request, fetched before it is translated.

What comes joins the texts that were decoded beside the JSON, under the URL itself, so that the
readers of parts take a picture from wherever it is. A URL that was not fetched is refused there.
"""

import asyncio
import ssl
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from chiasm.errors import ChiasmError, Reason, within
from chiasm.tracing import names, spans
from chiasm.v1.llm_service_pb2 import VISION_SOURCE_NONE
from gateway.fetch.download import Downloads, forbidden
from gateway.fetch.lookup import Lookup
from gateway.fetch.policy import Forbidden, Target, is_web
from gateway.http.body import BodyBudget, Lease
from gateway.llm import Card
from gateway.metrics import GatewayMetrics
from gateway.openai.parse import Parsed
from gateway.openai.parts import too_many_bytes
from gateway.openai.schema import ChatRequest, ImageUrlPart
from gateway.openai.translate import check_image_count
from gateway.settings import GatewaySettings, PictureLimits

T = TypeVar("T")


class Room:
    """Bytes of the raw pictures of one request: at most `limit` of its own, and held by `lease`."""

    def __init__(self, limit: int, lease: Lease) -> None:
        self._limit = limit
        self._lease = lease
        self._count = 0

    def take(self, count: int) -> None:
        """Raises IMAGE_TOO_LARGE, or QUEUE_FULL where the gateway holds as much as it may."""
        self._count += count
        if self._count > self._limit:
            raise too_many_bytes(self._limit)
        self._lease.take(count)


@dataclass(frozen=True)
class UrlPictures:
    """Fetches what requests name. `downloads` is None where that is switched off."""

    downloads: Downloads | None
    limits: PictureLimits
    budget: BodyBudget
    metrics: GatewayMetrics

    @contextmanager
    def room(self) -> Iterator[Room]:
        """Room for what one request fetches; it is free again at the end."""
        with self.budget.lease() as lease:
            yield Room(self.limits.max_request_image_bytes, lease)

    async def fetched(self, parsed: Parsed, card: Card, room: Room) -> Parsed:
        """`parsed` with its http(s) pictures; as it was if it has none or they are not served.

        Raises ChiasmError with the path of the picture; the first failure ends all downloads.
        """
        urls = dict(_urls(parsed.chat))
        if not urls or self.downloads is None or card.vision_source == VISION_SOURCE_NONE:
            return parsed
        check_image_count(parsed.chat.messages, min(self.limits.max_images, card.max_image_count))
        targets = [self._target(self.downloads, url, place) for url, place in urls.items()]
        calls = [
            self._fetched(self.downloads, target, place, room)
            for target, place in zip(targets, urls.values(), strict=True)
        ]
        fetched = dict(zip(urls, await all_of(calls), strict=True))
        return replace(parsed, data={**parsed.data, **fetched})

    def _target(self, downloads: Downloads, url: str, place: str) -> Target:
        try:
            return downloads.policy.target(url)
        except Forbidden as error:
            self.metrics.downloads.labels(Reason.URL_FORBIDDEN).inc()
            raise forbidden(error).within(place) from None

    async def _fetched(self, downloads: Downloads, target: Target, place: str, room: Room) -> bytes:
        outcome = str(Reason.CANCELLED)
        try:
            with (
                spans.stage(names.DOWNLOAD),
                within(place),
                self.metrics.active_downloads.track_inprogress(),
            ):
                data = await downloads.fetch(target, room.take)
            outcome = "ok"
            return data
        except ChiasmError as error:
            outcome = str(error.reason)
            raise
        finally:
            self.metrics.downloads.labels(outcome).inc()


async def all_of(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """What `calls` give, in order. The first failure ends the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from failures.exceptions[0].__cause__
    return [task.result() for task in tasks]


def _urls(chat: ChatRequest) -> Iterator[tuple[str, str]]:
    """Each http(s) URL with its path in the JSON; of equal ones the first counts."""
    seen: set[str] = set()
    for number, message in enumerate(chat.messages):
        for index, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if isinstance(part, ImageUrlPart) and part.image_url is not None:
                url = part.image_url.url
                if is_web(url) and url not in seen:
                    seen.add(url)
                    yield url, f"messages[{number}].content[{index}].image_url.url"


def url_pictures(
    settings: GatewaySettings, budget: BodyBudget, lookup: Lookup, metrics: GatewayMetrics
) -> UrlPictures:
    """As `settings` say. Raises OSError for a file of certificates that cannot be read."""
    limits = settings.pictures
    if not settings.url_pictures:
        return UrlPictures(None, limits, budget, metrics)
    tls = ssl.create_default_context(cafile=settings.url_ca_file)
    downloads = Downloads(settings.url_policy, settings.downloads, lookup, tls)
    return UrlPictures(downloads, limits, budget, metrics)
