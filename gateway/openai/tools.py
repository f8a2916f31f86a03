"""Tools of a request in OpenAI's form, to the LLM service's. Pure; raises ChiasmError."""

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Discriminator, Field, StringConstraints, Tag
from pydantic_core import PydanticCustomError

from chiasm.v1 import llm_service_pb2
from gateway.openai.base import Body, JsonObject, Text
from gateway.openai.errors import invalid

_MAX_TOOLS: Final = 128
_MODES: Final = ("none", "auto", "required")
_OF_A_TOOL: Final = re.compile(r"^tools\.tools_json\[(\d+)\]")
# The kind of tool that OpenAI's own servers run, and no other does.
_FUNCTION_ONLY: Final = "Tools are of the type function; leave others out."
_ONE_FUNCTION: Final = (
    "A choice that is an object has the type function and names one; to allow some tools only, "
    "send no others."
)


def _function_only(value: Any) -> Any:
    if isinstance(value, str) and value != "function":
        raise PydanticCustomError("tool_kind", _FUNCTION_ONLY)
    return value


def _one_function(value: Any) -> Any:
    if isinstance(value, str) and value != "function":
        raise PydanticCustomError("tool_kind", _ONE_FUNCTION)
    return value


Kind = Annotated[Literal["function"], BeforeValidator(_function_only)]
FunctionName = Annotated[str, StringConstraints(pattern="^[a-zA-Z0-9_-]{1,64}$")]


class FunctionDefinition(Body):
    """A function that may be called; `parameters` is the JSON schema of its arguments."""

    name: FunctionName
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool = False


class Tool(Body):
    """A tool on offer."""

    type: Kind
    function: FunctionDefinition


class Named(Body):
    """The name of a function."""

    name: FunctionName


class NamedChoice(Body):
    """The one function that is to be called."""

    type: Annotated[Literal["function"], BeforeValidator(_one_function)]
    function: Named


def _choice_tag(value: Any) -> str | None:
    if isinstance(value, str):
        return "<mode>" if value in _MODES else None
    return "<named>" if isinstance(value, dict) else None


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<mode>")]
    | Annotated[NamedChoice, Tag("<named>")],
    Discriminator(
        _choice_tag,
        custom_error_type="tool_choice",
        custom_error_message="The tool choice is none, auto, required, or an object "
        '{"type": "function", "function": {"name": ...}}.',
    ),
]
Tools = Annotated[list[Tool], Field(max_length=_MAX_TOOLS, fail_fast=True)]


def check_choice(tools: Sequence[Tool], choice: Any) -> None:
    """Raises REQUEST_INVALID for a choice that the tools do not allow, or a name twice."""
    names = [tool.function.name for tool in tools]
    for number, name in enumerate(names):
        if name in names[:number]:
            place = f"tools[{number}].function.name"
            raise invalid("Two tools have this name; give each a name of its own.", place)
    if isinstance(choice, NamedChoice) and choice.function.name not in names:
        place = "tool_choice.function.name"
        raise invalid("The chosen function is not among the tools.", place)
    if choice == "required" and not names:
        raise invalid("A call is required, but there are no tools; send them.", "tool_choice")


def tool_options(
    tools: Sequence[Tool], choice: Any, parallel: bool | None
) -> llm_service_pb2.ToolOptions | None:
    """The tools as the LLM service takes them; None where there are none."""
    if not tools:
        return None
    wanted = f"function:{choice.function.name}" if isinstance(choice, NamedChoice) else choice
    return llm_service_pb2.ToolOptions(
        tools_json=[json.dumps(_definition(tool), ensure_ascii=False) for tool in tools],
        tool_choice=wanted,
        parallel_tool_calls=parallel,
    )


def _definition(tool: Tool) -> dict[str, Any]:
    return {"type": "function", "function": tool.function.model_dump(exclude_unset=True)}


def path_of(field: str) -> str | None:
    """The path of the JSON for a field of the LLM service about tools; None for others."""
    if field.startswith("tools.tools_json"):
        return _OF_A_TOOL.sub(r"tools[\1]", field).removesuffix(".tools_json")
    return "tool_choice" if field == "tools.tool_choice" else None
