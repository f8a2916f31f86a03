"""What all models of requests share."""

import json
import re
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

_SURROGATE: Final = re.compile("[\ud800-\udfff]")


def sound(text: str) -> str:
    """`text`, which is whole characters and can be tokenized."""
    if "\0" in text:
        raise PydanticCustomError("nul_character", "The text holds a NUL character; remove it.")
    if not text.isascii() and _SURROGATE.search(text):
        raise PydanticCustomError(
            "lone_surrogate", "The text holds half of a surrogate pair, no character; remove it."
        )
    return text


def _sound_object(value: dict[str, Any]) -> dict[str, Any]:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        raise PydanticCustomError(
            "lone_surrogate", "A text in it holds half of a surrogate pair; remove it."
        ) from None
    return value


# An object that is passed on as JSON.
JsonObject = Annotated[dict[str, Any], AfterValidator(_sound_object)]
Text = Annotated[str, AfterValidator(sound)]


class Body(BaseModel):
    """An object of the request. What it does not name is ignored."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, value: Any) -> Any:
        if isinstance(value, dict) and None in value.values():
            return {key: inner for key, inner in value.items() if inner is not None}
        return value
