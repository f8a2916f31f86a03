"""Settings are read once, frozen, and a wrong one ends the start with its name."""

import pytest
from pydantic import Field, SecretStr, ValidationError
from pydantic_settings import SettingsConfigDict

from chiasm import settings


class Example(settings.Settings):
    """Settings of an example."""

    model_config = SettingsConfigDict(env_prefix="CHIASM_EXAMPLE_")

    max_images: int = Field(4, ge=1, description="Most pictures.")
    name: str = Field(description="A name.")
    key: SecretStr | None = Field(None, description="A secret.")
    fast: bool = Field(False, description="Go fast.")


def _read(*words: str) -> Example:
    return settings.read(Example, list(words), program="example")


def test_flags_win_over_variables_and_variables_over_defaults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CHIASM_EXAMPLE_MAX_IMAGES", "8")
    monkeypatch.setenv("CHIASM_EXAMPLE_NAME", "from-variable")
    assert _read().max_images == 8
    assert _read("--max-images", "9", "--name", "n").max_images == 9
    assert _read("--fast").fast


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--name", "n", "--max-images", "many"], "--max-images"),
        (["--name", "n", "--max-images", "0"], "--max-images"),
        ([], "--name"),
        (["--name", "n", "--max-imagez", "3"], "--max-imagez"),
    ],
)
def test_a_wrong_flag_ends_the_start_with_its_name(
    words: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        _read(*words)
    assert caught.value.code == 2
    assert named in capsys.readouterr().err


def test_an_unknown_variable_of_ours_ends_the_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CHIASM_EXAMPLE_MAX_IMAGEZ", "8")
    with pytest.raises(SystemExit):
        _read("--name", "n")
    assert "CHIASM_EXAMPLE_MAX_IMAGEZ" in capsys.readouterr().err


def test_settings_are_frozen_and_secrets_are_masked() -> None:
    read = _read("--name", "n", "--key", "hunter2")
    with pytest.raises(ValidationError):
        read.name = "other"  # type: ignore[misc]
    assert settings.shown(read)["key"] == "***"
