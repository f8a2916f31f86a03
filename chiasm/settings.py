"""Reads a process's settings from flags and environment, once, at start.

A settings class derives from `Settings`; each field's description is its help. `--max-images 8`
and `CHIASM_LLM_MAX_IMAGES=8` set the same field, the flag wins. A malformed or unknown setting ends
the start with its name.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NoReturn, TypeVar

from pydantic import AfterValidator, SecretStr, ValidationError
from pydantic_settings import (
    BaseSettings,
    CliApp,
    CliSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from chiasm import colours

S = TypeVar("S", bound="Settings")

Colour = Annotated[str, AfterValidator(colours.canonical)]
"""A setting that is `#rrggbb`, however it was written."""


class Settings(BaseSettings):
    """Frozen settings of one process."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        cli_kebab_case=True,
        cli_avoid_json=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_exit_on_error=False,
        cli_use_class_docs_for_groups=False,
        validate_default=True,
    )


def read(kind: type[S], arguments: Sequence[str] | None = None, *, program: str) -> S:
    """The settings of this process; on a fault prints its name and reason and exits with 2."""
    _refuse_unknown_variables(kind, os.environ)
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        source: CliSettingsSource[Any] = CliSettingsSource(kind, cli_prog_name=program)
        return CliApp.run(kind, cli_args=words, cli_settings_source=source)
    except ValidationError as error:
        _refuse("; ".join(_fault(kind, fault) for fault in error.errors(include_url=False)))
    except SettingsError as error:
        # Raised for the command line's own form: its text names the flag.
        _refuse(str(error.__cause__ or error))


def shown(settings: Settings) -> dict[str, object]:
    """The settings for the log, secrets masked."""
    return {
        name: "***" if isinstance(value, SecretStr) else value
        for name, value in settings.model_dump(mode="python").items()
    }


def _fault(kind: type[Settings], fault: Mapping[str, Any]) -> str:
    # What a validator of ours says has a prefix of pydantic's.
    text = str(fault["msg"]).removeprefix("Value error, ")
    if not fault["loc"]:  # about several settings, which it names itself
        return text
    name = str(fault["loc"][0])
    flag = "--" + name.replace("_", "-")
    variable = f"{kind.model_config.get('env_prefix', '')}{name}".upper()
    return f"{flag} (or {variable}): {text}"


def _refuse_unknown_variables(kind: type[Settings], environment: Mapping[str, str]) -> None:
    prefix = str(kind.model_config.get("env_prefix", "")).upper()
    if not prefix:
        return
    known = {f"{prefix}{name}".upper() for name in kind.model_fields}
    unknown = sorted(
        name
        for name in environment
        if name.upper().startswith(prefix) and name.upper() not in known
    )
    if unknown:
        _refuse(f"unknown environment variable {unknown[0]}; known: {', '.join(sorted(known))}")


def _refuse(text: str) -> NoReturn:
    print(f"error: {text}", file=sys.stderr)
    raise SystemExit(2)
