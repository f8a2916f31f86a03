"""The committed stubs are those of the committed schema."""

import importlib
import subprocess
import sys
from pathlib import Path

from chiasm.errors import Reason
from chiasm.v1 import error_pb2

ROOT = Path(__file__).resolve().parents[2]


def test_regenerating_the_stubs_changes_nothing(tmp_path: Path) -> None:
    generator = [sys.executable, str(ROOT / "proto" / "generate.py"), str(tmp_path)]
    search = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    subprocess.run(generator, check=True, capture_output=True, env={"PATH": search})
    fresh = {path.name: path.read_text() for path in (tmp_path / "chiasm" / "v1").iterdir()}
    kept = {
        path.name: path.read_text()
        for path in (ROOT / "chiasm" / "v1").iterdir()
        if path.name.split("_pb2")[0] != path.name and path.is_file()
    }
    assert fresh == kept


def test_the_schema_is_clean_by_bufs_rules() -> None:
    buf = Path(sys.executable).parent / "buf"
    outcome = subprocess.run([str(buf), "lint"], cwd=ROOT / "proto", capture_output=True, text=True)
    assert (outcome.returncode, outcome.stdout) == (0, "")


def test_every_reason_of_the_code_is_in_the_schema_and_back() -> None:
    prefix = "ERROR_REASON_"
    names = {name.removeprefix(prefix) for name in dict(error_pb2.ErrorReason.items())}
    assert names - {"UNSPECIFIED"} == {reason.value for reason in Reason}


def test_importing_the_client_loads_no_torch() -> None:
    code = "import sys, chiasm; chiasm.Client; print('torch' in sys.modules)"
    outcome = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert outcome.stdout.strip() == "False"
    assert importlib.import_module("chiasm").__version__
