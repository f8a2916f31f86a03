import re
import subprocess
import sys
from pathlib import Path

import pytest

import chiasm
from chiasm.cli import main
from chiasm.cli.arguments import read
from chiasm.cli.samples import demo_checkpoint, sample_pictures, sample_questions


def test_version_names_chiasm_and_what_it_runs_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    out = capsys.readouterr().out
    assert f"chiasm {chiasm.__version__}\n" in out
    assert re.search(r"^torch \d", out, re.MULTILINE)


def test_reading_a_command_line_loads_nothing_large() -> None:
    large = "{'torch', 'transformers', 'numpy', 'grpc', 'openai', 'rich'}"
    program = (
        "import sys, chiasm.cli; chiasm.cli.main(['version']);"
        f"print(sorted({large} & set(sys.modules)))"
    )
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert out.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("command", ["up", "demo", "compare", "plan", "version"])
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: chiasm {command}")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "COMMAND"),
        (["sing"], "invalid choice: 'sing'"),
        (["up", "--port", "65536"], "a port is 0 to 65535"),
        (["up", "--encoders", "0"], "at least 1"),
        (["up", "--model", "no-such-place"], "no-such-place does not exist"),
        (["demo", "--ready-timeout", "nan"], "a number of seconds above 0"),
        (["compare", "--max-tokens", "x"], "invalid"),
    ],
)
def test_a_faulty_command_line_is_refused_with_the_mend(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_encoders_without_remote_vision_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--vision", "local", "--encoders", "2"]) == 2
    assert "--vision remote only" in capsys.readouterr().err


def test_a_model_that_is_a_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(SystemExit):
        read(["up", "--model", str(file)])
    assert "is not a directory" in capsys.readouterr().err


def test_the_demo_model_is_shipped_with_its_pictures_and_questions() -> None:
    assert (demo_checkpoint() / "config.json").is_file()
    asked = {sample.picture for sample in sample_questions()}
    assert asked == set(sample_pictures())
    assert all(sample.question and sample.answer for sample in sample_questions())
