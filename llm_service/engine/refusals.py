"""Why the engine refuses a request before it costs a step.

ChiasmError
  PromptTooLong    CONTEXT_LENGTH_EXCEEDED: it and one token of answer would never fit
  PromptInvalid    REQUEST_INVALID: token ids or image spans contradict the decoder
  TooManyChoices   REQUEST_INVALID: more answers than the engine ever holds at once
  EngineBusy       QUEUE_FULL: as many sequences wait as may
  EngineStopped    NOT_READY: the engine is stopping or its model is broken
UnsupportedDecoder   at construction: the decoder needs what paged attention does not do
"""

from chiasm.errors import ChiasmError, Reason


class PromptTooLong(ChiasmError):
    def __init__(self, prompt_tokens: int, limit: int) -> None:
        super().__init__(
            Reason.CONTEXT_LENGTH_EXCEEDED,
            f"Input tokens exceed the configured limit. This model's maximum context length is "
            f"{limit} tokens, but the messages have {prompt_tokens} and the answer needs one. "
            "Shorten the messages or send fewer pictures.",
            "messages",
        )


class PromptInvalid(ChiasmError):
    def __init__(self, message: str, field: str) -> None:
        super().__init__(Reason.REQUEST_INVALID, message, field)


class TooManyChoices(ChiasmError):
    def __init__(self, choices: int, limit: int) -> None:
        super().__init__(
            Reason.REQUEST_INVALID,
            f"A request may have 1 to {limit} choices here, but {choices} were asked for.",
            "choice_count",
        )


class EngineBusy(ChiasmError):
    def __init__(self, waiting: int) -> None:
        super().__init__(
            Reason.QUEUE_FULL, f"{waiting} requests are waiting; try again.", retry_after=1.0
        )


class EngineStopped(ChiasmError):
    def __init__(self) -> None:
        super().__init__(Reason.NOT_READY, "The engine is not running; try another replica.")


class UnsupportedDecoder(Exception):
    """The decoder asks its attention for something that the paged one does not do."""
