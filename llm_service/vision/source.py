"""What the servicer needs of a vision source, and the source of a deployment that has none."""

from dataclasses import dataclass
from typing import Literal, Protocol

from chiasm.errors import ChiasmError, Reason
from chiasm.models.contract import ImageForm
from llm_service.embeddings import Rows
from llm_service.request import RawImage

Origin = Literal["cache", "remote", "local"]


@dataclass(frozen=True)
class Asked:
    """On whose behalf a picture is encoded. `deadline` is time.monotonic seconds."""

    tenant: str
    request_id: str
    deadline: float


@dataclass(frozen=True, eq=False)
class Sought:
    """A picture whose rows are wanted.

    Attributes:
        image: its file and options.
        digest: SHA-256 of the file, computed here.
        form: what the prompt holds for it: the rows must be of this form.
        asked: on whose behalf.
    """

    image: RawImage
    digest: bytes
    form: ImageForm
    asked: Asked


@dataclass(frozen=True, eq=False)
class Fetched:
    """Rows of one picture and how they were had. Seconds are of this picture alone."""

    rows: Rows
    origin: Origin
    fetch_seconds: float
    encode_seconds: float = 0.0
    encoder_name: str = ""
    encoder_cache_hit: bool = False


class VisionSource(Protocol):
    """Encodes one picture; errors name the field inside the part, for instance `data`."""

    async def encode(self, sought: Sought) -> Fetched: ...

    async def close(self) -> None: ...


class NoVision:
    """The source of a service that takes precomputed embeddings only."""

    async def encode(self, sought: Sought) -> Fetched:
        raise ChiasmError(
            Reason.UNSUPPORTED,
            "This service has no vision source: send precomputed embeddings, not pictures.",
        )

    async def close(self) -> None:
        return None
