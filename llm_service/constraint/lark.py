"""Checks a Lark grammar and writes the grammars of choices. Pure.

The library extends Lark by special tokens, by options of its own and by grammars inside grammars.
An answer must never hold a special token, and an option could switch checks off: both are refused.
"""

import json
import re
from collections.abc import Sequence
from typing import Final

from chiasm.errors import ChiasmError, Reason

FIELD: Final = "constraint.grammar"

# What is not grammar itself: comments, texts and regular expressions, each to its end.
_OPAQUE: Final = re.compile(r'//[^\n]*|#[^\n]*|"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/')
_DIRECTIVE: Final = re.compile(r"%(\w*)")
_SERVED_DIRECTIVES: Final = frozenset({"ignore", "import"})
_IGNORED_ATTRIBUTE: Final = re.compile(r"\b(temperature|capture)\b\s*[=\]]")


def check(grammar: str) -> None:
    """Raises UNSUPPORTED for what would leave the grammar of plain text."""
    bare = _OPAQUE.sub(" ", grammar)
    if "::=" in bare:
        raise _unsupported("The grammar is EBNF or GBNF; write it in Lark's syntax (rule: ...).")
    if "<" in bare:
        raise _unsupported("An answer holds no special tokens; leave <...> out of the grammar.")
    for name in _DIRECTIVE.findall(bare):
        if name not in _SERVED_DIRECTIVES:
            raise _unsupported(f"%{name[:20]} is not served; %ignore and %import common.X are.")
    attribute = _IGNORED_ATTRIBUTE.search(bare)
    if attribute:
        raise _unsupported(f"The attribute {attribute[1]} is not served; leave it out.")


def of_choices(choices: Sequence[str]) -> str:
    """The grammar of exactly these texts."""
    # Lark's texts are JSON's.
    return "start: " + "\n  | ".join(json.dumps(choice) for choice in choices)


def _unsupported(message: str) -> ChiasmError:
    return ChiasmError(Reason.UNSUPPORTED, message, FIELD)
