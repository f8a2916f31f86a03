"""Regenerates the stubs under `chiasm/v1/` from `proto/chiasm/v1/` (`python proto/generate.py`)."""

import sys
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent


def generate(out: Path) -> None:
    """Writes `*_pb2.py`, `*_pb2.pyi`, `*_pb2_grpc.py` and their types under `out`."""
    sources = sorted(str(path) for path in (ROOT / "proto" / "chiasm" / "v1").glob("*.proto"))
    arguments = [
        "protoc",
        f"--proto_path={ROOT / 'proto'}",
        f"--python_out={out}",
        f"--mypy_out=quiet:{out}",
        f"--grpc_python_out={out}",
        f"--mypy_grpc_out=quiet:{out}",
        *sources,
    ]
    if protoc.main(arguments) != 0:
        raise SystemExit("protoc failed; its message is above")


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
