"""References and aliases of pictures: what they stand for, and what they come to name."""

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import astuple, replace
from typing import Any, Final, TypeVar

from chiasm.errors import ChiasmError, Reason, within
from llm_service.embeddings import Rows
from llm_service.holding.holding import Holding
from llm_service.holding.values import Binding, Held
from llm_service.request import CallerEmbedding, Picture, RawImage, Reference

T = TypeVar("T")
_BY_ALIAS: Final = Reference("")


class References:
    """Looks up and records the names of pictures; hashing and copying runs in `workers`."""

    def __init__(self, holding: Holding, workers: Executor) -> None:
        self._holding = holding
        self._workers = workers

    def whole(self, pictures: Sequence[Picture]) -> list[Picture]:
        """The pictures, those under an alias alone with the data that came under it beside them."""
        first: dict[str, Picture] = {}
        for picture in pictures:
            if picture.alias and not _is_reference(picture):
                first.setdefault(picture.alias, picture)
        return [
            replace(one, content=first[one.alias].content)
            if one.alias in first and one.content == _BY_ALIAS
            else one
            for one in pictures
        ]

    async def look_up(self, pictures: Sequence[Picture], tenant: str) -> list[Rows | None]:
        """The held rows of references, None for what came with its data.

        Raises EMBEDDING_NOT_FOUND naming the part, or NOT_READY.
        """
        return [await self._held(picture, tenant) for picture in pictures]

    async def check(
        self, pictures: Sequence[Picture], rows: Sequence[Rows | None], tenant: str
    ) -> None:
        """Raises REQUEST_INVALID for an alias that names other bytes, as far as is known by now.

        `rows` are None for pictures that are not encoded yet.
        """
        told: dict[str, Binding] = {}
        for picture, one in zip(pictures, rows, strict=True):
            if not picture.alias or picture.content == _BY_ALIAS:
                continue
            fresh = Binding("", b"" if one is None else one.digest, await self._file(picture))
            known = told.get(picture.alias) or await self._holding.named(tenant, picture.alias)
            # Without rows on one side and a file on the other nothing can be said before encoding.
            if known is not None and _comparable(known, fresh) and not known.agrees(fresh):
                raise _conflict(picture)
            told.setdefault(picture.alias, fresh)

    async def record(self, pictures: Sequence[Picture], rows: Sequence[Rows], tenant: str) -> None:
        """Holds what came under an alias, and binds the alias to it.

        Raises REQUEST_INVALID for an alias that names other bytes.
        """
        for picture, one in zip(pictures, rows, strict=True):
            if not picture.alias or picture.content == _BY_ALIAS:
                continue
            try:
                held = await self.hold(picture, one, tenant)
            except ChiasmError as error:
                if error.reason is not Reason.TENSOR_TOO_LARGE:
                    raise
                continue  # too large to hold: the request is answered all the same
            fresh = Binding(held.id, one.digest, await self._file(picture))
            current = await self._holding.bind(tenant, picture.alias, fresh)
            if not current.agrees(fresh):
                raise _conflict(picture)

    async def hold(self, picture: Picture, rows: Rows, tenant: str) -> Held:
        """Puts the rows of `picture`. Raises TENSOR_TOO_LARGE."""
        if isinstance(picture.content, CallerEmbedding):
            # A view of the whole message, which would stay in memory with it.
            rows = await self._work(_copied, rows)
        return await self._holding.put(tenant, rows)

    async def _held(self, picture: Picture, tenant: str) -> Rows | None:
        if not isinstance(picture.content, Reference):
            return None
        with within(picture.place):
            id = picture.content.id
            if not id:
                binding = await self._holding.named(tenant, picture.alias, sure=True)
                if binding is None:
                    raise _unknown_alias()
                id = binding.id
            elif picture.alias:
                raise ChiasmError(
                    Reason.REQUEST_INVALID,
                    "A reference is a name already; send it without an alias.",
                )
            return (await self._holding.get(tenant, id)).rows

    async def _file(self, picture: Picture) -> bytes:
        if not isinstance(picture.content, RawImage):
            return b""
        return await self._work(_file_digest, picture.content)

    async def _work(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._workers, work, *arguments)


def _is_reference(picture: Picture) -> bool:
    return isinstance(picture.content, Reference)


def _comparable(known: Binding, fresh: Binding) -> bool:
    return bool(known.file and fresh.file) or bool(known.rows and fresh.rows)


def _file_digest(image: RawImage) -> bytes:
    options = repr(astuple(image.options)).encode()
    digest = hashlib.sha256(len(options).to_bytes(8, "little") + options)
    digest.update(image.data)
    return digest.digest()


def _copied(rows: Rows) -> Rows:
    return replace(
        rows, rows=rows.rows.clone(), levels=tuple(level.clone() for level in rows.levels)
    )


def _conflict(picture: Picture) -> ChiasmError:
    return ChiasmError(
        Reason.REQUEST_INVALID,
        "This name stands for another picture already; give each picture a name of its own.",
        f"{picture.part}.alias",
    )


def _unknown_alias() -> ChiasmError:
    return ChiasmError(
        Reason.EMBEDDING_NOT_FOUND,
        "Nothing is held under this name: it has expired, was given up for room, or was never "
        "sent. Send the data again.",
    )
