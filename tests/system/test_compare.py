from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.system.processes import (
    DEMO_MODEL,
    SAMPLES,
    Process,
    start_encoder,
    start_gateway,
    start_llm,
)
from tests.tiny_llava import build_tiny_llava

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]
NAME = ("--model-id", "chiasm-demo")
SECONDS = 180
WAYS_OVER_NETWORK, WAYS = 8, 10


@dataclass(frozen=True)
class Addresses:
    url: str
    llm: str
    encoder: str


@pytest.fixture(scope="module")
def system() -> Iterator[Addresses]:
    with (
        start_encoder(DEMO_MODEL, *NAME) as encoder,
        start_llm(DEMO_MODEL, *NAME, "--encoders", encoder.target) as llm,
        start_gateway(llm.port) as gateway,
    ):
        yield Addresses(gateway.url, llm.target, encoder.target)


def compared(system: Addresses, *flags: str) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    at = ("--url", system.url, "--llm", system.llm, "--encoder", system.encoder)
    with Process("-m", "chiasm.cli", "compare", *at, *flags) as process:
        return process.wait(SECONDS), process.out(), process.log()


def cells(out: str) -> list[list[str]]:
    """The cells of each row of the table, without the row's name."""
    rows = [[word for word in line.split() if word in {"equal", "DIFFERS", "-"}]
            for line in out.splitlines()]  # fmt: skip
    return [row for row in rows if len(row) >= WAYS_OVER_NETWORK]


def test_every_way_gives_the_text_of_transformers_own_generate(system: Addresses) -> None:
    code, out, log = compared(system, "--model", str(DEMO_MODEL))
    assert code == 0, out + log
    rows = cells(out)
    assert len(rows) == 18
    assert {len(row) for row in rows} == {WAYS}
    assert all(set(row) <= {"equal", "-"} for row in rows)
    # The mixed ways need two pictures; most cases have them.
    assert sum("-" not in row for row in rows) == 8
    assert "All ways agree on 18 of 18 answers." in out
    assert "three blue circles" in out


def test_another_models_texts_are_told_as_different(system: Addresses, tmp_path: Path) -> None:
    other = build_tiny_llava(tmp_path / "other", seed=1)
    one = ("--pictures", str(SAMPLES / "star.png"), "--max-tokens", "8")
    code, out, log = compared(system, "--model", str(other), *one)
    assert code == 1, out + log
    for row in cells(out):
        assert set(row[:WAYS_OVER_NETWORK]) <= {"equal", "-"}
        assert row[WAYS_OVER_NETWORK:] == ["DIFFERS", "DIFFERS"]
    assert "local tower" in out


def test_ones_own_questions_and_pictures_are_asked(system: Addresses, tmp_path: Path) -> None:
    questions = tmp_path / "questions.txt"
    questions.write_text("What digit is shown?\n\nWhat colour is the digit?\n", encoding="utf-8")
    given = ("--pictures", str(SAMPLES / "seven.png"), "--questions", str(questions))
    code, out, log = compared(system, *given)
    assert code == 0, out + log
    assert "seven.png: '7'" in out
    assert "one picture, three turns: 2: 'green'" in out


def test_a_system_that_is_not_there_is_said_so(system: Addresses) -> None:
    absent = Addresses("http://127.0.0.1:9", system.llm, system.encoder)
    code, _, log = compared(absent)
    assert code == 2
    assert "the gateway at http://127.0.0.1:9 cannot be used" in log
    code, _, log = compared(Addresses(system.url, "127.0.0.1:9", system.encoder))
    assert code == 2
    assert "NOT_READY" in log
