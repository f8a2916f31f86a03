"""`chiasm plan`: what it prints, and what it refuses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from chiasm.cli import main
from chiasm.cli.measured import Unmeasurable, line_through
from chiasm.cli.samples import demo_checkpoint
from chiasm.sizing.answers import StepLine

LOAD = ["plan", "--requests", "10", "--pictures", "0:.4,1:.4,4:.2", "--rows", "576:.7,2304:.3"]
RATES = ["--encode-seconds", ".01", "--encode-seconds-a-row", ".0001",
         "--step-seconds", ".012", "--step-seconds-a-token", ".00003"]  # fmt: skip
STEP = ["--step-seconds", ".01"]


def test_people_see_the_needed_numbers_between_one_less_and_one_more(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*LOAD, *RATES, "--width", "4096", "--dtype", "bfloat16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("10 requests/s: 1.2 pictures each")
    table = [line.split() for line in lines[lines.index("") + 2 :][:4]]
    assert [row[0] if row[0] != "->" else row[1] for row in table] == ["encoders", "2", "3", "4"]
    assert table[2][0] == "->"
    assert any("Network" in line and "8.97 MB a picture" in line for line in lines)


def test_json_has_the_same_numbers_and_the_rates_they_rest_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*LOAD, *RATES, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["rates"]["encode"] == {"fixed": 0.01, "each": 0.0001}
    assert plan["encoders"]["needed"] == 3
    assert [one["replicas"] for one in plan["encoders"]["choices"]] == [2, 3, 4]
    assert plan["bytes_per_second"] is None


def test_a_checkpoint_gives_rows_of_sizes_and_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--requests", "1", "--sizes", "300x200:.5,64x64:.5", "--encode-seconds", ".1"]
    assert main([*words, *STEP, "--model", str(demo_checkpoint()), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["traffic"]["rows"] == [[16, 0.5], [16, 0.5]]
    assert plan["picture_bytes"] == 16 * 192 * 4
    tokens = plan["llm_services"]["choices"][0]["kv_bytes"] / (2 * 3 * 3 * 64 * 4)
    assert tokens % 16 == pytest.approx(0, abs=1e-3) or tokens > 16


def ended(words: list[str]) -> object:
    """The exit code, of the command or of its flags' reader."""
    try:
        return main(words)
    except SystemExit as left:
        return left.code


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["plan"], 2, "--requests"),
        (
            ["plan", "--requests", "0", *STEP],
            2,
            "argument --requests: 0 is not within 1e-06 to 1e+06",
        ),
        (["plan", "--requests", "nan", *STEP], 2, "nan is not a finite number"),
        (["plan", "--requests", "1", *STEP], 2, "--rows or --sizes must say"),
        (["plan", "--requests", "1", "--rows", "5", *STEP], 2, "--encode-seconds must say"),
        (["plan", "--requests", "1", "--pictures", "0"], 2, "--step-seconds must say"),
        (["plan", "--requests", "1", "--pictures", "0", "--step-seconds", "0"], 2, "above 0"),
        (["plan", "--requests", "1", "--pictures", "1:.5,2:.6", *STEP], 2, "add up to 1.1"),
        (["plan", "--requests", "1", "--pictures", "65", *STEP], 2, "are 0 to 64"),
        (["plan", "--requests", "1", "--pictures", "1.5:1", *STEP], 2, "a whole number, 0 to 64"),
        (["plan", "--requests", "1", "--rows", "0", *STEP], 2, "a whole number, 1 to 1000000"),
        (["plan", "--requests", "1", "--rows", "5,6:1", *STEP], 2, "'5' has no share"),
        (["plan", "--requests", "1", "--sizes", "5by5", *STEP], 2, "write WIDTHxHEIGHT"),
        (["plan", "--requests", "1", "--sizes", "5x5", *STEP], 2, "--sizes needs --model"),
        ([*LOAD, *RATES, "--sizes", "5x5"], 2, "--rows and --sizes both say"),
        ([*LOAD, *RATES, "--utilisation", "1"], 2, "above 0, to 0.98"),
        ([*LOAD, *RATES, "--cache-hits", "2"], 2, "argument --cache-hits: 2 is no share: 0 to 1"),
        ([*LOAD, *RATES, "--measure"], 2, "--measure needs --encoder HOST:PORT"),
        ([*LOAD, *RATES, "--llm", "x:1"], 2, "add --measure"),
        ([*LOAD, *RATES, "--kv-bytes", "5"], 2, "--kv-bytes needs --model or --kv-bytes-a-token"),
        ([*LOAD, *RATES, "--decode-stretch", "0.5"], 2, "--decode-stretch must be above 1"),
        ([*LOAD, *RATES, "--max-running", "1000"], 2, "--step-token-budget must be at least"),
        ([*LOAD, *RATES, "--encode-wait", "0"], 2, "argument --encode-wait: a time to be kept"),
        ([*LOAD, *RATES, "--encode-seconds", "1e300"], 2, "argument --encode-seconds: 1e300 is no"),
        ([*LOAD, *RATES, "--encode-seconds-a-row", "1e-300"], 2, "is no time of work"),
        ([*LOAD, *RATES, "--encode-variation", "1e6"], 2, "is not within 0 to 10"),
        ([*LOAD, *RATES, "--requests", "1e6"], 1, "more than 4096 encoders"),
        ([*LOAD, *RATES, "--text-tokens", "1e7"], 1, "more than 4096 LLM services"),
        ([*LOAD, *RATES, "--encode-wait", "1e-9"], 1, "raise --encode-wait"),
        ([*LOAD, *RATES, "--token-seconds", "1e-9"], 1, "raise --token-seconds"),
        (
            [*LOAD, *RATES, "--kv-bytes", "5", "--kv-bytes-a-token", "5"],
            1,
            "raise --kv-bytes",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused_with_the_flag(
    words: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(words) == code
    assert said in capsys.readouterr().err


def test_a_directory_that_is_no_checkpoint_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*LOAD, *RATES, "--model", str(tmp_path)]) == 2
    assert "--model: " in capsys.readouterr().err


def test_planning_from_flags_loads_nothing_large() -> None:
    program = (
        f"import sys, chiasm.cli; chiasm.cli.main({[*LOAD, *RATES]!r});"
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert out.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("points", "line"),
    [
        ([(1, 0.011), (8, 0.018), (512, 0.522)], StepLine(0.01, 0.001)),
        ([(5, 0.1), (5, 0.1)], StepLine(0.1, 0)),
        ([(1, 0.2), (10, 0.1)], StepLine(0.12, 0)),
        ([(1, 0.1), (10, 1.2)], StepLine(0, 0.11)),
    ],
)
def test_a_line_of_measurements_neither_falls_nor_begins_below_zero(
    points: list[tuple[float, float]], line: StepLine
) -> None:
    found = line_through(points)
    assert found.each == pytest.approx(line.each, rel=0.12, abs=1e-9)
    assert found.fixed == pytest.approx(line.fixed, rel=0.01, abs=1e-9)


def test_a_time_of_nothing_is_no_measurement() -> None:
    with pytest.raises(Unmeasurable):
        line_through([(1, 0.0), (2, 1.0)])
