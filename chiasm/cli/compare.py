"""`chiasm compare`: do all ways into a running system give the same text?"""

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from chiasm.cli.cases import SAMPLE_QUESTIONS, Case, cases
from chiasm.cli.dialogue import RAW, Dialogue, Line, Picture, picture_count
from chiasm.cli.part import Part
from chiasm.cli.plan import PlanError, Wanted, local_llm, reserved_port
from chiasm.cli.samples import sample_pictures
from chiasm.cli.system import Limits, LogSink, PartFailed, running_part
from chiasm.cli.up import refuse, say
from chiasm.cli.ways import Way, grpc_way, grpc_ways, http_ways, threaded
from chiasm.client import AsyncClient, MutualTls
from chiasm.errors import ChiasmError
from chiasm.rpc import mtls

_READY_SECONDS, _STOP_SECONDS = 300.0, 10.0
_MIN_WIDTH = 120
_SHOWN_DIFFERENCES = 5


@dataclass(frozen=True)
class Row:
    """One turn of one case: the text that each way gave, or None where it does not apply."""

    name: str
    texts: tuple[str | None, ...]

    @property
    def equal(self) -> bool:
        return len({text for text in self.texts if text is not None}) == 1


class Refused(Exception):
    """What was asked cannot be compared; the text says why."""


def run(options: argparse.Namespace) -> int:
    """0 if all texts are equal, 1 if not, 2 if the system or an input cannot be used."""
    try:
        return asyncio.run(_compare(options))
    except (Refused, PlanError, PartFailed) as error:
        return refuse(str(error))
    except ChiasmError as error:
        return refuse(f"a service of the system answered: {error}")
    except (openai.APIError, httpx.HTTPError) as error:
        return refuse(f"the gateway at {options.url} cannot be used: {error}")
    except KeyboardInterrupt:
        return 130


async def _compare(options: argparse.Namespace) -> int:
    async with (
        _client(options) as client,
        _all_ways(options, client) as ways,
    ):
        pictures = [
            Picture(path, await client.encode(path)) for path in _pictures(options.pictures)
        ]
        rows = [
            row
            for case in cases(pictures, _questions(options.questions))
            for row in await _hold(case, ways)
        ]
    _print(rows, [way.name for way in ways])
    return 0 if all(row.equal for row in rows) else 1


def _client(options: argparse.Namespace) -> AsyncClient:
    """Raises Refused for files or names of mutual TLS that cannot be."""
    try:
        files = mtls.files(options.mtls_cert, options.mtls_key, options.mtls_ca)
        for flag, names in (
            ("--mtls-llm", options.mtls_llm),
            ("--mtls-encoder", options.mtls_encoder),
        ):
            mtls.check(files, flag, names)
        tls = None
        if files is not None:
            names = (options.mtls_llm, options.mtls_encoder)
            tls = MutualTls(files.cert, files.key, files.ca, *names)
        return AsyncClient(options.llm, options.encoder, timeout=options.timeout, tls=tls)
    except ValueError as error:
        raise Refused(str(error)) from None


@asynccontextmanager
async def _all_ways(options: argparse.Namespace, client: AsyncClient) -> AsyncIterator[list[Way]]:
    tokens = options.max_tokens
    async with AsyncExitStack() as stack:
        model_id = (await client.get_model()).model_id
        ways = await stack.enter_async_context(http_ways(options.url, tokens, options.timeout))
        ways += grpc_ways(client, tokens)
        if options.model is not None:
            # Both take seconds to load, so both at once.
            whole = asyncio.create_task(_whole_way(options))
            ways.append(await stack.enter_async_context(_local_way(options, model_id)))
            ways.append(await whole)
        yield ways


@asynccontextmanager
async def _local_way(options: argparse.Namespace, model_id: str) -> AsyncIterator[Way]:
    """A way through an LLM service of our own that has the tower in its process."""
    wanted = Wanted(options.model.resolve(), model_id, vision="local", dtype=options.dtype)
    limits = Limits(_READY_SECONDS, _STOP_SECONDS)
    with closing(LogSink(sys.stderr, None)) as sink, reserved_port() as port:
        command = local_llm(wanted, port)
        async with (
            running_part(Part(command, sink), limits),
            AsyncClient(command.target, timeout=options.timeout) as client,
        ):
            yield Way("local tower", grpc_way(client, options.max_tokens, RAW))


async def _whole_way(options: argparse.Namespace) -> Way:
    from chiasm.cli.whole_model import WholeModel

    model = await asyncio.to_thread(WholeModel, options.model, options.dtype, options.max_tokens)
    return Way("transformers", threaded(model.answer))


async def _hold(case: Case, ways: Sequence[Way]) -> list[Row]:
    """Asks every turn in every way. The first way's answer is the history of all."""
    rows: list[Row] = []
    dialogue: Dialogue = ()
    for number, turn in enumerate(case.turns, start=1):
        dialogue = (*dialogue, Line(turn.items))
        texts = [await _ask(way, dialogue) for way in ways]
        name = case.name if len(case.turns) == 1 else f"{case.name}: {number}"
        rows.append(Row(name, tuple(texts)))
        dialogue = (*dialogue, Line((texts[0] or "",), by_model=True))
        say(f"{name}: {texts[0]!r}")
    return rows


async def _ask(way: Way, dialogue: Dialogue) -> str | None:
    if picture_count(dialogue) < way.least_pictures:
        return None
    return await way.ask(dialogue)


def _pictures(given: Sequence[Path] | None) -> list[Path]:
    if given is None:
        return sample_pictures()
    files = [
        file for path in given for file in (sorted(path.iterdir()) if path.is_dir() else [path])
    ]
    found = [file for file in files if file.is_file()]
    if not found:
        raise Refused("--pictures names no file")
    return found


def _questions(file: Path | None) -> list[str]:
    if file is None:
        return list(SAMPLE_QUESTIONS)
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"--questions {file} cannot be read as UTF-8 text: {error}") from error
    questions = [line.strip() for line in lines if line.strip()]
    if not questions:
        raise Refused(f"--questions {file} holds no question")
    return questions


def _print(rows: Sequence[Row], ways: Sequence[str]) -> None:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("case")
    for way in ways:
        table.add_column(way.replace(" ", "\n"), justify="center")
    for row in rows:
        table.add_row(escape(row.name), *(_cell(row, text) for text in row.texts))
    console = Console()
    console = console if console.is_terminal else Console(width=_MIN_WIDTH)
    console.print(table)
    different = [row for row in rows if not row.equal]
    for row in different[:_SHOWN_DIFFERENCES]:
        _print_texts(row, ways)
    say(f"All ways agree on {len(rows) - len(different)} of {len(rows)} answers.")


def _cell(row: Row, text: str | None) -> str:
    if text is None:
        return "-"
    return "equal" if text == row.texts[0] else "[bold red]DIFFERS"


def _print_texts(row: Row, ways: Sequence[str]) -> None:
    say(f"{row.name}:")
    for way, text in zip(ways, row.texts, strict=True):
        if text is not None:
            say(f"    {way:<14}{text!r}")
