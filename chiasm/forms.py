"""Forms that an answer is held to: `client.generate(..., form=forms.choice("yes", "no"))`."""

import json
from collections.abc import Mapping
from typing import Any

from chiasm.v1 import llm_service_pb2

Form = llm_service_pb2.OutputConstraint


def json_object() -> Form:
    """Any JSON object, without blanks between its parts."""
    return Form(json_object=True)


def json_schema(schema: Mapping[str, Any]) -> Form:
    """JSON that validates against `schema`, without blanks between its parts."""
    return Form(json_schema=json.dumps(schema))


def regex(pattern: str) -> Form:
    """Text that matches from end to end, in the syntax of Rust's `regex` without look-around."""
    return Form(regex=pattern)


def choice(*texts: str) -> Form:
    """One of these texts."""
    return Form(choice=llm_service_pb2.ChoiceList(choices=texts))


def grammar(text: str) -> Form:
    """Text of a context-free grammar in Lark's syntax; it begins at the rule `start`."""
    return Form(grammar=text)
