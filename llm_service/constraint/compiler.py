"""Compiles constraints before a request is admitted, off the event loop and within limits."""

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Final, TypeVar

from llguidance import LLMatcher

from chiasm import telemetry
from chiasm.errors import ChiasmError, Reason
from chiasm.v1 import llm_service_pb2
from llm_service.constraint.limits import ConstraintLimits, parser_limits
from llm_service.constraint.matcher import ConstraintBroken, GrammarConstraint, Vocabulary
from llm_service.constraint.proving import Trial, TrialFailed
from llm_service.constraint.requested import Requested, read_constraint

# Twice what the trial has, so that what it survived is survived here.
_STACK: Final = 64 << 20
_QUOTED: Final = 200
# A form that was given up is not tried again for so long: each trial holds up all new forms.
_GIVEN_UP_SECONDS: Final = 300.0
# New forms that wait for their turn, each for up to `ConstraintLimits.compile_seconds`.
_MOST_WAITING: Final = 16
_RETRY_SECONDS: Final = 3.0
# Findings that speak of the library's own matters, and what they mean to the caller.
_PLAIN: Final = {
    "oneOf constraints": "oneOf is not supported where two of its schemas may match at once; write "
    "anyOf, or give each a required property with another const",
    "NoExtension": "no text keeps it",
}
_TOO_COMPLEX: Final = (
    "fuel",
    "too big",
    "too large",
    "too complex",
    "too deeply",
    "precomputation",
)
_UNSUPPORTED: Final = ("unimplemented", "not supported", "unknown format", "only supported")
_Outcome = LLMatcher | ChiasmError
_Kept = TypeVar("_Kept")


class Compiler:
    """Compiled grammars of one model. Used on one event loop; `close` ends its process.

    A grammar compiles in a trial process first, which is killed at the limit of time and may crash;
    then in this process, in one thread that holds no lock of Python's meanwhile. Outcomes are kept
    by digest, refusals too.
    """

    def __init__(self, vocabulary: Vocabulary | None, limits: ConstraintLimits) -> None:
        self._vocabulary = vocabulary
        self.limits = self._limits = limits
        self._trial = Trial(limits)
        self._worker = _worker_with_stack(_STACK)
        self._turn = asyncio.Lock()
        self._kept: OrderedDict[bytes, _Outcome] = OrderedDict()
        self._given_up: OrderedDict[bytes, float] = OrderedDict()  # until when, by monotonic()
        self._waiting = 0

    async def compile(
        self, message: llm_service_pb2.OutputConstraint, *, ignore_eos: bool = False
    ) -> GrammarConstraint:
        """A new answer's constraint.

        Args:
            ignore_eos: the answer goes on for as long as the grammar lets it.

        Raises:
            ChiasmError: REQUEST_INVALID or UNSUPPORTED with the field at fault, or QUEUE_FULL.
        """
        return await self.enforce(read_constraint(message, self._limits), ignore_eos=ignore_eos)

    async def enforce(self, requested: Requested, *, ignore_eos: bool = False) -> GrammarConstraint:
        """A new answer's constraint from the text of a grammar. As `compile`."""
        vocabulary = self._vocabulary
        if vocabulary is None:
            about = requested.field.partition(".")[0]
            text = "This model's tokenizer serves no constraints."
            raise ChiasmError(Reason.UNSUPPORTED, text, about)
        outcome = self._found(requested) or await self._compile(requested, vocabulary)
        if isinstance(outcome, ChiasmError):
            raise ChiasmError(outcome.reason, outcome.message, requested.field)
        return GrammarConstraint(outcome.deep_copy(), vocabulary, ignore_eos=ignore_eos)

    async def close(self) -> None:
        await self._trial.close()
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _found(self, requested: Requested) -> _Outcome | None:
        digest = requested.digest
        outcome = self._kept.get(digest)
        if outcome is not None:
            self._kept.move_to_end(digest)
        elif self._given_up.get(digest, 0.0) > time.monotonic():
            return _too_complex(requested)
        return outcome

    async def _compile(self, requested: Requested, vocabulary: Vocabulary) -> _Outcome:
        async with self._queued(), self._turn:
            # Another request may have asked for the same meanwhile.
            outcome = self._found(requested)
            if outcome is None:
                outcome = await self._tried(requested, vocabulary)
                _keep(self._kept, requested.digest, outcome, self._limits.kept)
        return outcome

    @asynccontextmanager
    async def _queued(self) -> AsyncIterator[None]:
        if self._waiting >= _MOST_WAITING:
            raise ChiasmError(
                Reason.QUEUE_FULL,
                "Too many new forms wait to be compiled; forms used before are served at once.",
                None,
                retry_after=_RETRY_SECONDS,
            )
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1

    async def _tried(self, requested: Requested, vocabulary: Vocabulary) -> _Outcome:
        try:
            fault = await self._fault_of(requested)
        except TrialFailed as error:
            telemetry.logger().warning(
                "a constraint was given up", field=requested.field, why=str(error)
            )
            if error.blameless:
                text = "The form could not be compiled in time; try again shortly."
                raise ChiasmError(
                    Reason.QUEUE_FULL, text, requested.field, _RETRY_SECONDS
                ) from None
            # For a while only: it may have been the machine's fault.
            until = time.monotonic() + _GIVEN_UP_SECONDS
            _keep(self._given_up, requested.digest, until, self._limits.kept)
            raise _too_complex(requested) from None
        if fault:
            return _told(fault, requested)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._worker, compiled, requested, vocabulary)

    async def _fault_of(self, requested: Requested) -> str:
        """What the trial says; tried twice where the first failure was not the grammar's."""
        try:
            return await self._trial.fault_of(requested.grammar)
        except TrialFailed as error:
            if not error.blameless:
                raise
        return await self._trial.fault_of(requested.grammar)


def _keep(kept: "OrderedDict[bytes, _Kept]", digest: bytes, outcome: _Kept, count: int) -> None:
    kept[digest] = outcome
    if len(kept) > count:
        kept.popitem(last=False)


def compiled(requested: Requested, vocabulary: Vocabulary) -> _Outcome:
    """The grammar at its beginning, its first mask computed, or why there is none."""
    root = LLMatcher(vocabulary.tokenizer, requested.grammar, log_level=0, limits=parser_limits())
    if root.is_error():
        return _told(root.get_error(), requested)
    try:
        # On the root itself: what the first mask costs once, no answer pays again.
        first = GrammarConstraint(root, vocabulary).allowed()
    except ConstraintBroken:
        return _too_complex(requested)
    text_ids = first.clone()
    text_ids[list(vocabulary.eos_ids)] = False
    if not text_ids.any():
        return _refused(Reason.REQUEST_INVALID, "No text but the empty one keeps it.", requested)
    return root


def _told(fault: str, requested: Requested) -> ChiasmError:
    """The library's finding. It is written for whoever wrote the grammar, and quotes only that."""
    if any(sign in fault.lower() for sign in _TOO_COMPLEX):
        return _too_complex(requested)
    brief = next((plain for sign, plain in _PLAIN.items() if sign in fault), _brief(fault))
    unsupported = any(sign in brief.lower() for sign in _UNSUPPORTED)
    reason = Reason.UNSUPPORTED if unsupported else Reason.REQUEST_INVALID
    return _refused(reason, f"It cannot be enforced: {brief}.", requested)


def _brief(fault: str) -> str:
    """One line of the library's text: its `error:` line where it has one, else the first."""
    lines = [line.strip() for line in fault.splitlines() if line.strip()] or ["no reason given"]
    stated = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    line = (stated or lines)[0].rstrip(".:")
    clean = "".join(char if char.isprintable() else " " for char in line)
    return clean if len(clean) <= _QUOTED else f"{clean[:_QUOTED]}..."


def _too_complex(requested: Requested) -> ChiasmError:
    text = "It takes too much time or memory to enforce; make it smaller or less nested."
    return _refused(Reason.REQUEST_INVALID, text, requested)


def _refused(reason: Reason, message: str, requested: Requested) -> ChiasmError:
    return ChiasmError(reason, message, requested.field)


def _worker_with_stack(size: int) -> ThreadPoolExecutor:
    """One thread with that stack; threads that others start at this moment get it too."""
    before = threading.stack_size(size)
    try:
        worker = ThreadPoolExecutor(1, "grammar")
        worker.submit(threading.get_ident).result()
    finally:
        threading.stack_size(before)
    return worker
