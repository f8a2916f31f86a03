"""Compiles the grammars of requests with tools."""

from collections import OrderedDict
from typing import Final

from chiasm.errors import ChiasmError, Reason
from chiasm.v1 import llm_service_pb2
from llm_service.constraint.compiler import Compiler
from llm_service.constraint.json_schema import ANY_OBJECT
from llm_service.constraint.matcher import GrammarConstraint
from llm_service.constraint.requested import Requested
from llm_service.tools.grammar import arguments_of, grammar_of
from llm_service.tools.offered import Function, Tools

# Outcomes, not grammars: more functions than a request may have, and light.
_KEPT: Final = 1024


class ToolConstraints:
    """What answers keep that may call tools."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler
        # What speaks against a grammar of arguments, by its digest; None: nothing.
        self._tried: OrderedDict[bytes, ChiasmError | None] = OrderedDict()

    async def enforce(
        self, tools: Tools, wanted: llm_service_pb2.OutputConstraint | None, ignore_eos: bool
    ) -> GrammarConstraint:
        """A new answer's constraint: `tools`, or an answer of the form `wanted`.

        Raises as `Compiler.compile`, and UNSUPPORTED for a form that does not go with tools.
        """
        answer = _answer_of(wanted) if tools.choice == "auto" else None
        loose = {one.name for one in tools.functions if not await self._enforceable(one)}
        try:
            return await self._enforced(tools, answer, loose, ignore_eos)
        except ChiasmError as error:
            strict = any(one.strict for one in tools.functions)
            if strict or error.reason is Reason.QUEUE_FULL:
                raise
        every = {one.name for one in tools.functions}
        return await self._enforced(tools, answer, every, ignore_eos)

    async def _enforced(
        self, tools: Tools, answer: str | None, loose: set[str], ignore_eos: bool
    ) -> GrammarConstraint:
        requested = grammar_of(tools, self._compiler.limits, answer, loose)
        return await self._compiler.enforce(requested, ignore_eos=ignore_eos)

    async def _enforceable(self, function: Function) -> bool:
        """Whether arguments can be held to the schema; raises where they must be and cannot.

        Each schema is tried alone: within the whole, where a call is far from the beginning, one
        that no text keeps would be found only when an answer has come that far.
        """
        try:
            await self._try(arguments_of(function, self._compiler.limits))
        except ChiasmError as error:
            if function.strict or error.reason is Reason.QUEUE_FULL:
                raise
            return False
        return True

    async def _try(self, requested: Requested) -> None:
        """Raises what speaks against the grammar, found now or before."""
        digest = requested.digest
        if digest not in self._tried:
            try:
                await self._compiler.enforce(requested)
                self._tried[digest] = None
            except ChiasmError as error:
                if error.reason is Reason.QUEUE_FULL:
                    raise
                self._tried[digest] = error
            if len(self._tried) > _KEPT:
                self._tried.popitem(last=False)
        fault = self._tried[digest]
        if fault is not None:
            raise ChiasmError(fault.reason, fault.message, requested.field)


def _answer_of(wanted: llm_service_pb2.OutputConstraint | None) -> str | None:
    kind = None if wanted is None else wanted.WhichOneof("kind")
    if wanted is None or kind is None:
        return None
    if kind == "json_schema":
        return wanted.json_schema
    if kind == "json_object":
        return ANY_OBJECT
    raise ChiasmError(
        Reason.UNSUPPORTED,
        "Beside tools an answer is free text or JSON; leave out this form, or the tools.",
        f"constraint.{kind}",
    )
