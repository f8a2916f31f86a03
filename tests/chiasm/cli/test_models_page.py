from pathlib import Path

import pytest

from chiasm.cli import main
from chiasm.cli.models import page
from chiasm.models.families import FAMILIES

ROOT = Path(__file__).resolve().parents[3]


def test_the_page_in_the_docs_is_the_one_that_the_command_prints() -> None:
    written = (ROOT / "docs" / "models.md").read_text()
    assert written == page(), "run: chiasm models --markdown > docs/models.md"


def test_every_family_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(FAMILIES) + 1
    assert all(any(f" {name} " in line for line in lines) for name in FAMILIES)
