"""Bounds on constraints. Loads nothing heavy: the trial process imports it too."""

from dataclasses import dataclass

from llguidance import LLParserLimits


@dataclass(frozen=True)
class ConstraintLimits:
    """What a caller may ask for.

    Attributes:
        text_bytes: of a schema, a regular expression, a grammar, or all choices together, in UTF-8.
        depth: objects and lists of a schema inside each other.
        choices: texts to choose from.
        compile_seconds: wall-clock time after which compiling is killed.
        trial_bytes: memory that compiling may take.
        kept: compiled grammars that are kept for the next request.
    """

    text_bytes: int = 64 * 1024
    depth: int = 64
    choices: int = 1024
    compile_seconds: float = 3.0
    trial_bytes: int = 1 << 30
    kept: int = 64


@dataclass(frozen=True)
class MaskBudget:
    """CPU time that one answer's masks may take on the engine's thread, in seconds.

    Together `flat + per_token * tokens`: all other answers wait for it.
    """

    flat: float = 0.25
    per_token: float = 0.005

    def allows(self, spent: float, tokens: int) -> bool:
        return spent <= self.flat + self.per_token * tokens


def parser_limits() -> LLParserLimits:
    """The library's own limits, the same in the trial and in earnest.

    Errors are terse: the verbose ones print the parser's state and other people's text with it.
    """
    return LLParserLimits(
        max_items_in_row=2000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=100_000,
        step_max_items=50_000,
        max_lexer_states=50_000,  # 1 to 2 kB each
        max_grammar_size=200_000,
        verbose_errors=False,
    )
