"""Compiles the grammars of requests with tools."""

from chiasm.errors import ChiasmError, Reason
from chiasm.v1 import llm_service_pb2
from llm_service.constraint.compiler import Compiler
from llm_service.constraint.json_schema import ANY_OBJECT
from llm_service.constraint.matcher import GrammarConstraint
from llm_service.tools.grammar import arguments_of, grammar_of
from llm_service.tools.offered import Function, Tools


class ToolConstraints:
    """What answers keep that may call tools."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler

    async def enforce(
        self, tools: Tools, wanted: llm_service_pb2.OutputConstraint | None, ignore_eos: bool
    ) -> GrammarConstraint:
        """A new answer's constraint: `tools`, or an answer of the form `wanted`.

        Raises as `Compiler.compile`, and UNSUPPORTED for a form that does not go with tools.
        """
        answer = _answer_of(wanted) if tools.choice == "auto" else None
        limits = self._compiler.limits
        loose = {one.name for one in tools.functions if not await self._enforceable(one)}
        try:
            requested = grammar_of(tools, limits, answer, loose)
            return await self._compiler.enforce(requested, ignore_eos=ignore_eos)
        except ChiasmError as error:
            strict = any(one.strict for one in tools.functions)
            if strict or error.reason is Reason.QUEUE_FULL:
                raise
        every = {one.name for one in tools.functions}
        requested = grammar_of(tools, limits, answer, every)
        return await self._compiler.enforce(requested, ignore_eos=ignore_eos)

    async def _enforceable(self, function: Function) -> bool:
        """Whether arguments can be held to the schema; raises where they must be.

        Each schema is tried alone: within the whole, where a call is far from the beginning, one
        that no text keeps would be found only when an answer has come that far.
        """
        try:
            await self._compiler.enforce(arguments_of(function, self._compiler.limits))
        except ChiasmError as error:
            if function.strict or error.reason is Reason.QUEUE_FULL:
                raise
            return False
        return True


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
